"""Symbols for tensors, streams and the host worker: what they are asked to do is recorded, not done.

It is recorded as *instructions*: each belongs to a stream, may wait for an earlier one, and reads and writes memory.
Whoever executes them in any order that streams and waits allow (see ``interleave``) sees what a device might do.
A value is a hash of how it came about, so two values are equal if the same operations made them of the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Memory = dict[Any, dict[int, int]]
"""Per memory, by its name: what lies at each offset."""


class Symbolic:
    """What the torch functions that ``collect`` calls accept."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        """Carry out what ``collect`` does with gradients."""
        if func is torch.linalg.vector_norm:
            (flat,), norm = args, kwargs["out"]
            norm.trace.add("compute", _measuring(norm, flat), reads=(flat.name,), writes=(norm.name,))
            return
        targets, sources = args
        if func is torch._foreach_copy_:
            targets[0].trace.move(targets, sources, lambda old, new: new)
        else:
            assert func is torch._foreach_add_, func
            targets[0].trace.move(targets, sources, lambda old, new: hash(("sum", old, new)), rereads=True)


@dataclasses.dataclass(frozen=True)
class Cell(Symbolic):
    """Stands for a tensor: elements of a memory from ``offset``; None for all of it."""

    name: tuple[str, int]
    trace: Trace = dataclasses.field(repr=False, compare=False)
    offset: int | None = None
    nbytes: int = 1

    def __getitem__(self, where: slice) -> Cell:
        return self if where.start is None else dataclasses.replace(self, offset=where.start)

    def view(self, *_: Any) -> Cell:
        return self

    def to(self, _: Any) -> Cell:
        return self

    def read(self, memory: Memory) -> int:
        assert self.offset is not None
        return memory.setdefault(self.name, {}).get(self.offset, 0)

    def copy_(self, source: Cell) -> None:
        """Copy on the stream of collectives, the only one on which it is done so."""
        self.trace.add("gather", _moving(self, source, None), reads=(source.name,), writes=(self.name,))

    def add_(self, source: Cell) -> None:
        """Add on the stream of collectives."""
        reads = (source.name, self.name)
        self.trace.add("gather", _moving(self, source, "sum"), reads=reads, writes=(self.name,))

    def zero_(self) -> None:
        self.trace.add("compute", lambda memory: memory.__setitem__(self.name, {}), writes=(self.name,))


@dataclasses.dataclass(frozen=True)
class Result(Symbolic):
    """Stands for one result of an artefact."""

    number: int
    index: int

    @property
    def name(self) -> tuple[str, int]:
        return ("value", self.number)

    def to(self, _: Any) -> Result:
        return self

    def read(self, memory: Memory) -> int:
        return memory.get(self.name, {}).get(self.index, 0)


@dataclasses.dataclass
class Instruction:
    """One thing that a stream does.

    Attributes:
        stream: The stream.
        after: The instruction that it waits for, besides the one before it in its stream.
        issued: The last instruction of the launching thread before it was issued.
        run: What it does to memory.
        reads: Memories that it reads.
        writes: Memories that it writes.
        node: The node that issued it; None between graphs.
        event: The kind of event that it waits for, as ``effects`` calls it; empty if for none.
    """

    stream: str
    after: int | None
    issued: int | None
    run: Callable[[Memory], None]
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    node: fx.Node | None
    event: str = ""


class Trace:
    """Instructions in the order in which they were issued."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.node: fx.Node | None = None
        self._caller: int | None = None

    def add(
        self,
        stream: str,
        run: Callable[[Memory], None] = lambda memory: None,
        *,
        after: int | None = None,
        event: str = "",
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
    ) -> int:
        """Issue an instruction; return its number."""
        number = len(self.instructions)
        made = Instruction(stream, after, self._caller, run, tuple(reads), tuple(writes), self.node, event)
        self.instructions.append(made)
        if stream == "caller":
            self._caller = number
        return number

    def move(
        self,
        targets: Sequence[Cell],
        sources: Sequence[Any],
        combine: Callable[[int, int], int],
        *,
        rereads: bool = False,
    ) -> None:
        """Write ``sources`` to ``targets`` on the compute stream."""
        targets, sources = tuple(targets), tuple(sources)  # the caller empties its lists

        def run(memory: Memory) -> None:
            for target, source in zip(targets, sources, strict=True):
                place = memory.setdefault(target.name, {})
                place[target.offset or 0] = combine(target.read(memory), source.read(memory))

        names = [each.name for each in (*sources, *(targets if rereads else ()))]
        self.add("compute", run, reads=names, writes=[target.name for target in targets])


