"""A prepared model's runtime on symbols: the real ``ChunkResidency`` and ``SwapSpace`` on names instead of numbers.

::

    runtime = SymbolicRuntime(schedule.chunks, landings=4)
    run = runtime.forward(schedule)
    runtime.backward(schedule, run, "in_backward")
    runtime.trace.instructions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from support.symbolic import (
    Cell,
    Memory,
    QueueDeviceUpdater,
    QueueEvent,
    QueueStreams,
    QueueWorker,
    Result,
    Trace,
    make,
    updating,
)
from support.symbolic_swap import SymbolicSwap
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
        (made,) = make(self.trace, stream, ("exact",), [home[self.spec.layout.chunks[chunk].slots[slot].offset :]])
        return made

    def first_values(self) -> Memory:
        """Return memory in which every parameter has a value of its own."""
        return {
            home.name: {slot.offset: hash(("initial", slot.parameter)) for slot in chunk.slots}
            for home, chunk in zip(self.parameters, self.spec.layout.chunks, strict=True)
        }


@dataclasses.dataclass
class Run:
    """One run of a forward: what it returned, and what its backward needs."""

    number: int
    outputs: list[Any]
    kept: dict[fx.Node, Any]


class SymbolicRuntime:
    """Runs schedules of one prepared model, as ``CompiledGraph`` and the managed optimizer do."""

    RESIDENCY: ClassVar[type[ChunkResidency]] = ChunkResidency
    STREAMS: ClassVar[type[QueueStreams]] = QueueStreams

    def __init__(self, chunks: ChunkBinding, landings: int, *, clips: bool = False) -> None:
        self.trace = Trace()
        self.chunks = chunks
        kinds = (None,) * len(chunks.residency)
        self.store = self._make_store(StoreSpec(chunks.layout, chunks.residency, kinds, torch.device("cpu"), landings))
        self.residency = self._make_residency()
        norms = [Cell(("norm", chunk), self.trace, 0) for chunk in range(len(chunks.residency))]
        self.residency.norms = norms if clips else None  # type: ignore[assignment]
        self.swap = SymbolicSwap(self.trace)
        self.residency._device_updater = QueueDeviceUpdater(self.trace)  # type: ignore[assignment]
        for number, buffer in self.residency._buffers.items():
            buffer.bytes = Cell(("buffer", number), self.trace)  # type: ignore[assignment]
            for kind in ("arrival", "read", "left"):
                getattr(buffer, kind).kind = kind
        self.runs: list[Run] = []
        self.read_by_others: list[Result] = []

    def _make_store(self, spec: StoreSpec) -> SymbolicStore:
        return SymbolicStore(self.trace, spec)

    def _make_residency(self) -> ChunkResidency:
        return self.RESIDENCY(
            self.store,  # type: ignore[arg-type]
            self.STREAMS(self.trace),  # type: ignore[arg-type]
            QueueWorker(self.trace),  # type: ignore[arg-type]
            self.chunks.buffers,
            self._offsets,  # type: ignore[arg-type]
            measures_norms=False,
        )

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

    def backward(self, schedule: Schedule, run: Run, mode: UpdateMode, *, last: bool = True) -> None:
        """Run the backward of a forward; ``last``: no other declared micro-batch of the step follows."""
        self.residency.begin_backward(mode, last=last)
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
        """Read the norms of the gradients that wait, for clipping, and run their updates."""
        norms: Any = self.residency.norms
        if norms is not None:
            waiting = [norms[chunk] for chunk in sorted(self.residency.pending)]
            self.read_by_others += make(self.trace, "compute", ("clip",), waiting)
        for chunk in sorted(self.residency.pending):
            self.residency.apply(chunk, 1.0)

    def updates_of_others(self) -> None:
        """Update every chunk, as graphs of other schedules may have done."""
        made = QueueEvent(self.trace)
        self.residency.streams.record(made, "compute")
        for chunk, home in enumerate(self.store.parameters):
            run = updating(home, Cell(("gradients", -1), self.trace), list(self.store.first_values()[home.name]))
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
            self._bring(chunk, number)
            outputs = make(self.trace, "compute", ("other",), self.residency.wait(chunk, number, self._slots(chunk)))
            self.residency.release(chunk, number)
            self.read_by_others += outputs

    def backward_of_others(self, first: int = 0) -> None:
        """Make gradients of some chunk in every buffer that chunks share; they wait for ``step()``."""
        self.residency.mode = "at_step"
        trained = trained_chunks(self.chunks)
        for number in rotated(self.chunks.buffers if trained else 0, first):
            chunk = trained[number % len(trained)]
            slots = self._slots(chunk)
            gradients = make(self.trace, "compute", ("gradients", number, chunk), (), len(slots))
            self.residency.collect(chunk, number, slots, gradients)
            self._take_away(chunk, number)
            self.residency.update(chunk, slots)

    def _bring(self, chunk: int, buffer: int) -> None:
        self.residency.prefetch(chunk, buffer)

    def _take_away(self, chunk: int, buffer: int) -> None:
        self.residency.offload(chunk, buffer)

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
                values[node] = make(self.trace, "compute", how, args[0], count)
            elif node.target is ops.snapshot:
                (values[node],) = make(self.trace, "compute", ("snapshot",), args)
            else:
                executor = self.residency if "chunk" in kwargs else self.swap if "segment" in kwargs else None
                first = args if executor is None else (executor, *args[1:])
                values[node] = node.target(*first, **kwargs)
        self.trace.node = None
        return values
