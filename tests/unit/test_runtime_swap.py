"""The swap space: values come back as they were, slabs are used again, and nothing is freed under a copy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from protrain_compile import ops, swap_layout
from protrain_compile.runtime.host_budget import HostBudget, HostMemoryError
from protrain_compile.runtime.host_memory import HostMemory
from protrain_compile.runtime.streams import CpuStreams
from protrain_compile.runtime.swap import SwapSpace


class Log(CpuStreams):
    """The CPU as a device, with a record of what it was asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def record(self, event: Any, stream: str) -> None:
        self.calls.append(("record", event, stream))

    def wait(self, event: Any, stream: str) -> None:
        self.calls.append(("wait", event, stream))

    def copy(self, target: Tensor, source: Tensor, stream: str) -> None:
        self.calls.append(("copy", stream))
        super().copy(target, source, stream)

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def odd_values() -> list[Tensor]:
    """Return values such as backwards save, in shapes and kinds that are easily got wrong."""
    base = torch.randn(4, 6, 5)
    q, k, v = torch.randn(2, 7, 3, 4).unbind(2)
    return [
        base,
        base.transpose(0, 2),
        base[1:3, ::2],
        base[:, 0].expand(3, 4, 5),
        torch.randn(4, 1).expand(4, 9),
        q,
        k.transpose(1, 2),
        v,
        torch.arange(9, dtype=torch.int64).view(3, 3).t(),
        torch.randn(33) > 0,
        (torch.randn(5, 5) > 0)[1:, 2],
        torch.zeros(0, 3),
        torch.zeros(2, 0).t(),
        torch.tensor(3.5),
        torch.randn(6, dtype=torch.bfloat16)[1:4],
        torch.randn(3, 4, dtype=torch.complex64).t(),
        torch.randn(64, dtype=torch.float64).view(torch.float32)[3:9],
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.as_strided(torch.arange(10.0), (4, 3), (2, 1), 1),
    ]


def there_and_back(space: SwapSpace, values: list[Tensor]) -> tuple[Tensor, ...]:
    swapped = ops.swap_out(space, list(values), segment=0, stream="d2h")
    ops.release_swapped(space, swapped, segment=0, stream="compute")
    reloaded = ops.reload(space, swapped, segment=0, stream="h2d")
    return ops.wait_reload(space, reloaded, segment=0, stream="compute")


