"""Tours: the ways through a training loop for which the order of a schedule's steps is checked.

A tour is a sequence of visits to graphs and of calls of ``step()``, on one set of buffers, landings and homes. Between
them, the two tours of a trainable schedule contain every pair of graphs that may follow each other, with updates in the
backward and at the step, over an accumulation window, with two forwards alive and with a forward that has no backward.
An inference comes before and after updates that other graphs made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from passes import effects
from passes.chunk_views import Operation
from passes.effects import Ledger, Step, UpdateMode, optimizer_step

SHARED_LANDINGS = 2
"""Landings that take turns, for the check: the fewest that do, so that each is used anew as early as can be."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """One run of a graph; ``run`` tells forwards apart: a backward belongs to the forward of its number."""

    graph: str
    run: int = 0
    mode: UpdateMode = "at_step"


Stop = Visit | Literal["step", "updates of others"]
"""A visit; ``step()``; or updates of every chunk by graphs of other schedules."""


@dataclasses.dataclass(frozen=True)
class Tour:
    """A sequence of visits and other stops. ``landings`` is 0 where every chunk has a landing of its own."""

    name: str
    landings: int
    stops: tuple[Stop, ...]


def forward(run: int) -> Visit:
    """A forward."""
    return Visit("forward", run)


def backward(run: int, mode: UpdateMode = "at_step") -> Visit:
    """The backward of a forward."""
    return Visit("backward", run, mode)


STEP: Stop = "step"
TRAINING = (
    Tour(
        "landings that take turns",
        SHARED_LANDINGS,
        (
            *(forward(0), backward(0), STEP),
            *(forward(1), backward(1, "in_backward"), STEP),
            *(forward(2), backward(2, "in_backward"), STEP),
            *(forward(3), forward(4), backward(4), backward(3), STEP),
            *(forward(5), backward(5), forward(6), backward(6, "in_backward"), STEP),
            *(forward(7), forward(8), backward(8, "in_backward"), STEP),
        ),
    ),
    Tour(
        "landings of their own",
        0,
        (
            *(forward(0), backward(0), STEP),
            *(forward(1), forward(2), backward(2), backward(1), STEP),
            *(forward(3), backward(3), forward(4), backward(4), forward(5), backward(5), STEP),
        ),
    ),
)
INFERENCE = (Tour("inference", SHARED_LANDINGS, (Visit("inference", 0), "updates of others", Visit("inference", 1))),)


def tours_of(graphs: Mapping[str, object]) -> tuple[Tour, ...]:
    """Return the tours for a schedule with these graphs."""
    return TRAINING if "backward" in graphs else INFERENCE


def issued_steps(
    stop: Stop, operations: Mapping[str, Sequence[Operation]], ledger: Ledger
) -> Iterator[tuple[Step, Operation | None]]:
    """Yield the steps that a stop issues, in order, each with the operation that it is of."""
    if isinstance(stop, Visit):
        ledger.mode = stop.mode
        for operation in operations[stop.graph]:
            for step in operation.effect(operation.call, ledger):
                yield step, operation
    else:
        for step in optimizer_step(ledger) if stop == "step" else _updates_of_others(ledger):
            yield step, None


def _updates_of_others(ledger: Ledger) -> Iterator[Step]:
    """Yield updates of every chunk, each behind gradients that the compute stream made."""
    made = effects.Event("gradients", "others")
    yield Step("compute", records=(made,))
    for chunk in range(len(ledger.residency)):
        if ledger.on_device(chunk):
            yield Step("compute", writes=(effects.parameters(chunk),))
        else:
            ledger.forget(chunk)
            updated = effects.Event("updated", chunk)
            yield Step("host", waits=(made,), writes=(effects.home(chunk),), records=(updated,))
