"""Schedules that leave one wait out: which there are, what the verifier says, and why some do no harm."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.schedules import find
from torch import fx

from passes.chunk_views import schedule_operations
from passes.effects import Call, Ledger, Step, Steps
from passes.rank_effects import RankLedger
from passes.tours import Tour
from passes.verify_order import verify_order, verify_tour
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class DroppedWait:
    """A node that does not wait for the events of one kind; see ``effects``.

    Of ``step()``, the update of a chunk, whose number takes the place of the node's name.
    """

    graph: str
    node: str
    event: str


WAITS = {
    ops.prefetch: ("read", "left", "updated"),
    ops.wait: ("arrival",),
    ops.collect: ("arrival", "left"),
    ops.offload: ("read", "emptied"),
    ops.update: ("landed",),
    ops.swap_out: ("computed", "slab"),
    ops.release_swapped: ("swapped",),
    ops.reload: ("allocated", "swapped"),
    ops.wait_reload: ("reloaded",),
}
"""The kinds of events that an operation waits for."""
RANK_WAITS = {
    **WAITS,
    ops.bind: ("gathered",),
    ops.all_gather: ("arrival", "read", "left", "written"),
    ops.collect: ("arrival", "left", "reduced"),
    ops.reduce_scatter: ("read", "collected"),
    ops.offload: ("reduced", "read", "emptied"),
    ops.update: ("reduced", "landed"),
}
"""Those where ranks share chunks."""


def dropped_waits_of(schedule: Schedule) -> Iterator[DroppedWait]:
    """Yield every single wait of a schedule that may be left out."""
    ranks = schedule.chunks is not None and schedule.chunks.sharding is not None
    for name, module in schedule.graphs.items():
        for node in module.graph.nodes:
            on_device = node.target in (ops.collect, ops.update) and node.kwargs["stream"] == "compute"
            if ranks or not on_device or "buffer" in node.kwargs:
                kinds = (RANK_WAITS if ranks else WAITS).get(node.target, ())
                yield from (DroppedWait(name, node.name, event) for event in kinds)


def is_missed(schedule: Schedule, dropped: DroppedWait, tour: Tour | None = None) -> bool:
    """Whether the verifier refuses a schedule in which one node leaves a wait out.

    With ``tour`` only on this way, and if no graphs but those of the schedule run.
    """
    operations = schedule_operations(schedule)
    with pytest.MonkeyPatch.context() as patch:
        if dropped.graph == "step":
            for kind in (Ledger, RankLedger):
                patch.setattr(kind, "optimizer_step", _step_without(dropped, kind.optimizer_step))
        else:
            place = next(i for i, each in enumerate(operations[dropped.graph]) if each.node.name == dropped.node)
            whole = operations[dropped.graph][place]

            def row(call: Call, ledger: Ledger) -> tuple[Step, ...]:
                return tuple(_without(step, dropped.event) for step in whole.effect(call, ledger))

            operations[dropped.graph][place] = dataclasses.replace(whole, effect=row)
        with contextlib.suppress(VerifierError):
            if tour is None:
                verify_order(schedule, "", operations)
            else:
                verify_tour(schedule, "", operations, tour, others_follow=False)
            return False
    return True


def _without(step: Step, kind: str) -> Step:
    return dataclasses.replace(step, waits=tuple(each for each in step.waits if each.kind != kind))


def _step_without(dropped: DroppedWait, whole: Callable[[Any], Steps]) -> Callable[[Any], Steps]:
    def steps(ledger: Ledger) -> Steps:
        found = whole(ledger)
        mine = [any(str(event.key) == dropped.node for event in (*step.records, *step.waits)) for step in found]
        return tuple(_without(s, dropped.event) if own else s for s, own in zip(found, mine, strict=True))

    return steps


def uses_own_buffer(node: fx.Node, schedule: Schedule) -> bool:
    """Whether an operation is on a chunk that has a buffer of its own."""
    assert schedule.chunks is not None
    return "chunk" in node.kwargs and schedule.chunks.residency[int(str(node.kwargs["chunk"]))] == "split"


WHY_SWAPPED = {
    ops.swap_out: {"slab": "whoever had the slab gave it back behind the wait for its values' return"},
    ops.release_swapped: {},
    ops.reload: {"swapped": "the memory is allocated behind the release in the forward, which waited for the copy"},
    ops.wait_reload: {},
}
"""Why a wait of an operation on swapped values does no harm when it is left out."""


def why_not_missed(dropped: DroppedWait, schedule: Schedule) -> str:
    """Return the rule by which a wait that is left out does no harm; empty if none says so."""
    node = find(schedule, dropped.graph, dropped.node)
    if node.target in WHY_SWAPPED:
        return WHY_SWAPPED[node.target].get(dropped.event, "")  # type: ignore[index]
    in_buffer = [each for each in node.graph.nodes if each.kwargs.get("buffer") == node.kwargs.get("buffer")]
    before = in_buffer[: in_buffer.index(node)] if "buffer" in node.kwargs else []
    if node.target is ops.collect and before and before[-1].target is ops.wait:
        return "the chunk's own wait came first, for a fetch that waited for what had left"
    if node.target is not ops.prefetch:
        return ""
    if dropped.event != "updated" and uses_own_buffer(node, schedule):
        return "a split chunk's own buffer is filled anew only after its update, which follows an offload from it"
    if dropped.event == "read" and before and before[-1].target is ops.offload:
        return "the gradients left the buffer behind its last reader"
    if dropped.event == "left" and before and before[-1].target is ops.release:
        return "the fetch for the stay before, in this graph, waited for it"
    if dropped.event == "updated" and dropped.graph == "backward":
        return "the forward fetched the chunk behind the same update"
    return ""
