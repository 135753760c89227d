"""One rank's runtime on symbols where ranks share chunks: the real ``ShardedResidency`` (see ``symbolic_runtime``).

This rank's shard stands for the whole chunk. A gather turns each value into ``gathered`` of it, a reduce into ``mean``
of it; so what was not gathered or reduced, or twice, is another value. A chunk that is whole on the device has a memory
of its own beside its home, the shard, though in truth the home is a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.symbolic import Cell, Memory, QueueStreams, Trace
from support.symbolic_runtime import SymbolicRuntime, SymbolicStore

from protrain_compile.chunks import ChunkBinding
from protrain_compile.runtime.chunk_store import StoreSpec
from protrain_compile.runtime.sharded_store import Division
from protrain_compile.sharded_residency import ShardedResidency


class RankStreams(QueueStreams):
    """Streams on which collectives run."""

    def run(self, call: Callable[[], None], stream: str) -> None:
        assert stream == "gather"
        call()


class SymbolicRanks:
    """The other ranks: what their collectives do to this rank's memory."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.home_of: dict[Any, Cell] = {}

    def shard(self, flat: Cell) -> Cell:
        return flat

    def all_gather(self, flat: Cell, what: str) -> None:
        self._change("gathered", flat, self.home_of.get(flat.name, flat))

    def reduce_scatter(self, flat: Cell, what: str) -> None:
        self._change("mean", flat, flat)

    def _change(self, how: str, target: Cell, source: Cell) -> None:
        def run(memory: Memory) -> None:
            memory[target.name] = {k: hash((how, v)) for k, v in memory.get(source.name, {}).items()}

        self.trace.add("gather", run, reads=(source.name,), writes=(target.name,))


class RankStore(SymbolicStore):
    """A sharded store whose memories are names."""

    def __init__(self, trace: Trace, spec: StoreSpec, chunks: ChunkBinding) -> None:
        super().__init__(trace, spec)
        assert chunks.sharding is not None
        self.division = Division(chunks.layout, chunks.sharding)
        self.ranks = SymbolicRanks(trace)
        self.whole_parameters: dict[int, Cell] = {}
        self.whole_gradients: dict[int, Cell] = {}
        for chunk, sharding in zip(chunks.layout.chunks, chunks.sharding, strict=True):
            index = chunk.index
            if chunks.residency[index] != "persistent":
                continue
            if sharding != "parameters":
                self.whole_parameters[index] = Cell(("whole", index), trace)
                self.ranks.home_of["whole", index] = self.parameters[index]
            if sharding == "states" and chunk.trainable:
                self.whole_gradients[index] = Cell(("whole gradients", index), trace)


class RankRuntime(SymbolicRuntime):
    """Runs schedules of a model whose chunks ranks share."""

    RESIDENCY = ShardedResidency
    STREAMS = RankStreams
    residency: ShardedResidency

    def _make_store(self, spec: StoreSpec) -> SymbolicStore:
        return RankStore(self.trace, spec, self.chunks)

    def _make_residency(self) -> ShardedResidency:
        made = super()._make_residency()
        assert isinstance(made, ShardedResidency)
        made._segments_of = self._offsets  # type: ignore[assignment]
        events = (("gathered", made._gathered), ("collected", made._collected), ("reduced", made._reduced))
        for kind, found in (*events, ("written", made._updated)):
            for event in found.values():
                event.kind = kind  # type: ignore[attr-defined]
        return made

    def step(self) -> None:
        """Reduce what was kept whole; see the base class."""
        self.residency.complete()
        super().step()

    def _bring(self, chunk: int, buffer: int) -> None:
        super()._bring(chunk, buffer)
        self.residency.all_gather(chunk, buffer)

    def _take_away(self, chunk: int, buffer: int) -> None:
        self.residency.reduce_scatter(chunk, buffer)
        if self.chunks.residency[chunk] == "persistent":
            self.residency.release(chunk, buffer)
        else:
            super()._take_away(chunk, buffer)


def runtime_for(chunks: ChunkBinding, landings: int, **arguments: Any) -> SymbolicRuntime:
    """Return the runtime on symbols for a model's chunks."""
    return (SymbolicRuntime if chunks.sharding is None else RankRuntime)(chunks, landings, **arguments)
