"""How the movement passes read and write schedule graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Operation, Schedule, operation_of

NO_BUFFER = -1
"""Buffer of a node before ``place`` has decided it."""


def managed_placeholders(schedule: Schedule, graph: str) -> dict[fx.Node, tuple[int, int]]:
    """Return chunk and slot of every placeholder of ``graph`` that stands for a managed parameter."""
    assert schedule.chunks is not None
    placeholders = _argument_placeholders(schedule, graph)
    positions = schedule.backward_inputs.primals if graph == "backward" else range(len(schedule.program.inputs))
    places = schedule.chunks.place_of
    return {node: places[i] for node, i in zip(placeholders, positions, strict=False) if i in places}


def gathered_placeholders(schedule: Schedule, graph: str) -> set[fx.Node]:
    """Return the managed placeholders that the graph reads in another type than their chunk has."""
    assert schedule.chunks is not None
    positions = schedule.backward_inputs.primals if graph == "backward" else range(len(schedule.program.inputs))
    return {
        node
        for node, i in zip(_argument_placeholders(schedule, graph), positions, strict=False)
        if i in schedule.chunks.gathered
    }


def _argument_placeholders(schedule: Schedule, graph: str) -> list[fx.Node]:
    placeholders = schedule.graphs[graph].graph.find_nodes(op="placeholder")
    return [node for node in placeholders if not node.meta.keys() & {"residency", "swap"}]


def residency_placeholder(module: fx.GraphModule) -> fx.Node:
    """Return the placeholder for the residency, the first of the graph; add it if it is not there."""
    first: fx.Node = next(iter(module.graph.nodes))
    if "residency" in first.meta:
        return first
    with module.graph.inserting_before(first):
        node = module.graph.placeholder("residency")
    node.meta["residency"] = True
    return node


def artefact_calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the artefact calls in order."""
    return (node for node in module.graph.nodes if isinstance(node.target, Artefact))


def packed_arguments(call: fx.Node) -> fx.Node:
    """Return the pack whose list ``call`` empties."""
    packed = call.args[0]
    assert isinstance(packed, fx.Node)
    assert packed.target is ops.pack
    return packed


@dataclasses.dataclass(frozen=True)
class ChunkCall:
    """An operation on a chunk, as it is to be written."""

    target: Callable[..., Any]
    chunk: int
    stream: str
    segment: int
    moved_bytes: int = 0
    slots: tuple[int, ...] | None = None
    has_buffer: bool = True

    def write(self, module: fx.GraphModule, *arguments: fx.Node) -> fx.Node:
        """Write the call at the graph's insertion point."""
        kwargs: dict[str, Any] = {"chunk": self.chunk}
        if self.has_buffer:
            kwargs["buffer"] = NO_BUFFER
        if self.slots is not None:
            kwargs["slots"] = self.slots
        kwargs["stream"] = self.stream
        node = module.graph.call_function(self.target, (residency_placeholder(module), *arguments), kwargs)
        name = self.target.__name__
        node.meta["operation"] = Operation(
            name, f"chunk {self.chunk}", self.stream, self.segment, moved_bytes=self.moved_bytes, chunk=self.chunk
        )
        return node


def chunk_of(node: fx.Node, *targets: Callable[..., Any]) -> int | None:
    """Return the chunk of a node that calls one of ``targets``, else None."""
    if node.op == "call_function" and node.target in targets:
        return int(node.kwargs["chunk"])  # type: ignore[arg-type]
    return None


def is_persistent(chunks: ChunkBinding, chunk: int) -> bool:
    """Whether the chunk's parameters and states live on the device."""
    return chunks.residency[chunk] == "persistent"


def is_resident(chunks: ChunkBinding, chunk: int) -> bool:
    """Whether the chunk's whole parameters stay on the device: it takes no chunk buffer to use them."""
    return is_persistent(chunks, chunk) and (chunks.sharding is None or chunks.sharding[chunk] != "parameters")


def keeps_gradient(chunks: ChunkBinding, chunk: int) -> bool:
    """Whether the device has storage for the chunk's whole gradient: it takes no chunk buffer to collect it."""
    return is_persistent(chunks, chunk) and (chunks.sharding is None or chunks.sharding[chunk] == "states")


def segment_of(node: fx.Node) -> int:
    """Return the segment that an operation belongs to."""
    operation = operation_of(node)
    assert operation is not None
    return operation.segment
