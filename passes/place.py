"""Pass place: decide which buffer every stretch of a chunk's use occupies, and when its prefetch starts.

``protrain_compile.buffers`` chooses; this pass finds the stays, writes the buffers and inserts the prefetches.

Contract at entry: the forward and the inference expect nothing in the buffers; the backward expects what the forward
leaves. At run time ``wait`` repairs a difference by a demand fetch, which is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import fx

from passes.schedule_graph import ChunkCall, chunk_of, segment_of
from protrain_compile import ops
from protrain_compile.buffers import Contents, Placing, Stay, place_stays
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Schedule


@dataclasses.dataclass
class Stretch:
    """The nodes of one stay, from first to last, by position in the graph."""

    chunk: int
    needs_parameters: bool
    nodes: list[fx.Node]
    begin: int
    end: int
    keeps_content: bool = True

    @property
    def stay(self) -> Stay:
        """The stay as plain data."""
        return Stay(self.chunk, self.begin, self.end, self.needs_parameters, self.keeps_content)


class Place:
    """Assign buffers and insert prefetches."""

    name: ClassVar[str] = "place"
    requires: ClassVar[frozenset[str]] = frozenset({"updates"})
    provides: ClassVar[frozenset[str]] = frozenset({"placed"})

    def run(self, schedule: Schedule) -> bool:
        """Rewrite every graph; does nothing for a model that is not prepared."""
        chunks = schedule.chunks
        if chunks is None:
            return False
        split = frozenset(index for index, each in enumerate(chunks.residency) if each == "split")
        left: Contents = {}
        changed = False
        for name in ("inference", "forward", "backward"):
            if name not in schedule.graphs:
                continue
            module = schedule.graphs[name]
            stretches = find_stretches(module)
            entry = left if name == "backward" else {}
            placed, left = place_stays([each.stay for each in stretches], chunks.buffers, split, entry)
            _write(module, chunks, stretches, placed)
            module.recompile()
            changed = changed or bool(stretches)
        return changed


def find_stretches(module: fx.GraphModule) -> list[Stretch]:
    """Return the stretches of a graph that occupy a buffer, in order of their begin."""
    found: list[Stretch] = []
    current: dict[int, Stretch] = {}
    for position, node in enumerate(module.graph.nodes):
        chunk = chunk_of(node, ops.wait, ops.collect, ops.release, ops.offload)
        if chunk is None or "buffer" not in node.kwargs:
            continue
        if chunk not in current:
            current[chunk] = Stretch(chunk, node.target is ops.wait, [], position, position)
            found.append(current[chunk])
        stretch = current[chunk]
        stretch.nodes.append(node)
        stretch.end = position
        if node.target is ops.collect:
            stretch.keeps_content = False
        if node.target in (ops.release, ops.offload):
            del current[chunk]
    return found


def _write(
    module: fx.GraphModule, chunks: ChunkBinding, stretches: Sequence[Stretch], placed: Sequence[Placing]
) -> None:
    """Write every stretch's buffer; insert the prefetches, those at the start of the graph in order."""
    placeholders: list[fx.Node] = list(module.graph.find_nodes(op="placeholder"))
    front = placeholders[-1]
    for stretch, placing in zip(stretches, placed, strict=True):
        for node in stretch.nodes:
            node.kwargs = {**node.kwargs, "buffer": placing.buffer}
        if not placing.fetched:
            continue
        at_start = placing.behind < 0
        with module.graph.inserting_after(front if at_start else stretches[placing.behind].nodes[-1]):
            node = _prefetch(module, chunks, stretch, placing.buffer)
        front = node if at_start else front


def _prefetch(module: fx.GraphModule, chunks: ChunkBinding, stretch: Stretch, buffer: int) -> fx.Node:
    size = chunks.layout.chunks[stretch.chunk].size_bytes
    call = ChunkCall(ops.prefetch, stretch.chunk, "h2d", segment_of(stretch.nodes[0]), moved_bytes=size)
    node = call.write(module)
    node.kwargs = {**node.kwargs, "buffer": buffer}
    return node
