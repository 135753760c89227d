"""Every fault of one node, and every wait left out, that does harm is found by the verifier; the others are explained.

Which do harm is decided by running them (``support.mutants``); the verifier and its table take no part in that.
"""

from __future__ import annotations

import pytest
from support.missing_waits import dropped_waits_of, is_missed, uses_own_buffer, why_not_missed
from support.mutants import Judge, Mutant, is_found, mutants_of, neighbour
from support.schedules import swapped_schedule
from torch import fx

from passes.chunk_views import schedule_operations
from protrain_compile import ops
from protrain_compile.schedule import Schedule


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(swapped_schedule())


# ---- nodes ---------------------------------------------------------------------------------------------------------

REPEATS = {
    ops.prefetch: "the buffer holds the chunk already",
    ops.wait: "the chunk has arrived already",
    ops.release: "marks the same point of the compute stream again",
    ops.collect: "writes the same gradients to the same place",
    ops.release_swapped: "the copy has been waited for already",
}
"""Why an operation may come twice without harm."""
REFUSED = (ops.release, ops.collect, ops.release_swapped)
"""What the verifier wants once all the same: a stay ends once, a gradient is reduced once, values are released once."""


def why_harmless(mutant: Mutant, schedule: Schedule) -> str:
    """Return the rule by which a mutant does no harm; empty if none says so."""
    node = mutant.original(schedule)
    own_buffer = uses_own_buffer(node, schedule)
    if mutant.change == "repeated":
        persistent_collect = node.target is ops.collect and "buffer" not in node.kwargs
        return "" if persistent_collect else REPEATS.get(node.target, "")  # type: ignore[arg-type]
    if node.target is ops.release and own_buffer:
        return "a split chunk's own buffer is filled anew only after its update, which follows an offload from it"
    if mutant.change in ("earlier", "later"):
        other = neighbour(node, -1 if mutant.change == "earlier" else 1)
        if other is not None and are_independent(schedule, mutant.graph, node, other):
            return "moved past an operation on other chunks, buffers and values"
    return ""


def are_independent(schedule: Schedule, graph: str, node: fx.Node, other: fx.Node) -> bool:
    """Whether two operations share no chunk, no buffer and no value; nor are items of ``node`` taken in between."""
    if any(user < other or user is other for user in node.users):
        return False
    here, there = (used_by(schedule, graph, each) for each in (node, other))
    return not here & there


def used_by(schedule: Schedule, graph: str, node: fx.Node) -> set[object]:
    """Return what an operation works on: chunks, buffers, values."""
    call = next(each.call for each in schedule_operations(schedule)[graph] if each.node is node)
    accesses = [each for each in (*call.inputs, call.result) if each is not None]
    values = {each.resource for each in accesses if each.resource.kind == "value"}
    chunks = {("chunk", each.content.key) for each in accesses if each.resource.kind != "value"}
    named = {(key, node.kwargs[key]) for key in ("chunk", "buffer") if node.kwargs.get(key) is not None}
    return values | chunks | named


def test_every_harmful_mutant_is_found_and_every_other_is_explained(judge: Judge) -> None:
    schedule = judge.schedule
    found = harmless = 0
    for mutant in mutants_of(schedule):
        harm, why = judge.harm_of(mutant), why_harmless(mutant, schedule)
        refused = is_found(mutant.of(schedule))
        if harm:
            assert refused, f"{mutant}: {harm}, and the verifier does not see it"
            assert not why, f"{mutant}: {harm}, but: {why}"
            found += 1
            continue
        assert why, f"{mutant} does no harm, and no rule says why"
        strict = mutant.change == "repeated" and mutant.original(schedule).target in REFUSED
        assert refused == strict or (refused and "own buffer" in why), f"{mutant} does no harm: {why}"
        harmless += 1
    assert found > 80
    assert harmless > 40


# ---- waits ---------------------------------------------------------------------------------------------------------


def test_every_wait_that_is_missed_is_found_and_every_other_is_explained(judge: Judge) -> None:
    schedule = judge.schedule
    missed = explained = 0
    for dropped in dropped_waits_of(schedule):
        harm, why = judge.harm_of(dropped), why_not_missed(dropped, schedule)
        assert is_missed(schedule, dropped) == bool(harm), f"{dropped} {harm or 'does no harm'}"
        assert bool(why) != bool(harm), f"{dropped} {harm or 'does no harm'}, and why: {why!r}"
        missed += bool(harm)
        explained += bool(why)
    assert missed > 30
    assert explained > 10