def assert_equal_values(found: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual.shape, actual.stride(), actual.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert actual.untyped_storage().data_ptr() != wanted.untyped_storage().data_ptr() or not wanted.numel()
        assert torch.equal(bits(actual), bits(wanted))


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("small_bytes", [0, 100, 1 << 20], ids=["every piece alone", "both", "one bundle"])
def test_values_come_back_as_they_were(small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_layout, "SMALL_BYTES", small_bytes)
    space = SwapSpace(CpuStreams())
    values = odd_values()
    assert_equal_values(there_and_back(space, values), values)
    for value in values:
        assert_equal_values(there_and_back(space, [value]), [value])
    for pair in itertools.combinations(values[:8], 2):
        assert_equal_values(there_and_back(space, list(pair)), list(pair))


def test_views_share_their_memory_again() -> None:
    base = torch.randn(4, 6)
    found = there_and_back(SwapSpace(CpuStreams()), [base, base.t(), base[1]])
    found[0].zero_()
    assert not any(value.any() for value in found)


def test_nothing_to_move() -> None:
    space = SwapSpace(CpuStreams())
    (found,) = there_and_back(space, [torch.zeros(0, 3)])
    assert found.shape == (0, 3)
    assert space.slabs == 0


def test_slabs_are_used_again() -> None:
    space = SwapSpace(CpuStreams())
    for _ in range(3):
        handles = [space.swap_out([torch.randn(1000)]) for _ in range(2)]
        for handle in handles:
            space.release(handle)
        assert (space.slabs, space.free_slabs) == (2, 0)
        del handles, handle
        assert (space.slabs, space.free_slabs) == (2, 2)


def test_a_slab_that_is_too_small_is_replaced() -> None:
    space = SwapSpace(CpuStreams())
    for size in (1000, 2000, 500, 2000):
        values = [torch.randn(size)]
        assert_equal_values(there_and_back(space, values), values)
    assert space.slabs == 1
    assert space.host_bytes >= 8000


def test_two_forwards_have_slabs_of_their_own() -> None:
    space = SwapSpace(CpuStreams())
    values = [[torch.randn(100)], [torch.randn(100)]]
    handles = [space.swap_out(list(each)) for each in values]
    for handle in handles:
        space.release(handle)
    for each, handle in zip(values, handles, strict=True):
        for _ in range(2):  # as under retain_graph
            assert_equal_values(space.wait_reload(space.reload(handle)), each)


def test_sources_live_until_their_copy_has_left() -> None:
    space = SwapSpace(CpuStreams())
    large, small = torch.randn(1 << 21), [torch.randn(3), torch.randn(3)]
    storages = [StorageWeakRef(value.untyped_storage()) for value in (large, *small)]
    swapped = ops.swap_out(space, [large, *small], segment=0, stream="d2h")
    del large, small
    assert [storage.expired() for storage in storages] == [False, True, True]  # small ones were gathered
    space.release(swapped)
    assert [storage.expired() for storage in storages] == [True, True, True]


def test_what_waits_for_what() -> None:
    streams = Log()
    space = SwapSpace(streams)
    swapped = space.swap_out([torch.randn(100)])
    place = swapped.place
    assert place is not None
    assert streams.take() == [
        ("record", place.made, "compute"),
        ("wait", place.made, "d2h"),
        ("wait", place.read, "d2h"),
        ("copy", "d2h"),
        ("record", place.left, "d2h"),
    ]
    space.release(swapped)
    assert streams.take() == [("wait", place.left, "compute")]
    reloaded = space.reload(swapped)
    assert streams.take() == [
        ("record", reloaded.arrived, "compute"),
        ("wait", reloaded.arrived, "h2d"),
        ("wait", place.left, "h2d"),
        ("copy", "h2d"),
        ("record", reloaded.arrived, "h2d"),
        ("record", place.read, "h2d"),
    ]
    space.wait_reload(reloaded)
    assert streams.take() == [("wait", reloaded.arrived, "compute")]


def test_small_pieces_leave_in_one_copy() -> None:
    streams = Log()
    SwapSpace(streams).swap_out([torch.randn(100), torch.randn(200), torch.arange(7)])
    assert [call for call in streams.take() if call[0] == "copy"] == [("copy", "d2h")]


def test_after_an_exception_compute_waits_for_copies_under_way() -> None:
    streams = Log()
    space = SwapSpace(streams)
    leaving = space.swap_out([torch.randn(100)])
    arriving = space.reload(leaving)
    streams.take()
    space.settle()
    assert leaving.place is not None
    assert streams.take() == [("wait", leaving.place.left, "compute"), ("wait", arriving.arrived, "compute")]
    space.settle()
    assert streams.take() == []
    del leaving, arriving
    assert space.free_slabs == space.slabs == 1


def bounded(tmp_path: Path, size_bytes: int) -> SwapSpace:
    (tmp_path / "meminfo").write_text("MemAvailable:  100000000 kB\n")
    return SwapSpace(CpuStreams(), HostMemory(), HostBudget(size_bytes, tmp_path, tmp_path))


def test_a_budget_that_is_too_small_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    space = bounded(tmp_path, 10_000)
    with pytest.raises(HostMemoryError, match="swapped activations needs "):
        space.reserve([4096, 4096, 4096])
    assert space.host_bytes == 0
    space.reserve([4096, 4096])
    with pytest.raises(HostMemoryError, match="host_memory_budget"):
        space.swap_out([torch.randn(5000)])


def test_slabs_too_small_make_room_for_larger_ones(tmp_path: Path) -> None:
    """As when sequences get longer; where there is room for both, both stay."""
    space = bounded(tmp_path, 10_000)
    space.reserve([2048, 2048])
    space.reserve([4096])
    assert space.slabs == 3
    space.reserve([4096, 4096])
    assert space.host_bytes == 4096 + 4096
    with pytest.raises(HostMemoryError):
        space.reserve([4096, 8192])


def test_what_is_reserved_is_used(tmp_path: Path) -> None:
    space = bounded(tmp_path, 10_000)
    for _ in range(2):
        space.reserve([4096, 2048])
        handles = [space.swap_out([torch.randn(n)]) for n in (1024, 512)]
        assert space.host_bytes == 4096 + 2048
        del handles


def test_close_gives_everything_back() -> None:
    memory = HostMemory()
    space = SwapSpace(CpuStreams(), memory)
    handle = space.swap_out([torch.randn(100)])
    assert memory.held_bytes == space.host_bytes > 0
    space.close()
    space.close()
    assert memory.held_bytes == space.host_bytes == 0
    del handle
