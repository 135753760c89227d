"""Schedules with one fault each, and whether it does harm: decided by running them, not by rules.

A mutant is run on the real residency with symbols for values (``symbolic``), along the verifier's tours, in every order
that matters (``interleave``). It is harmful if anything that a user sees (results, parameters, norms for clipping)
differs from what the right schedule gives, if the runtime raises, if a ``wait`` has to fetch a chunk that the right
schedule has brought in time, or if swapped values go on holding device memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Literal

from support.interleave import results
from support.missing_waits import DroppedWait
from support.schedules import find, take_tour
from support.symbolic_ranks import runtime_for
from support.symbolic_runtime import SymbolicRuntime
from torch import fx

from passes.tours import Between, Tour, forward, tours_of
from passes.verify import verify_schedule
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule, operation_of

SWAPPING = (ops.swap_out, ops.release_swapped, ops.reload, ops.wait_reload)
COLLECTIVES = (ops.all_gather, ops.reduce_scatter)
MOVING = (ops.wait, ops.release, ops.offload, ops.update, ops.prefetch, ops.collect, *SWAPPING, *COLLECTIVES)
Change = Literal["deleted", "repeated", "earlier", "later"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One node of one graph deleted, repeated, or moved past the operation before or after it."""

    graph: str
    node: str
    change: Change

    def of(self, schedule: Schedule) -> Schedule:
        """Return a schedule with the fault."""
        graphs = {**schedule.graphs, self.graph: copy.deepcopy(schedule.graphs[self.graph])}
        mutant = dataclasses.replace(schedule, graphs=graphs)
        _CHANGES[self.change](find(mutant, self.graph, self.node))
        return mutant

    def original(self, schedule: Schedule) -> fx.Node:
        """Return the node in the right schedule."""
        return find(schedule, self.graph, self.node)


def mutants_of(schedule: Schedule) -> Iterator[Mutant]:
    """Yield every mutant of a schedule; what others read cannot be deleted: see ``DroppedWait``."""
    for name, module in schedule.graphs.items():
        for node in module.graph.nodes:
            if node.target not in MOVING:
                continue
            if not node.users:
                yield Mutant(name, node.name, "deleted")
            yield Mutant(name, node.name, "repeated")
            if neighbour(node, -1) is not None:
                yield Mutant(name, node.name, "earlier")
            if neighbour(node, 1) is not None:
                yield Mutant(name, node.name, "later")


def neighbour(node: fx.Node, step: int) -> fx.Node | None:
    """Return the operation before (-1) or after (1) a node, past pack and getitem."""
    at = node.prev if step < 0 else node.next
    while at.op not in ("placeholder", "output", "root") and operation_of(at) is None:
        at = at.prev if step < 0 else at.next
    return at if operation_of(at) is not None else None


def _delete(node: fx.Node) -> None:
    packs = [each for each in node.all_input_nodes if each.target is ops.pack]
    node.graph.erase_node(node)
    for pack in packs:
        node.graph.erase_node(pack)


def _repeat(node: fx.Node) -> None:
    packs = {each: each for each in node.all_input_nodes if each.target is ops.pack}
    with node.graph.inserting_after(node):
        for pack in packs:
            packs[pack] = node.graph.node_copy(pack)
    with node.graph.inserting_after(node if not packs else next(iter(packs.values()))):
        node.graph.node_copy(node, lambda each: packs.get(each, each))


def _move(node: fx.Node, step: int) -> None:
    other = neighbour(node, step)
    assert other is not None
    packs = [each for each in node.all_input_nodes if each.target is ops.pack]
    if step < 0:
        for each in (*packs, node):
            other.prepend(each)
    else:
        for each in reversed((*packs, node)):
            other.append(each)


_CHANGES = {
    "deleted": _delete,
    "repeated": _repeat,
    "earlier": lambda node: _move(node, -1),
    "later": lambda node: _move(node, 1),
}


class Judge:
    """Says which mutants of a schedule are harmful."""

    def __init__(self, schedule: Schedule, *, seeds: int = 1) -> None:
        self.schedule = schedule
        self.seeds = seeds
        assert schedule.chunks is not None
        others = [Between("forward of others", first) for first in range(schedule.chunks.buffers)]
        ranks = schedule.chunks.sharding is not None
        self.trips = [_Trip(tour) for tour in tours_of(schedule.graphs, ranks=ranks)]
        self.trips += [_Trip(Tour("others behind a forward", 0, (forward(0), each))) for each in others]
        for trip in self.trips:
            runtime = trip.run(schedule)
            found = set(results(runtime, seeds=seeds))
            assert len(found) == 1, "the right schedule's results depend on the streams' pace"
            trip.expected, trip.misses = found.pop(), runtime.residency.counters.misses
            assert not runtime.swap.held

    def harm_of(self, mutant: Mutant | DroppedWait) -> str:
        """Return what a fault does; empty if nothing."""
        schedule = mutant.of(self.schedule) if isinstance(mutant, Mutant) else self.schedule
        if is_malformed(schedule):
            return "a value is used before it is made"
        dropped = mutant if isinstance(mutant, DroppedWait) else None
        return next(filter(None, (self._harm(schedule, trip, dropped) for trip in self.trips)), "")

    def _harm(self, schedule: Schedule, trip: _Trip, dropped: DroppedWait | None) -> str:
        try:
            runtime = trip.run(schedule)
        except (KeyError, AttributeError, IndexError) as error:
            return f"raises {type(error).__name__}"
        if runtime.residency.counters.misses > trip.misses:
            return "fetches on demand"
        if runtime.swap.held:
            return "holds device memory"
        if dropped is not None:
            _drop(schedule, runtime, dropped)
        wrong = any(found != trip.expected for found in results(runtime, seeds=self.seeds))
        return "gives wrong results" if wrong else ""


@dataclasses.dataclass
class _Trip:
    """A tour, and what comes out of it."""

    tour: Tour
    expected: object = None
    misses: int = 0

    def run(self, schedule: Schedule) -> SymbolicRuntime:
        assert schedule.chunks is not None
        runtime = runtime_for(schedule.chunks, self.tour.landings, clips=schedule.chunks.sharding is None)
        take_tour(runtime, schedule, self.tour)
        return runtime


def is_malformed(schedule: Schedule) -> bool:
    """Whether a graph uses a value before it is made, as the pipeline finds by itself."""
    try:
        for module in schedule.graphs.values():
            module.graph.lint()
    except RuntimeError:
        return True
    return False


def _drop(schedule: Schedule, runtime: SymbolicRuntime, dropped: DroppedWait) -> None:
    node = find(schedule, dropped.graph, dropped.node)
    for each in runtime.trace.instructions:
        if each.node is node and each.event == dropped.event:
            each.after = None


def is_found(schedule: Schedule) -> bool:
    """Whether the pipeline refuses a schedule: its graphs are malformed, or the verifier raises."""
    if is_malformed(schedule):
        return True
    try:
        verify_schedule(schedule, "x")
    except VerifierError:
        return True
    return False
