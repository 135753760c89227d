"""Tours: the ways through a training loop for which the order of a schedule's steps is checked.

A tour is a sequence of visits to graphs and of calls of ``step()``, on one set of buffers, landings and homes. Between
them, the two tours of a trainable schedule contain every pair of graphs that may follow each other, with updates in the
backward and at the step, over an accumulation window, with two forwards alive, with a forward that has no backward,
and with one between a backward and its step.
An inference comes before and after updates that other graphs made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from passes import effects
from passes.chunk_views import Operation
from passes.effects import Call, Event, Ledger, Step, UpdateMode
from passes.rank_effects import RankLedger, table_of
from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding

SHARED_LANDINGS = 2
"""Landings that take turns, for the check: the fewest that do, so that each is used anew as early as can be."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """One run of a graph; ``run`` tells forwards apart: a backward belongs to the forward of its number.

    ``last`` is False for the backward of a micro-batch that others of the declared ones follow.
    """

    graph: str
    run: int = 0
    mode: UpdateMode = "at_step"
    last: bool = True


@dataclasses.dataclass(frozen=True)
class Between:
    """What happens between visits: ``step()``, or graphs of other schedules of the model.

    Those use every shared buffer, from the ``first`` on, or have updated every chunk.
    """

    kind: Literal["step", "forward of others", "backward of others", "updates of others"]
    first: int = 0


Stop = Visit | Between


@dataclasses.dataclass(frozen=True)
class Tour:
    """A sequence of visits and other stops. ``landings`` is 0 where every chunk has a landing of its own."""

    name: str
    landings: int
    stops: tuple[Stop, ...]


def forward(run: int) -> Visit:
    """A forward."""
    return Visit("forward", run)


def backward(run: int, mode: UpdateMode = "at_step", *, last: bool = True) -> Visit:
    """The backward of a forward."""
    return Visit("backward", run, mode, last)


STEP = Between("step")
OTHERS_FORWARD = Between("forward of others")
OTHERS_BACKWARD = Between("backward of others")
OTHERS_UPDATES = Between("updates of others")
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
            *(forward(9), backward(9), forward(10), STEP),
            *(OTHERS_FORWARD, forward(11), OTHERS_FORWARD, backward(11), OTHERS_BACKWARD),
            *(forward(12), OTHERS_BACKWARD, backward(12), OTHERS_FORWARD, STEP, forward(13)),
        ),
    ),
    Tour(
        "landings of their own",
        0,
        (
            *(forward(0), backward(0), STEP),
            *(forward(1), forward(2), backward(2), backward(1), STEP),
            *(forward(3), backward(3), forward(4), backward(4), forward(5), backward(5), STEP),
            *(forward(6), backward(6), forward(7), STEP),
            *(OTHERS_FORWARD, forward(8), OTHERS_BACKWARD, backward(8), STEP, forward(9)),
        ),
    ),
)
RANKS = (
    Tour(
        "micro-batches on ranks",
        0,
        (
            *(forward(0), backward(0, last=False), forward(1), backward(1), STEP),
            *(forward(2), backward(2, last=False), forward(3), backward(3, "in_backward"), STEP),
            *(forward(4), backward(4, last=False), STEP, forward(5), backward(5, "in_backward"), STEP, forward(6)),
        ),
    ),
)
INFERENCE = (
    Tour(
        "inference",
        SHARED_LANDINGS,
        (
            *(Visit("inference", 0), OTHERS_UPDATES, Visit("inference", 1), OTHERS_FORWARD),
            *(Visit("inference", 2), OTHERS_BACKWARD, Visit("inference", 3), STEP, Visit("inference", 4)),
        ),
    ),
)


def tours_of(graphs: Mapping[str, object], *, ranks: bool = False) -> tuple[Tour, ...]:
    """Return the tours for a schedule with these graphs; ``ranks``: whether ranks share its chunks."""
    if "backward" not in graphs:
        return INFERENCE
    return (*TRAINING, *RANKS) if ranks else TRAINING


def issued_steps(
    stop: Stop, operations: Mapping[str, Sequence[Operation]], ledger: Ledger, chunks: ChunkBinding
) -> Iterator[tuple[Step, Operation | None]]:
    """Yield the steps that a stop issues, in order, each with the operation that it is of."""
    if isinstance(stop, Visit):
        ledger.mode = stop.mode
        if isinstance(ledger, RankLedger):
            ledger.last = stop.last
        for operation in operations[stop.graph]:
            for step in operation.effect(operation.call, ledger):
                yield step, operation
    else:
        for step in _BETWEEN[stop.kind](ledger, chunks, stop.first):
            yield step, None


def _step(ledger: Ledger, chunks: ChunkBinding, first: int) -> Iterator[Step]:
    yield from ledger.optimizer_step()


def _forward_of_others(ledger: Ledger, chunks: ChunkBinding, first: int) -> Iterator[Step]:
    """Yield fetches of another chunk into every shared buffer, and reads of it."""
    table = table_of(chunks)
    for buffer in rotated(chunks.buffers, first):
        chunk = other_chunk(chunks, ledger.holder.get(buffer))
        if chunk is None:
            continue
        call = Call({"chunk": chunk, "buffer": buffer})
        yield from table[ops.prefetch](call, ledger)
        if chunks.sharding is not None:
            yield from table[ops.all_gather](call, ledger)
        yield from table[ops.wait](call, ledger)
        yield Step("compute", reads=(effects.view(ops.wait, call),))
        yield from table[ops.release](call, ledger)


def _backward_of_others(ledger: Ledger, chunks: ChunkBinding, first: int) -> Iterator[Step]:
    """Yield gradients of some chunk in every shared buffer, which leave and wait for ``step()``."""
    ledger.mode = "at_step"
    trained, table = trained_chunks(chunks), table_of(chunks)
    reduces = () if chunks.sharding is None else (ops.reduce_scatter,)
    for buffer in rotated(chunks.buffers if trained else 0, first):
        call = Call({"chunk": trained[buffer % len(trained)], "buffer": buffer})
        leaves = ops.release if ledger.on_device(call.chunk) else ops.offload
        for operation in (ops.collect, *reduces, leaves, ops.update):
            yield from table[operation](call, ledger)


def _updates_of_others(ledger: Ledger, chunks: ChunkBinding, first: int) -> Iterator[Step]:
    """Yield updates of every chunk, each behind gradients that the compute stream made."""
    made = Event("gradients", "others")
    yield Step("compute", records=(made,))
    for chunk in range(len(ledger.residency)):
        if ledger.on_device(chunk):
            left, records = ledger.written(chunk)
            yield Step("compute", writes=(left,), records=records)
        else:
            ledger.forget(chunk)
            yield Step("host", waits=(made,), writes=(effects.home(chunk),), records=(Event("updated", chunk),))


_BETWEEN: dict[str, Callable[[Ledger, ChunkBinding, int], Iterator[Step]]] = {
    "step": _step,
    "forward of others": _forward_of_others,
    "backward of others": _backward_of_others,
    "updates of others": _updates_of_others,
}


def rotated(count: int, first: int) -> list[int]:
    """Return the numbers below ``count``, from ``first`` on and round."""
    return [(first + number) % count for number in range(count)]


def other_chunk(chunks: ChunkBinding, held: int | None) -> int | None:
    """Return the first chunk that moves through the shared buffers and is not ``held``."""
    moving = (index for index in range(len(chunks.residency)) if _moves(chunks, index, "parameters"))
    return next((index for index in moving if index != held), None)


def trained_chunks(chunks: ChunkBinding) -> list[int]:
    """Return the trainable chunks that move through the shared buffers."""
    return [
        chunk.index
        for chunk in chunks.layout.chunks
        if chunk.trainable and _moves(chunks, chunk.index, "parameters", "gradients")
    ]


def _moves(chunks: ChunkBinding, chunk: int, *shardings: str) -> bool:
    """Whether a chunk moves through the shared buffers: an offloaded one, or one on the device that is divided so."""
    residency = chunks.residency[chunk]
    divided = chunks.sharding is not None and chunks.sharding[chunk] in shardings
    return residency == "offloaded" or (residency == "persistent" and divided)
