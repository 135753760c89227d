"""Pass shard_collectives: chunks that ranks share are gathered before use, and their gradients reduced.

``place`` has decided when a chunk begins to move and where to; each rank moves its shard, and the ranks do the rest::

    prefetch(residency, chunk=3, buffer=1)          # h2d: this rank's shard, into its place in the buffer
    all_gather(residency, chunk=3, buffer=1)        # gather: in place; every rank has the whole chunk
    ...
    collect(residency, pack(g0, g1), chunk=3, buffer=1)
    reduce_scatter(residency, chunk=3, buffer=1)    # gather: in place; this rank's shard of the mean
    offload(residency, chunk=3, buffer=1)           # d2h: the shard

A persistent chunk whose parameters are divided needs no prefetch: its shard is on the device. One that is whole on the
device is gathered in place after each update, in the order of first use: as early in the next forward (or inference) as
the gathers before it allow. All collectives are on one stream and in program order, so equal graphs make equal
sequences on all ranks.

A chunk on the device is updated on the compute stream, which would wait for the reduce_scatter right before: the update
moves behind the gradients of the next call, which hide it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from torch import fx

from passes.schedule_graph import ChunkCall, chunk_of, is_persistent, segment_of
from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Schedule, operation_of

STREAM = "gather"


class ShardCollectives:
    """Insert all_gather and reduce_scatter; divide what moves over the link."""

    name: ClassVar[str] = "shard_collectives"
    requires: ClassVar[frozenset[str]] = frozenset({"placed"})
    provides: ClassVar[frozenset[str]] = frozenset({"divided"})

    def run(self, schedule: Schedule) -> bool:
        """Rewrite every graph; does nothing for a model that one rank holds."""
        chunks = schedule.chunks
        if chunks is None or chunks.sharding is None:
            return False
        for name, module in schedule.graphs.items():
            _gather_in_buffers(module, chunks)
            if name != "backward":
                _gather_resident(module, chunks)
            _reduce(module, chunks)
            _delay_updates(module, chunks)
            module.recompile()
        schedule.divided = True
        return True


def _gather_in_buffers(module: fx.GraphModule, chunks: ChunkBinding) -> None:
    for node in list(module.graph.nodes):
        chunk = chunk_of(node, ops.prefetch)
        if chunk is None:
            continue
        with module.graph.inserting_after(node):
            _collective(module, chunks, ops.all_gather, chunk, segment_of(node), _buffer_of(node))
        if is_persistent(chunks, chunk):
            module.graph.erase_node(node)
        else:
            _divide(node, chunks)


def _gather_resident(module: fx.GraphModule, chunks: ChunkBinding) -> None:
    """Insert the gathers of chunks that are whole on the device, each behind the gather of the use before."""
    nodes = list(module.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    anchor = next(node for node in reversed(nodes) if node.op == "placeholder")
    reached = order[anchor]
    latest: dict[tuple[int, int | None], fx.Node] = {}
    for node in nodes:
        if (chunk := chunk_of(node, ops.all_gather)) is not None:
            latest[chunk, _buffer_of(node)] = node
        elif (chunk := chunk_of(node, ops.wait)) is not None:
            gather = latest.get((chunk, _buffer_of(node)))
            if gather is not None and order[gather] > reached:
                anchor, reached = gather, order[gather]
        elif (chunk := chunk_of(node, ops.bind)) is not None:
            with module.graph.inserting_after(anchor):
                anchor = _collective(module, chunks, ops.all_gather, chunk, segment_of(node), None)


def _reduce(module: fx.GraphModule, chunks: ChunkBinding) -> None:
    for node in list(module.graph.nodes):
        if (chunk := chunk_of(node, ops.collect)) is not None:
            with module.graph.inserting_after(node):
                _collective(module, chunks, ops.reduce_scatter, chunk, segment_of(node), _buffer_of(node))
        elif chunk_of(node, ops.offload) is not None:
            _divide(node, chunks)


def _delay_updates(module: fx.GraphModule, chunks: ChunkBinding) -> None:
    """Move the updates of chunks on the device behind the next call's gradients, or to the end of the graph."""
    waiting: list[fx.Node] = []
    ripe: list[fx.Node] = []
    for node in list(module.graph.nodes):
        if isinstance(node.target, Artefact):
            ripe, waiting = ripe + waiting, []
        chunk = chunk_of(node, ops.update)
        if chunk is None and node.op != "output":
            continue
        for each in ripe if chunk is not None else ripe + waiting:
            node.prepend(each)
        ripe = []
        if chunk is not None and is_persistent(chunks, chunk):
            waiting.append(node)


def _collective(
    module: fx.GraphModule,
    chunks: ChunkBinding,
    target: Callable[..., Any],
    chunk: int,
    segment: int,
    buffer: int | None,
) -> fx.Node:
    """Write a collective; it moves what the other ranks own of the chunk."""
    moved = chunks.layout.chunks[chunk].size_bytes // chunks.ranks * (chunks.ranks - 1)
    call = ChunkCall(target, chunk, STREAM, segment, moved_bytes=moved, has_buffer=buffer is not None)
    node = call.write(module)
    if buffer is not None:
        node.kwargs = {**node.kwargs, "buffer": buffer}
    return node


def _buffer_of(node: fx.Node) -> int | None:
    return node.kwargs.get("buffer")  # type: ignore[return-value]


def _divide(node: fx.Node, chunks: ChunkBinding) -> None:
    """Note that a copy over the link moves this rank's shard only."""
    operation = operation_of(node)
    assert operation is not None
    moved = chunks.layout.chunks[operation.chunk].size_bytes // chunks.ranks
    node.meta["operation"] = dataclasses.replace(operation, moved_bytes=moved)
