"""The table of effects says what the runtime does: every schedule, issued by both, waits and touches memory alike."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.rank_schedules import shared_schedule
from support.schedules import (
    MIXED,
    Blocks,
    mixed_schedule,
    prepared_model,
    prepared_schedule,
    swapped_schedule,
    take_tour,
)
from support.symbolic_ranks import runtime_for

import protrain_compile
from passes.chunk_views import schedule_operations
from passes.effects import EFFECTS, Step
from passes.rank_effects import RANK_EFFECTS, ledger_of
from passes.tours import STEP, Tour, backward, forward, issued_steps, tours_of
from protrain_compile import ops
from protrain_compile.schedule import Schedule

PRIVATE = ("value", "staging", "room", "slab")
"""Memory that the runtime allocates as it goes; the table names the values in it."""


@dataclasses.dataclass
class Issue:
    """What one operation did: per stream, its accesses, each with the waits before it."""

    what: str
    streams: dict[str, list[tuple[frozenset[Any], frozenset[Any], frozenset[Any]]]] = dataclasses.field(
        default_factory=dict
    )


class Issues:
    """Builds the list of what a tour issued. A wait is for the first so many accesses of a stream."""

    def __init__(self) -> None:
        self.found: list[Issue] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.waits: dict[str, set[tuple[str, int]]] = collections.defaultdict(set)

    def begin(self, what: str) -> None:
        self.end()
        self.found.append(Issue(what))

    def end(self) -> None:
        """Note waits that no access followed."""
        for stream in [each for each, waits in self.waits.items() if waits]:
            self.add(stream, (), ())

    def wait(self, stream: str, until: tuple[str, int]) -> None:
        if until[1] and until[0] != stream:
            self.waits[stream].add(until)

    def add(self, stream: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        entry = frozenset(self.waits.pop(stream, ())), frozenset(reads), frozenset(writes)
        self.found[-1].streams.setdefault(stream, []).append(entry)

    def access(self, stream: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Note an access; parts of one that come after each other are one."""
        reads, writes = frozenset(reads), frozenset(writes)
        if not reads and not writes:
            return
        entries = self.found[-1].streams.get(stream)
        if entries and not self.waits.get(stream) and writes and entries[-1][2] == writes:
            entries[-1] = (entries[-1][0], entries[-1][1] | reads, writes)
            return
        self.add(stream, reads, writes)
        self.counts[stream] += 1


def of_runtime(schedule: Schedule, tour: Tour) -> list[Issue]:
    """Return what the residency does along a tour."""
    assert schedule.chunks is not None
    runtime = runtime_for(schedule.chunks, tour.landings)
    take_tour(runtime, schedule, tour)
    issues, reached, before = Issues(), [], object()
    for each in runtime.trace.instructions:
        if each.node is not before:
            issues.begin("between graphs" if each.node is None else each.node.name)
            before = each.node
        if each.after is not None and each.event != "slab":
            issues.wait(each.stream, reached[each.after])
        shared = [[_named(name) for name in names if name[0] not in PRIVATE] for names in (each.reads, each.writes)]
        issues.access(each.stream, *shared)
        reached.append((each.stream, issues.counts[each.stream]))
    issues.end()
    return [issue for issue in issues.found if issue.streams]


def _named(memory: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the table's name of a memory: there a shard and the whole chunk around it are one."""
    kind, key = memory
    return ("parameters", key) if kind == "whole" else memory


def of_table(schedule: Schedule, tour: Tour) -> list[Issue]:
    """Return what the table says of a tour."""
    assert schedule.chunks is not None
    ledger = ledger_of(schedule.chunks, tour.landings)
    operations = schedule_operations(schedule)
    issues, recorded, before = Issues(), {}, object()
    for stop in tour.stops:
        for step, operation in issued_steps(stop, operations, ledger, schedule.chunks):
            if operation is not before:
                issues.begin("between graphs" if operation is None else operation.node.name)
                before = operation
            _add(issues, step, recorded)
    issues.end()
    return [issue for issue in issues.found if issue.streams]


def _add(issues: Issues, step: Step, recorded: dict[Any, tuple[str, int]]) -> None:
    for event in step.waits:
        if event in recorded:
            issues.wait(step.stream, recorded[event])
    shared = [[tuple(a.resource) for a in each if a.resource.kind != "value"] for each in (step.reads, step.writes)]
    issues.access(step.stream, *shared)
    for event in step.records:
        recorded[event] = (step.stream, issues.counts[step.stream])


def check(schedule: Schedule, tours: Iterable[Tour]) -> None:
    for tour in tours:
        real, table = of_runtime(schedule, tour), of_table(schedule, tour)
        for ours, theirs in zip(table, real, strict=False):
            assert ours == theirs
        assert len(table) == len(real)


def test_a_mixed_schedule() -> None:
    schedule = mixed_schedule()
    check(schedule, tours_of(schedule.graphs))
    used = {node.target for module in schedule.graphs.values() for node in module.graph.nodes}
    assert {ops.bind, ops.prefetch, ops.wait, ops.release, ops.collect, ops.offload, ops.update} <= used


def test_swapped_values() -> None:
    """Their slabs are the runtime's own affair: the table gives every run slabs of its own."""
    schedule = swapped_schedule()
    check(schedule, tours_of(schedule.graphs))
    used = {node.target for module in schedule.graphs.values() for node in module.graph.nodes}
    assert {ops.swap_out, ops.release_swapped, ops.reload, ops.wait_reload} <= used


@pytest.mark.parametrize("shape", ["tied", "frozen", "head"])
def test_shared_weights_frozen_ones_and_chunks_of_two_sizes(shape: str) -> None:
    schedule = prepared_schedule(Blocks(**{shape: True}), "offloaded")
    check(schedule, tours_of(schedule.graphs))


SHARED = [
    ("offloaded", "parameters"),
    *(("persistent", sharding) for sharding in ("states", "gradients", "parameters")),
]


@pytest.mark.parametrize("shared", [*SHARED, ("mixed", "states"), ("mixed", "gradients")], ids="-".join)
def test_chunks_that_ranks_share(shared: tuple[str, str]) -> None:
    schedule = shared_schedule(*shared)
    check(schedule, tours_of(schedule.graphs, ranks=True))


@pytest.mark.parametrize("landings", [0, 2])
def test_a_graph_kept_for_a_second_backward(landings: int) -> None:
    tour = Tour("", landings, (forward(0), backward(0), backward(0), backward(0), STEP, forward(1)))
    check(mixed_schedule(), [tour])


def test_inference() -> None:
    schedule = prepared_schedule(Blocks(), MIXED, train=False)
    check(schedule, tours_of(schedule.graphs))


@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_gathered_values(residency: str) -> None:
    """An evaluation outside autocast reads exact values, not the 16 bits that its chunks hold."""
    compiled = prepared_model(Blocks(2), residency)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(2, 8))
    with torch.no_grad():
        compiled(torch.randn(2, 8))
    schedule = protrain_compile.schedule(compiled).parts[1].schedule
    assert any(node.target is ops.gather for node in schedule.graphs["inference"].graph.nodes)
    check(schedule, tours_of(schedule.graphs))


def test_every_operation_has_a_row() -> None:
    functions = [each for each in vars(ops).values() if inspect.isfunction(each)]
    assert set(EFFECTS) < set(RANK_EFFECTS)
    assert set(RANK_EFFECTS) == {each for each in functions if "stream" in inspect.signature(each).parameters}