class QueueEvent:
    """An event: which instruction recorded it last."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kind = "landed"
        self.recorded: int | None = None

    def synchronize(self) -> None:
        self.trace.add("caller", after=self.recorded)


class QueueStreams:
    """Streams whose work is recorded."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.device = torch.device("cpu")

    def event(self) -> QueueEvent:
        return QueueEvent(self.trace)

    def record(self, event: QueueEvent, stream: str) -> None:
        event.recorded = self.trace.add(stream)

    def wait(self, event: QueueEvent, stream: str) -> None:
        self.trace.add(stream, after=event.recorded, event=event.kind)

    def wait_host(self, worker: QueueWorker, ticket: int, stream: str) -> None:
        kind = "updated" if stream == "h2d" else "emptied"
        self.trace.add(stream, after=worker.number_of(ticket), event=kind)

    def copy(self, target: Cell, source: Cell, stream: str) -> None:
        """Copy in two parts: what lies at even places, then the others."""
        for part in (0, 1):
            self.trace.add(stream, _copy(target, source, part), reads=(source.name,), writes=(target.name,))

    def synchronize(self) -> None:
        raise AssertionError("nothing in a schedule waits for the whole device")


def _copy(target: Cell, source: Cell, part: int) -> Callable[[Memory], None]:
    def run(memory: Memory) -> None:
        kept = {k: v for k, v in memory.get(target.name, {}).items() if k // 64 % 2 != part}
        new = {k: v for k, v in memory.get(source.name, {}).items() if k // 64 % 2 == part}
        memory[target.name] = kept | new

    return run


class QueueWorker:
    """A host worker whose jobs are recorded."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.numbers: list[int] = []

    def number_of(self, ticket: int) -> int | None:
        return self.numbers[ticket - 1] if ticket else None

    def _submit(self, run: Callable[[Memory], None], reads: Any, writes: Any, after: QueueEvent | None) -> int:
        waited, kind = (None, "") if after is None else (after.recorded, after.kind)
        self.numbers.append(self.trace.add("host", run, after=waited, event=kind, reads=reads, writes=writes))
        return len(self.numbers)

    def update(self, states: Cell, gradient: Cell, offsets: list[int], after: QueueEvent | None = None) -> int:
        run = updating(states, gradient, offsets)
        return self._submit(run, (gradient.name, states.name), (states.name,), after)

    def convert(self, target: Cell, source: Cell, after: QueueEvent | None = None) -> int:
        def run(memory: Memory) -> None:
            memory[target.name] = dict(memory.get(source.name, {}))

        return self._submit(run, (source.name,), (target.name,), after)

    def accumulate(self, total: Cell, gradient: Cell, after: QueueEvent | None = None) -> int:
        def run(memory: Memory) -> None:
            old, new = memory.get(total.name, {}), memory.get(gradient.name, {})
            memory[total.name] = {k: hash(("sum", old.get(k, 0), new.get(k, 0))) for k in old | new}

        return self._submit(run, (gradient.name, total.name), (total.name,), after)

    def wait(self, ticket: int) -> None:
        self.trace.add("caller", after=self.number_of(ticket), event="updated")


def updating(states: Cell, gradient: Cell, offsets: Sequence[int]) -> Callable[[Memory], None]:
    def run(memory: Memory) -> None:
        place, given = memory.setdefault(states.name, {}), memory.get(gradient.name, {})
        for offset in offsets:
            place[offset] = hash(("update", place.get(offset, 0), given.get(offset, 0)))

    return run


class QueueDeviceUpdater:
    """Device updates, recorded."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def update(self, states: Cell, gradient: Cell, offsets: list[int]) -> None:
        run = updating(states, gradient, offsets)
        self.trace.add("compute", run, reads=(gradient.name, states.name), writes=(states.name,))


def _moving(target: Cell, source: Cell, how: str | None) -> Callable[[Memory], None]:
    def run(memory: Memory) -> None:
        old, new = memory.get(target.name, {}), memory.get(source.name, {})
        keys = new if how is None else old | new
        memory[target.name] = {k: new[k] if how is None else hash((how, old.get(k, 0), new.get(k, 0))) for k in keys}

    return run


def _measuring(norm: Cell, flat: Cell) -> Callable[[Memory], None]:
    def run(memory: Memory) -> None:
        memory[norm.name] = {0: hash(("norm", *sorted(memory.get(flat.name, {}).items())))}

    return run


def make(trace: Trace, stream: str, how: tuple[Any, ...], arguments: Sequence[Any], count: int = 1) -> list[Result]:
    """Issue the making of ``count`` results of ``arguments``; return them."""
    number, held = len(trace.instructions), list(arguments)

    def run(memory: Memory) -> None:
        key = hash((how, *(each.read(memory) if isinstance(each, Cell | Result) else each for each in held)))
        memory["value", number] = {index: hash((key, index)) for index in range(count)}

    reads = [each.name for each in held if isinstance(each, Cell | Result)]
    trace.add(stream, run, reads=reads, writes=[("value", number)])
    return [Result(number, index) for index in range(count)]
