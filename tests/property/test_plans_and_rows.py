"""Plans, rows and liveness of random plans: nothing is lost, nothing is negative."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.capture import gpt_program, write_schedule

from protrain_compile import Plan, PlanError
from protrain_compile.liveness import saved_bytes, schedule_liveness
from protrain_compile.plan import POLICIES
from protrain_compile.report.render import format_numbers
from protrain_compile.report.rows import Fold, fold, schedule_rows, unfold
from protrain_compile.report.units import format_bytes
from protrain_compile.roles import RECOMPUTES

policies = st.sampled_from(POLICIES)
names = st.text('blocks.0123é"\\', max_size=12)
BLOCKS = 5


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any Plan: uniform, or by block with or without block names."""
    if draw(st.booleans()):
        return Plan.uniform(draw(policies))
    chosen: Any = tuple(draw(st.lists(policies, max_size=12)))
    blocks = tuple(draw(names) for _ in chosen) if draw(st.booleans()) else None
    return Plan(policies=chosen, blocks=blocks)


@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_mapping(json.loads(plan.to_json())) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)


@given(plans(), st.lists(names, max_size=12, unique=True))
def test_a_plan_fits_or_is_refused(plan: Plan, blocks: list[str]) -> None:
    right_length = plan.policies is None or len(plan.policies) == len(blocks)
    if not right_length or plan.blocks not in (None, tuple(blocks)):
        with pytest.raises(PlanError, match="plan"):
            plan.fit(blocks)
        return
    fitted = plan.fit(blocks)
    assert fitted.policies is not None
    assert len(fitted.policies) == len(blocks)
    assert fitted.fit(blocks) == fitted


@settings(max_examples=25, deadline=None)
@given(st.lists(policies, min_size=BLOCKS, max_size=BLOCKS))
def test_the_schedule_of_a_random_plan(chosen: list[Any]) -> None:
    schedule = write_schedule(gpt_program(BLOCKS), Plan(policies=tuple(chosen)))
    alive, rows = schedule_liveness(schedule), schedule_rows(schedule)
    saved = sum(saved_bytes(schedule).values())
    for name, found in rows.items():
        shown = list(fold(schedule, found))
        assert list(unfold(shown)) == found
        assert sum(each.count for each in shown if isinstance(each, Fold)) < BLOCKS
        assert all(alive[name].held_bytes <= row.live_bytes <= alive[name].peak_bytes for row in found)
        assert alive[name].end_bytes >= alive[name].held_bytes
    assert alive["forward"].end_bytes >= alive["forward"].held_bytes + saved
    assert sum(row.saved_bytes for found in rows.values() for row in found) == saved
    again = (*RECOMPUTES, "swap_products")
    recomputed = [row.operation.what for row in rows["backward"] if row.operation.op in RECOMPUTES]
    assert recomputed == [f"block {i}" for i in reversed(range(BLOCKS)) if chosen[i] in again]


@settings(max_examples=10, deadline=None)
@given(st.lists(policies, min_size=BLOCKS, max_size=BLOCKS), st.integers(0, BLOCKS - 1))
def test_recomputing_one_block_more_saves_bytes(chosen: list[Any], index: int) -> None:
    keep, recompute = list(chosen), list(chosen)
    keep[index], recompute[index] = "keep", "recompute"
    saved = [
        sum(saved_bytes(write_schedule(gpt_program(BLOCKS), Plan(policies=tuple(each)))).values())
        for each in (keep, recompute)
    ]
    assert saved[1] < saved[0]


@given(st.integers(0, 2**62))
def test_bytes_are_short(size: int) -> None:
    number, unit = format_bytes(size).split()
    assert len(number) <= 4 or unit == "GiB"
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * factor - size) <= 0.006 * size


@given(st.sets(st.integers(1, 60)))
def test_numbers_can_be_read_back(numbers: set[int]) -> None:
    found: list[int] = []
    for part in format_numbers(sorted(numbers)).split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)
