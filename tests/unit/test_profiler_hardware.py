from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protrain_compile.profile import Format, HardwareProfile
from protrain_compile.profiler import hardware
from protrain_compile.profiler.hardware import (
    LARGE,
    SMALL,
    Sizes,
    fitting,
    host_bytes,
    measure_hardware,
    measure_updates,
)
from protrain_compile.profiler.link import UPDATES, CpuLink, Rates, measure_beside, measure_link, repeated
from protrain_compile.profiler.update_rates import (
    FORMATS,
    ROUNDS,
    WARM_UPS,
    host_arrays,
    host_gparams_per_s,
    segments_of,
    thread_counts,
)
from protrain_compile.runtime.device_budget import DeviceMemoryError
from protrain_compile.runtime.host_memory import HostMemory

CPU = torch.device("cpu")
TINY = Sizes(product=16, copy_bytes=4096, array_bytes=4096, parameters=1024, launches=5, heat_ms=0.0)


def test_everything_is_measured_on_the_cpu() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = measure_hardware(CPU, TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(found.matmul_tflops) == {"bfloat16", "float16", "float32"}
    assert set(found.device_update_gparams_per_s) == set(FORMATS)
    assert {(rate.format, rate.threads) for rate in found.host_updates} == {
        (format, threads) for format in FORMATS for threads in thread_counts()
    }
    assert found.device_bytes == found.host_bytes == host_bytes()
    assert torch.__version__ in found.source
    assert HardwareProfile.from_json(found.to_json()) == found  # all figures are above 0


class Recorded:
    """A link that says who copied, and how fast it pretends to be."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def rates(self, directions: tuple[str, ...]) -> Rates:
        self.asked.append(directions)
        speed = float(10 * len(self.asked))
        return Rates(*(speed + i if each in directions else 0.0 for i, each in enumerate(("h2d", "d2h"))))


def test_a_link_is_measured_alone_both_ways_and_beside_updates() -> None:
    link, updates = Recorded(), []
    alone, both = measure_link(link)
    beside, per_second = measure_beside(link, lambda: (updates.append(1), time.sleep(0.001)))
    ways = ("h2d", "d2h")
    assert link.asked[:4] == [ways, ("h2d",), ("d2h",), ways]
    assert set(link.asked[4:]) == {ways}
    assert alone == (20.0, 31.0)
    assert both == (40.0, 41.0)
    assert beside.d2h == beside.h2d + 1 > 50
    assert len(updates) >= UPDATES
    assert 0 < per_second < 1000


def test_only_wanted_formats_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(hardware, "host_arrays", lambda *given: (made.append(given[0]), host_arrays(*given))[1])
    found = measure_hardware(CPU, TINY, ("fp32",))
    assert {rate.format for rate in found.host_updates} == set(found.device_update_gparams_per_s) == {"fp32"}
    more = measure_updates(CPU, ("split", "fp16"), TINY)
    assert made == ["fp32", "split", "fp16"]
    both = found.with_updates(*more)
    assert both.host_update("fp32") == found.host_update("fp32")
    assert {rate.format for rate in both.host_updates} == set(both.device_update_gparams_per_s) == set(FORMATS)


def test_an_update_that_fails_is_not_waited_for() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        measure_beside(Recorded(), fail)


def test_repeating_ends_with_its_block() -> None:
    with repeated(lambda: time.sleep(0.001)) as ends:
        while len(ends) < 2:
            time.sleep(0.001)
    seen = len(ends)
    time.sleep(0.01)
    assert len(ends) == seen


def test_a_cpu_link_copies() -> None:
    link = CpuLink(64)
    link._pairs["h2d"][1].fill_(7)
    found = link.rates(("h2d",))
    assert bool((link._pairs["h2d"][0] == 7).all())
    assert found.h2d > 0
    assert found.d2h == 0


@pytest.mark.parametrize("format", FORMATS)
def test_host_arrays_are_what_an_update_takes(format: str) -> None:
    memory = HostMemory()
    states, gradient = host_arrays(format, 64, memory)  # type: ignore[arg-type]
    assert states.format.name.lower() == format
    assert gradient.dtype == states.param.dtype
    (segment,) = segments_of(states)
    assert (segment.begin, segment.end) == (0, 64)
    memory.close()


class Slept:
    """An updater whose rounds take as long as it is told."""

    def __init__(self, ms: list[float]) -> None:
        self.ms = ms

    def update(self, *given: object) -> None:
        time.sleep(self.ms.pop(0) / 1e3)


@pytest.mark.parametrize("busy", [False, True])
def test_a_host_that_others_load_is_told(busy: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One round that takes longer is none."""
    rounds = [200.0 if i in ((0, 3, 5) if busy else (3,)) else 50.0 for i in range(ROUNDS)]
    memory = HostMemory()
    arrays = host_arrays("split", 1000, memory)
    with caplog.at_level(logging.WARNING, "protrain_compile.profiler"):
        rate = host_gparams_per_s(Slept([1.0] * WARM_UPS + rounds), arrays)  # type: ignore[arg-type]
    memory.close()
    assert rate < 1000 / 0.05 / 1e9
    assert ("other work loads it" in caplog.text) == busy


def test_a_control_group_bounds_host_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "cgroup_folders", lambda _: [tmp_path])
    physical = host_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert host_bytes() == physical
    (tmp_path / "memory.max").write_text("4096\n")
    assert host_bytes() == 4096


def test_sizes_are_what_the_device_has_room_for() -> None:
    assert fitting(LARGE, 4 * LARGE.device_bytes) == LARGE
    less = fitting(LARGE, LARGE.device_bytes)
    assert less != LARGE
    assert 2 * less.device_bytes <= LARGE.device_bytes
    assert fitting(LARGE, 0).device_bytes <= SMALL.device_bytes


def test_less_is_measured_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Sizes] = []
    measure = hardware._measure

    def short(device: torch.device, sizes: Sizes, formats: Sequence[Format]) -> HardwareProfile:
        tried.append(sizes)
        if len(tried) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(device, TINY, formats)

    monkeypatch.setattr(hardware, "_measure", short)
    assert measure_hardware(CPU, LARGE).cores > 0
    assert tried == [LARGE, LARGE.halved(), LARGE.halved().halved()]


def test_no_room_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device, sizes: Sizes, formats: Sequence[Format]) -> HardwareProfile:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hardware, "_measure", fail)
    with pytest.raises(DeviceMemoryError, match="too little to measure"):
        measure_hardware(CPU, LARGE)
