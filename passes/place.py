"""Pass place: decide which buffer every stretch of a chunk's use occupies, and when its prefetch starts.

A *stay* is a chunk's time in a buffer: from ``wait`` (or from a ``collect`` without parameters) to ``release`` or
``offload``. Stays are served in order. A stay whose chunk is still in a buffer needs no copy: so the backward begins
with what the forward fetched last. Otherwise it takes the free buffer whose content is needed again last (the one free
for longest among equals), and its prefetch is put right behind the end of that buffer's last stay, or at the start of
the graph: as early as the buffer allows. Split chunks have a buffer of their own.

Contract at entry: the forward and the inference expect nothing in the buffers; the backward expects what the forward
leaves. At run time ``wait`` repairs a difference by a demand fetch, which is counted.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from passes.schedule_graph import ChunkCall, chunk_of, segment_of
from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding
from protrain_compile.errors import PlanError
from protrain_compile.schedule import Schedule

Contents = dict[int, int]
"""Which chunk's parameters each buffer holds."""


@dataclasses.dataclass
class Stay:
    """A chunk's time in a buffer: its nodes from first to last, by position in the graph."""

    chunk: int
    needs_parameters: bool
    nodes: list[fx.Node]
    begin: int
    end: int
    keeps_content: bool


class Place:
    """Assign buffers and insert prefetches."""

    name: ClassVar[str] = "place"
    requires: ClassVar[frozenset[str]] = frozenset({"updates"})
    provides: ClassVar[frozenset[str]] = frozenset({"placed"})

    def run(self, schedule: Schedule) -> bool:
        """Rewrite every graph; does nothing for a model that is not prepared."""
        if schedule.chunks is None:
            return False
        left: Contents = {}
        changed = False
        for name in ("inference", "forward", "backward"):
            if name in schedule.graphs:
                entry = left if name == "backward" else {}
                placement = _Placement(schedule.graphs[name], schedule.chunks, entry)
                left = placement.run()
                schedule.graphs[name].recompile()
                changed = changed or bool(placement.stays)
        return changed


class _Placement:
    def __init__(self, module: fx.GraphModule, chunks: ChunkBinding, entry: Contents) -> None:
        self.module = module
        self.chunks = chunks
        self.contents = dict(entry)
        self.stays = find_stays(module)
        self.last_stay: dict[int, Stay] = {}
        self.fronts: list[fx.Node] = []

    def run(self) -> Contents:
        """Place every stay; return what the buffers hold at the end of the graph."""
        for number, stay in enumerate(self.stays):
            buffer = self._buffer(number, stay)
            cached = self.contents.get(buffer) == stay.chunk
            if stay.needs_parameters and not cached:
                self._prefetch(stay, buffer)
            for node in stay.nodes:
                node.kwargs = {**node.kwargs, "buffer": buffer}
            self.last_stay[buffer] = stay
            self.contents.pop(buffer, None)
            if stay.keeps_content:
                self.contents[buffer] = stay.chunk
        return self.contents

    def _buffer(self, number: int, stay: Stay) -> int:
        if self.chunks.residency[stay.chunk] == "split":
            return own_buffer(self.chunks, stay.chunk)
        free = [b for b in range(self.chunks.buffers) if b not in self.last_stay or self.last_stay[b].end < stay.begin]
        holding = [b for b in free if self.contents.get(b) == stay.chunk]
        if holding:
            return holding[0]
        if not free:
            raise PlanError(
                f"plan: buffers={self.chunks.buffers} are too few: one call uses chunks of that many; give more"
            )
        return max(free, key=lambda b: (self._next_use(number, b), -self._free_since(b), -b))

    def _next_use(self, number: int, buffer: int) -> int:
        content = self.contents.get(buffer)
        later = (
            i for i, stay in enumerate(self.stays) if i > number and stay.chunk == content and stay.needs_parameters
        )
        return next(later, len(self.stays)) if content is not None else len(self.stays)

    def _free_since(self, buffer: int) -> int:
        return self.last_stay[buffer].end if buffer in self.last_stay else -1

    def _prefetch(self, stay: Stay, buffer: int) -> None:
        size = self.chunks.layout.chunks[stay.chunk].size_bytes
        call = ChunkCall(ops.prefetch, stay.chunk, "h2d", segment_of(stay.nodes[0]), moved_bytes=size)
        before = self.last_stay.get(buffer)
        if before is not None:
            anchor = before.nodes[-1]
        elif self.fronts:
            anchor = self.fronts[-1]
        else:
            anchor = _last_placeholder(self.module)
        with self.module.graph.inserting_after(anchor):
            node = call.write(self.module)
        if before is None:
            self.fronts.append(node)
        stay.nodes.insert(0, node)


def own_buffer(chunks: ChunkBinding, chunk: int) -> int:
    """Return the number of a split chunk's own buffer."""
    return chunks.buffers + chunk


def find_stays(module: fx.GraphModule) -> list[Stay]:
    """Return the stays of a graph in order of their begin."""
    stays: list[Stay] = []
    current: dict[int, Stay] = {}
    for position, node in enumerate(module.graph.nodes):
        chunk = chunk_of(node, ops.wait, ops.collect, ops.release, ops.offload)
        if chunk is None or "buffer" not in node.kwargs:
            continue
        if chunk not in current:
            current[chunk] = Stay(chunk, node.target is ops.wait, [], position, position, keeps_content=True)
            stays.append(current[chunk])
        stay = current[chunk]
        stay.nodes.append(node)
        stay.end = position
        if node.target is ops.collect:
            stay.keeps_content = False
        if node.target in (ops.release, ops.offload):
            del current[chunk]
    return stays


def _last_placeholder(module: fx.GraphModule) -> fx.Node:
    placeholders: list[fx.Node] = list(module.graph.find_nodes(op="placeholder"))
    return placeholders[-1]
