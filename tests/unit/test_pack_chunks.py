"""pack_chunks: every parameter once, blocks together, kinds apart, aligned; and the choice of the capacity."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.pack_chunks import choose_capacity, pack_chunks
from protrain_compile.chunks import ALIGNMENT_BYTES, ChunkLayout, ParameterSpec


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, trainable)


def names(layout: ChunkLayout) -> list[list[str]]:
    return [[layout.parameters[slot.parameter].name for slot in chunk.slots] for chunk in layout.chunks]


def test_first_use_order_and_blocks_together() -> None:
    parameters = [spec(name, 64) for name in ("head", "a1", "a2", "b1", "b2", "stem", "spare")]
    order = [[5], [1, 2], [3, 4], [0, 5]]
    assert names(pack_chunks(parameters, order, 512)) == [["stem"], ["a1", "a2"], ["b1", "b2"], ["head", "spare"]]
    assert names(pack_chunks(parameters, order, 1024)) == [["stem", "a1", "a2"], ["b1", "b2", "head", "spare"]]


def test_a_tied_parameter_lies_where_it_is_used_first() -> None:
    parameters = [spec("tied", 64), spec("a", 64), spec("b", 64)]
    layout = pack_chunks(parameters, [[0], [1, 0], [2, 0]], 256)
    assert names(layout) == [["tied"], ["a"], ["b"]]


def test_kinds_have_chunks_of_their_own() -> None:
    parameters = [
        spec("w", 64),
        spec("frozen", 64, trainable=False),
        spec("half", 64, dtype=torch.bfloat16),
        spec("v", 64),
        spec("half frozen", 64, dtype=torch.bfloat16, trainable=False),
    ]
    layout = pack_chunks(parameters, [range(5)], 1 << 20)
    assert names(layout) == [["w", "v"], ["frozen"], ["half"], ["half frozen"]]
    assert [chunk.trainable for chunk in layout.chunks] == [True, False, True, False]


def test_larger_than_the_capacity() -> None:
    layout = pack_chunks([spec("small", 8), spec("huge", 10_000), spec("other", 8)], [[0], [1], [2]], 1_000)
    assert names(layout) == [["small"], ["huge"], ["other"]]


def test_scalars_and_nothing() -> None:
    layout = pack_chunks([spec("scalar"), spec("empty", 0, 3), spec("one", 1)], [], 1_000)
    assert [slot.numel for slot in layout.chunks[0].slots] == [1, 0, 1]
    assert pack_chunks([], [], None).chunks == ()
    only_empty = pack_chunks([spec("empty", 0)], [], None)
    assert only_empty.chunks[0].size_bytes == ALIGNMENT_BYTES


def test_capacity_of_equal_blocks_wastes_nothing() -> None:
    block = 40 << 20
    assert choose_capacity([block] * 12) == block
    assert choose_capacity([100] * 10) == 1_000  # small models share one chunk


SPECS = st.lists(
    st.builds(
        spec,
        st.just("p"),
        st.integers(0, 300),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        trainable=st.booleans(),
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(SPECS, st.data(), st.one_of(st.none(), st.integers(1, 4_000)))
def test_layouts_are_sound(parameters: list[ParameterSpec], data: st.DataObject, capacity: int | None) -> None:
    positions = st.integers(0, len(parameters) - 1) if parameters else st.nothing()
    uses = data.draw(st.lists(st.lists(positions, max_size=5), max_size=5)) if parameters else []
    layout = pack_chunks(parameters, uses, capacity)
    found = sorted(slot.parameter for chunk in layout.chunks for slot in chunk.slots)
    assert found == list(range(len(parameters)))
    for number, (chunk, slot) in enumerate(layout.place_of):
        assert layout.chunks[chunk].slots[slot].parameter == number
    for index, chunk in enumerate(layout.chunks):
        assert chunk.index == index
        end = 0
        for slot in chunk.slots:
            own = parameters[slot.parameter]
            assert (own.dtype, own.trainable) == (chunk.dtype, chunk.trainable)
            assert slot.offset >= end
            assert slot.offset * chunk.dtype.itemsize % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.numel
        assert end <= chunk.numel
        assert chunk.size_bytes % ALIGNMENT_BYTES == 0
