"""Pass insert_updates: gradients of managed parameters end in their chunk, which is then updated.

After the last call of the backward that reads a chunk or makes one of its gradients::

    collect(residency, pack(g0, g1), chunk=3, slots=(0, 1))   # compute: write gradients in place of the parameters
    offload(residency, chunk=3)                               # d2h: one flat copy; frees the buffer
    update(residency, chunk=3, slots=(0, 1))                  # host

A persistent chunk has gradient storage of its own and is updated on the device: collect, update. Where ranks share it,
its gradient may be collected in a chunk buffer: collect, release, update. Autograd receives None for these parameters.
A slot without a gradient in this graph is not updated, as eager leaves it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from passes.schedule_graph import ChunkCall, chunk_of, is_persistent, keeps_gradient, segment_of
from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Schedule, operation_of

Gradients = dict[int, dict[int, fx.Node]]


class InsertUpdates:
    """Insert collect, offload and update into the backward."""

    name: ClassVar[str] = "insert_updates"
    requires: ClassVar[frozenset[str]] = frozenset({"chunks"})
    provides: ClassVar[frozenset[str]] = frozenset({"updates"})

    def run(self, schedule: Schedule) -> bool:
        """Rewrite the backward; does nothing without one, or for a model that is not prepared."""
        if schedule.chunks is None or "backward" not in schedule.graphs:
            return False
        module = schedule.graphs["backward"]
        found = _take_gradients(module, schedule.chunks)
        for chunk, gradients in found.items():
            _finish(module, schedule.chunks, chunk, dict(sorted(gradients.items())))
        module.recompile()
        return bool(found)


def _take_gradients(module: fx.GraphModule, chunks: ChunkBinding) -> Gradients:
    """Replace managed parameters' gradients in the output by None; return them by chunk and slot."""
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    found: Gradients = {}
    for position, (chunk, slot) in chunks.place_of.items():
        if position < len(results) and isinstance(results[position], fx.Node):
            found.setdefault(chunk, {})[slot] = results[position]
            results[position] = None
    output.args = (tuple(results),)
    return found


def _finish(module: fx.GraphModule, chunks: ChunkBinding, chunk: int, gradients: dict[int, fx.Node]) -> None:
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    releases = [node for node in order if chunk_of(node, ops.release) == chunk]
    last = max([*gradients.values(), *releases], key=order.__getitem__)
    slots = tuple(gradients)
    segment = _segment_before(last)
    persistent = is_persistent(chunks, chunk)
    size = chunks.layout.chunks[chunk].size_bytes
    with module.graph.inserting_after(last):
        # Written last first: each goes right behind `last`.
        updated = ChunkCall(
            ops.update, chunk, "compute" if persistent else "host", segment, slots=slots, has_buffer=False
        )
        updated.write(module)
        if not persistent:
            ChunkCall(ops.offload, chunk, "d2h", segment, moved_bytes=size).write(module)
        elif not keeps_gradient(chunks, chunk):
            ChunkCall(ops.release, chunk, "compute", segment).write(module)
        packed = module.graph.call_function(ops.pack, tuple(gradients.values()))
    with module.graph.inserting_after(packed):
        in_buffer = not keeps_gradient(chunks, chunk)
        call = ChunkCall(ops.collect, chunk, "compute", segment, slots=slots, has_buffer=in_buffer)
        call.write(module, packed)
    waits = [order[node] for node in order if chunk_of(node, ops.wait) not in (None, chunk)]
    if releases and not any(order[releases[-1]] < wait < order[last] for wait in waits):
        # The buffer goes on to hold the gradients, and offload frees it. With another chunk's use in between it is
        # released, and collect takes a buffer when the gradients are complete.
        module.graph.erase_node(releases[-1])


def _segment_before(node: fx.Node) -> int:
    """Return the segment of the operation that ``node`` is or follows."""
    while operation_of(node) is None:
        node = node.prev
    return segment_of(node)
