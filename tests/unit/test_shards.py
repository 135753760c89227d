"""Shards: layouts cut to ranks, and the shardings that residencies allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.pack_chunks import pack_chunks
from protrain_compile import Plan, PlanError
from protrain_compile.chunks import ALIGNMENT_BYTES, ParameterSpec
from protrain_compile.shards import SHARDINGS, allowed_sharding


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_shards_of_all_ranks_make_up_every_chunk(sizes: list[int], ranks: int, dtype: torch.dtype) -> None:
    specs = [ParameterSpec(f"p{i}", (size,), dtype, True) for i, size in enumerate(sizes)]
    layout = pack_chunks(specs, [], 4096, ranks)
    found: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for rank in range(ranks):
        here = layout.shard(rank, ranks)
        assert here.place_of == layout.place_of
        for chunk, whole in zip(here.chunks, layout.chunks, strict=True):
            assert chunk.numel * ranks == whole.numel
            assert chunk.size_bytes % ALIGNMENT_BYTES == 0
            for slot, original in zip(chunk.slots, whole.slots, strict=True):
                begin = rank * chunk.numel + slot.offset - original.offset
                found[slot.parameter] += range(begin, begin + slot.numel) if slot.numel else ()
                assert 0 <= slot.offset <= slot.offset + slot.numel <= chunk.numel
    assert found == {i: list(range(size)) for i, size in enumerate(sizes)}


def test_one_rank_holds_everything() -> None:
    specs = [ParameterSpec("a", (100,), torch.float32, True), ParameterSpec("b", (7, 3), torch.float32, True)]
    layout = pack_chunks(specs, [], None, 1)
    assert layout.shard(0, 1) == layout == pack_chunks(specs, [])


def test_more_ranks_than_elements_leave_padding() -> None:
    layout = pack_chunks([ParameterSpec("scalar", (), torch.float32, True)], [], None, 4)
    assert [layout.shard(rank, 4).chunks[0].slots[0].numel for rank in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("wanted", SHARDINGS)
def test_residency_bounds_sharding(wanted: str) -> None:
    assert allowed_sharding("persistent", wanted) == wanted  # type: ignore[arg-type]
    assert allowed_sharding("offloaded", wanted) == "parameters"  # type: ignore[arg-type]
    assert allowed_sharding("split", wanted) == "gradients"  # type: ignore[arg-type]


def test_a_uniform_sharding_gives_way_to_residency() -> None:
    plan = Plan.uniform(sharding="states")
    assert plan.fit_sharding(("persistent", "offloaded", "split")) == ("states", "parameters", "gradients")
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.uniform().fit_sharding(("persistent",)) is None


def test_a_sharding_per_chunk_has_to_fit() -> None:
    plan = Plan(uniform_policy="keep", sharding=("states", "parameters"))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.fit_sharding(("persistent", "offloaded")) == ("states", "parameters")
    with pytest.raises(PlanError, match="sharding of 2 chunks, but this model has 1"):
        plan.fit_sharding(("persistent",))
    with pytest.raises(PlanError, match="chunk 0 is offloaded, so its sharding is parameters, not states"):
        plan.fit_sharding(("offloaded", "offloaded"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharding": ("states",), "uniform_sharding": "states"}, "not both"),
        ({"sharding": ("optimizer",)}, "unknown sharding 'optimizer'; the shardings are states, gradients, parameters"),
        ({"uniform_sharding": "all"}, "unknown sharding 'all'"),
    ],
)
def test_malformed_shardings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(uniform_policy="keep", **fields)  # type: ignore[arg-type]
