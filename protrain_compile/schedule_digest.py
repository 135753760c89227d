"""What the schedules of all ranks must have in common, as lines of text: their chunks and their collectives, in order.

Nothing of shapes: ranks may have batches of different lengths and still gather and reduce the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Schedule

COLLECTIVES = (ops.all_gather, ops.reduce_scatter, ops.gather)


def collective_lines(schedule: Schedule) -> Iterator[str]:
    """Yield a line for every chunk and for every collective of ``schedule``; nothing for a model without chunks."""
    if schedule.chunks is None:
        return
    yield from layout_lines(schedule.chunks)
    for name, module in schedule.graphs.items():
        for node in module.graph.nodes:
            if node.target in COLLECTIVES:
                buffer = node.kwargs.get("buffer")
                place = "" if buffer is None else f" in buffer {buffer}"
                yield f"{name}: {node.target.__name__} of chunk {node.kwargs['chunk']}{place}"


def layout_lines(chunks: ChunkBinding) -> Iterator[str]:
    """Yield a line for every chunk: its place, size and parameters."""
    yield f"{chunks.buffers} buffers, {chunks.ranks} ranks"
    for chunk, residency in zip(chunks.layout.chunks, chunks.residency, strict=True):
        sharding = "whole" if chunks.sharding is None else f"{chunks.sharding[chunk.index]} divided"
        names = ", ".join(f"{chunks.layout.parameters[slot.parameter].name} at {slot.offset}" for slot in chunk.slots)
        yield f"chunk {chunk.index}: {residency}, {sharding}, {chunk.numel} x {chunk.dtype}: {names}"
