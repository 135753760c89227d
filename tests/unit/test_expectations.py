"""What one simulated plan says of others, in numbers made up by hand."""

from __future__ import annotations

import dataclasses

from support.made_shapes import MB, Stack

from protrain_compile.cost_model import rates_of
from protrain_compile.expectations import Expectations
from protrain_compile.plan_rows import Group, PlanRows
from protrain_compile.plan_space import PlanSpace
from protrain_compile.time_bounds import TimeBounds


def groups() -> dict[tuple[int, int, str], Group]:
    """Return groups by their steps of recomputing, persistent chunks, and what the other chunks are."""
    stack = Stack(blocks=20)
    shape, profile = stack.shape(), stack.profile()
    rows = PlanRows(PlanSpace(shape, profile), TimeBounds(shape, profile, rates_of(shape, profile)))
    found = [group for pattern in rows.patterns for group in rows.groups(pattern, 10**6 * MB, 10**6 * MB)]
    return {(each.pattern.steps, each.row.persistent, each.row.rest): each for each in found}


def test_plans_of_one_residency() -> None:
    """Each recomputed block computes 4 ms more."""
    known, of = Expectations(), groups()
    known.note(of[8, 3, "offloaded"], 5, 100.0)
    for steps, buffers, expected in ((8, 5, 100.0), (8, 6, 0.0), (8, 3, 100.0), (12, 4, 100.0), (5, 4, 88.0)):
        assert known.least_ms(of[steps, 3, "offloaded"], buffers) == expected
    known.note(of[5, 3, "offloaded"], 4, 90.0)
    assert known.least_ms(of[5, 3, "offloaded"], 4) == 90.0
    for persistent, rest in ((4, "offloaded"), (3, "split")):
        assert known.least_ms(of[8, persistent, rest], 3) == 0.0


def test_neighbours_bounds_are_off_alike() -> None:
    """Of 42 blocks and chunks, two may differ."""
    known, of = Expectations(), groups()
    made = of[8, 3, "offloaded"]
    known.note_judged(made, 1.5 * made.first_ms)
    for steps, persistent, is_near in ((9, 4, True), (10, 3, True), (10, 4, False), (8, 6, False)):
        other = of[steps, persistent, "offloaded"]
        alike = dataclasses.replace(other, bound_by=made.bound_by)
        assert known.judged_ms(alike) == (1.5 * alike.first_ms if is_near else 0.0)
        assert known.judged_ms(dataclasses.replace(other, bound_by="something else")) == 0.0
    assert known.judged_ms(of[8, 3, "split"]) == 0.0


def test_a_neighbour_with_fewer_buffers_says_nothing() -> None:
    """It may wait for copies that more buffers would bring in time; from some number on, none do."""
    of = groups()
    made = of[8, 3, "offloaded"]
    for theirs, ours, counts in ((4, 5, False), (5, 5, True), (6, 5, True), (8, 12, True)):
        known = Expectations()
        known.note_judged(dataclasses.replace(made, counts=range(3, theirs + 1)), 1.5 * made.first_ms)
        assert bool(known.judged_ms(dataclasses.replace(made, counts=range(3, ours + 1)))) == counts
