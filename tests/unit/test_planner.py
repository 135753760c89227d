"""The greedy residency and the number of buffers."""

from __future__ import annotations

import pytest
import torch

from passes.pack_chunks import pack_chunks
from protrain_compile import Plan, PlanError
from protrain_compile.chunks import ChunkLayout, ParameterSpec, Residency
from protrain_compile.plan import MIN_BUFFERS
from protrain_compile.planner import DEFAULT_BUFFERS, choose_residency, default_buffers


def layout_of(chunks: int) -> ChunkLayout:
    """Return chunks of 1,024 bytes."""
    specs = [ParameterSpec(f"p{i}", (256,), torch.float32, True) for i in range(chunks)]
    return pack_chunks(specs, [[i] for i in range(chunks)], 1024)


def states(chunk: object) -> int:
    return 3 * 1024


def test_the_plan_decides() -> None:
    layout = layout_of(3)
    assert choose_residency(layout, Plan.uniform(residency="split"), 1, states) == ("split",) * 3
    wanted = ("offloaded", "persistent", "split")
    assert choose_residency(layout, Plan(uniform_policy="keep", residency=wanted), 1, states) == wanted
    with pytest.raises(PlanError, match="residency of 3 chunks, but this model has 2"):
        choose_residency(layout_of(2), Plan(uniform_policy="keep", residency=wanted), 1, states)


def test_all_persistent_where_they_fit() -> None:
    layout = layout_of(8)
    assert set(choose_residency(layout, None, None, states)) == {"persistent"}
    assert set(choose_residency(layout, None, 2 * 8 * 4096, states)) == {"persistent"}


def test_persistent_from_the_front() -> None:
    layout = layout_of(8)
    found = choose_residency(layout, None, 2 * (DEFAULT_BUFFERS * 1024 + 3 * 4096), states)
    assert found == ("persistent",) * 3 + ("offloaded",) * 5
    assert set(choose_residency(layout, None, 0, states)) == {"offloaded"}


@pytest.mark.parametrize(("offloaded", "wanted"), [(0, MIN_BUFFERS), (2, MIN_BUFFERS), (9, DEFAULT_BUFFERS)])
def test_buffers(offloaded: int, wanted: int) -> None:
    residency: tuple[Residency, ...] = ("offloaded",) * offloaded + ("persistent",) * (10 - offloaded)
    assert default_buffers(residency) == wanted
