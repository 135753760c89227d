"""A prepared model's runtime on symbols: the real ``ChunkResidency`` on memory that holds names instead of numbers.

What the residency asks of streams, of the host worker and of memory is not done but recorded, as *instructions*: each
belongs to a stream, may wait for an earlier one, and reads and writes memory. Whoever executes them in any order that
streams and waits allow (see ``interleave``) sees what a device might do::

    runtime = SymbolicRuntime(schedule.chunks, landings=4)
    run = runtime.forward(schedule)
    runtime.backward(schedule, run, "in_backward")
    runtime.trace.instructions

A value is a hash of how it came about, so two values are equal if the same operations made them of the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes.tours import other_chunk, rotated, trained_chunks
from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.chunks import ChunkBinding
from protrain_compile.liveness import kept_sources
from protrain_compile.program import results_of
from protrain_compile.residency import ChunkResidency, UpdateMode
from protrain_compile.runtime.chunk_store import ChunkStore, StoreSpec
from protrain_compile.schedule import Schedule

Memory = dict[Any, dict[int, int]]
"""Per memory, by its name: what lies at each offset."""


class Symbolic:
    """What the torch functions that ``collect`` calls accept."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        """Carry out what ``collect`` does with gradients."""
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
        run = _updating(states, gradient, offsets)
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


def _updating(states: Cell, gradient: Cell, offsets: Sequence[int]) -> Callable[[Memory], None]:
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
        run = _updating(states, gradient, offsets)
        self.trace.add("compute", run, reads=(gradient.name, states.name), writes=(states.name,))


class SymbolicStore:
    """A chunk store whose memories are names."""

    landing = ChunkStore.landing

    def __init__(self, trace: Trace, spec: StoreSpec) -> None:
        self.trace = trace
        self.spec = spec
        kinds = {"persistent": "parameters", "offloaded": "home", "split": "home"}
        self.parameters = [Cell((kinds[spec.residency[c.index]], c.index), trace) for c in spec.layout.chunks]
        self.states = dict(enumerate(self.parameters))
        self.gradients = {
            chunk.index: Cell(("gradients", chunk.index), trace)
            for chunk in spec.layout.chunks
            if chunk.trainable and spec.residency[chunk.index] == "persistent"
        }
        self.accumulators: dict[int, Cell] = {}
        own = [chunk.index for chunk in spec.host_chunks() if chunk.trainable]
        sizes = spec.landing_bytes()
        numbers = range(len(sizes)) if spec.landings else own
        self.landings = [Cell(("landing", i), trace, nbytes=size) for i, size in zip(numbers, sizes, strict=True)]

    def accumulator(self, chunk: int) -> Cell:
        return self.accumulators.setdefault(chunk, Cell(("accumulator", chunk), self.trace))

    def read(self, parameter: int, dtype: torch.dtype) -> Result:
        chunk, slot = self.spec.layout.place_of[parameter]
        home = self.parameters[chunk]
        stream = "compute" if self.spec.residency[chunk] == "persistent" else "caller"
        (made,) = _make(self.trace, stream, ("exact",), [home[self.spec.layout.chunks[chunk].slots[slot].offset :]])
        return made

    def first_values(self) -> Memory:
        """Return memory in which every parameter has a value of its own."""
        return {
            home.name: {slot.offset: hash(("initial", slot.parameter)) for slot in chunk.slots}
            for home, chunk in zip(self.parameters, self.spec.layout.chunks, strict=True)
        }


def _make(trace: Trace, stream: str, how: tuple[Any, ...], arguments: Sequence[Any], count: int = 1) -> list[Result]:
    """Issue the making of ``count`` results of ``arguments``; return them."""
    number, held = len(trace.instructions), list(arguments)

    def run(memory: Memory) -> None:
        key = hash((how, *(each.read(memory) if isinstance(each, Cell | Result) else each for each in held)))
        memory["value", number] = {index: hash((key, index)) for index in range(count)}

    reads = [each.name for each in held if isinstance(each, Cell | Result)]
    trace.add(stream, run, reads=reads, writes=[("value", number)])
    return [Result(number, index) for index in range(count)]


@dataclasses.dataclass
class Run:
    """One run of a forward: what it returned, and what its backward needs."""

    number: int
    outputs: list[Any]
    kept: dict[fx.Node, Any]


class SymbolicRuntime:
    """Runs schedules of one prepared model, as ``CompiledGraph`` and the managed optimizer do."""

    def __init__(self, chunks: ChunkBinding, landings: int) -> None:
        self.trace = Trace()
        kinds = (None,) * len(chunks.residency)
        spec = StoreSpec(chunks.layout, chunks.residency, kinds, torch.device("cpu"), landings)
        self.store = SymbolicStore(self.trace, spec)
        self.residency = ChunkResidency(
            self.store,  # type: ignore[arg-type]
            QueueStreams(self.trace),  # type: ignore[arg-type]
            QueueWorker(self.trace),  # type: ignore[arg-type]
            chunks.buffers,
            self._offsets,  # type: ignore[arg-type]
            measures_norms=False,
        )
        self.residency._device_updater = QueueDeviceUpdater(self.trace)  # type: ignore[assignment]
        for number, buffer in self.residency._buffers.items():
            buffer.bytes = Cell(("buffer", number), self.trace)  # type: ignore[assignment]
            for kind in ("arrival", "read", "left"):
                getattr(buffer, kind).kind = kind
        self.chunks = chunks
        self.runs: list[Run] = []
        self.read_by_others: list[Result] = []

    def _offsets(self, chunk: int, slots: Sequence[int], multiplier: float) -> list[int]:
        return [self.store.spec.layout.chunks[chunk].slots[slot].offset for slot in slots]

    def forward(self, schedule: Schedule, name: str = "forward") -> Run:
        """Run a forward or an inference."""
        number = len(self.runs)
        given = {
            node: hash(("argument", number, node.name))
            for node in schedule.graphs[name].graph.find_nodes(op="placeholder")
        }
        values = self._execute(schedule.graphs[name], given)
        results = [values.get(each, each) for each in results_of(schedule.graphs[name])]
        split = len(results) - (schedule.backward_inputs.num_kept if name == "forward" else 0)
        self.runs.append(Run(number, results[:split], values))
        return self.runs[-1]

    def backward(self, schedule: Schedule, run: Run, mode: UpdateMode) -> None:
        """Run the backward of a forward."""
        self.residency.updated.clear()
        self.residency.mode = mode
        kept = kept_sources(schedule)
        placeholders = schedule.graphs["backward"].graph.find_nodes(op="placeholder")
        self._execute(
            schedule.graphs["backward"],
            {
                node: run.kept[kept[node]] if node in kept else hash(("argument", run.number, node.name))
                for node in placeholders
            },
        )

    def step(self) -> None:
        """Run the updates that wait."""
        for chunk in sorted(self.residency.pending):
            self.residency.apply(chunk, 1.0)

    def updates_of_others(self) -> None:
        """Update every chunk, as graphs of other schedules may have done."""
        made = QueueEvent(self.trace)
        self.residency.streams.record(made, "compute")
        for chunk, home in enumerate(self.store.parameters):
            run = _updating(home, Cell(("gradients", -1), self.trace), list(self.store.first_values()[home.name]))
            if self.store.spec.residency[chunk] == "persistent":
                self.trace.add("compute", run, writes=(home.name,))
            else:
                worker: Any = self.residency.worker
                self.residency._ticket[chunk] = worker._submit(run, (), (home.name,), made)
                self.residency.written(chunk)

    def forward_of_others(self, first: int = 0) -> None:
        """Fetch another chunk into every buffer that chunks share, and read it."""
        for number in rotated(self.chunks.buffers, first):
            buffer = self.residency._buffers.get(number)
            chunk = None if buffer is None else other_chunk(self.chunks, buffer.holder)
            if chunk is None:
                continue
            self.residency.prefetch(chunk, number)
            outputs = _make(self.trace, "compute", ("other",), self.residency.wait(chunk, number, self._slots(chunk)))
            self.residency.release(chunk, number)
            self.read_by_others += outputs

    def backward_of_others(self, first: int = 0) -> None:
        """Make gradients of some chunk in every buffer that chunks share; they wait for ``step()``."""
        self.residency.mode = "at_step"
        trained = trained_chunks(self.chunks)
        for number in rotated(self.chunks.buffers if trained else 0, first):
            chunk = trained[number % len(trained)]
            slots = self._slots(chunk)
            gradients = _make(self.trace, "compute", ("gradients", number, chunk), (), len(slots))
            self.residency.collect(chunk, number, slots, gradients)
            self.residency.offload(chunk, number)
            self.residency.update(chunk, slots)

    def _slots(self, chunk: int) -> tuple[int, ...]:
        return tuple(range(len(self.chunks.layout.chunks[chunk].slots)))

    def _execute(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            self.trace.node = node
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if isinstance(node.target, Artefact):
                how, count = (node.target.__name__,), len(node.meta["results"])
                values[node] = _make(self.trace, "compute", how, args[0], count)
            elif node.target is ops.snapshot:
                (values[node],) = _make(self.trace, "compute", ("snapshot",), args)
            else:
                first = (self.residency, *args[1:]) if "chunk" in kwargs else args
                values[node] = node.target(*first, **kwargs)
        self.trace.node = None
        return values
