"""The verifier's part about chunks: one walk over each graph in program order, from the contract at entry.

* every use of a chunk's views lies between its ``wait`` and its ``release`` or ``collect`` (DESIGN 7, invariant 1)
* a ``wait`` finds its chunk: a ``prefetch`` brought it into that buffer, or the contract at entry says so (2)
* a buffer is filled anew, or taken for gradients, only after the stay in it has ended (3)
* chunks take standard buffers of which there are as many as the plan says, or their own (4)
* gradients go collect, [offload,] update, once per trainable chunk; nothing reads the parameters after that (3, 5)
* every operation has a row in ``effects``
* a chunk that ranks share is used only where it has been gathered, and its gradient is reduced before it leaves or is
  used (1, 5); that the ranks' sequences are the same is checked when they compile (8, see ``schedule_digest``)

Whether streams and events keep that order too, within a graph and from step to step, is ``verify_order``'s part. Before
``place`` has decided the buffers, chunks take none, and only the order within the graph is checked; so it is of chunks
that ranks share until ``shard_collectives`` has written the collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.chunk_views import Operation, schedule_operations
from passes.effects import effect_of
from passes.rank_effects import table_of
from passes.schedule_graph import NO_BUFFER, is_persistent
from passes.verify_order import verify_order
from passes.violation import fail_at
from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Schedule, operation_of

Contents = dict[int, int]


def verify_chunks(schedule: Schedule, where: str) -> None:
    """Check the movement of chunks in every graph, and the order of its steps along the ways through training.

    Raises:
        VerifierError: If an invariant does not hold.
    """
    assert schedule.chunks is not None
    table = table_of(schedule.chunks)
    for name, module in schedule.graphs.items():
        for node in module.graph.nodes:
            if operation_of(node) is not None and effect_of(node, table) is None:
                fail_at(where, name, node, "has no row in the table of effects")
    operations = schedule_operations(schedule)
    left: Contents = {}
    whole: frozenset[int] = frozenset()
    for name in ("inference", "forward", "backward"):
        if name in operations:
            walk = _Walk(where, name, schedule.chunks, dict(left) if name == "backward" else {})
            walk.divided, walk.gathered = schedule.divided, set(whole) if name == "backward" else set()
            left, whole = walk.run(operations[name]), frozenset(walk.gathered)
    placed = not any(each.call.buffer == NO_BUFFER for found in operations.values() for each in found)
    if placed and (schedule.chunks.sharding is None or schedule.divided):
        verify_order(schedule, where, operations)


@dataclasses.dataclass
class _Gradient:
    """What has become of a chunk's gradient."""

    state: str
    node: fx.Node
    slots: tuple[int, ...]


class _Walk:
    """What is known at one point of a graph: what buffers hold, which chunks stay in one, what became of gradients.

    Once collectives are written (``divided``): ``shards`` are the buffers with this rank's shard only, ``gathered`` the
    chunks whole on the device.
    """

    def __init__(self, where: str, graph: str, chunks: ChunkBinding, contents: Contents) -> None:
        self.where = where
        self.graph = graph
        self.chunks = chunks
        self.contents = contents
        self.stays: dict[int, fx.Node] = {}
        self.tenant: dict[int, int] = {}
        self.gradients: dict[int, _Gradient] = {}
        self.divided = False
        self.shards: set[int] = set()
        self.gathered: set[int] = set()

    def run(self, operations: Sequence[Operation]) -> Contents:
        """Walk the graph; return what the buffers hold at its end."""
        for operation in operations:
            self._check_reads(operation)
            visit = _VISITS.get(operation.node.target)  # type: ignore[arg-type]
            if visit is not None:
                self._check_buffer(operation)
                visit(self, operation.node, operation.call.chunk, operation.call.buffer)
        for gradient in self.gradients.values():
            if gradient.state != "updated":
                self._fail(gradient.node, f"the gradient is {gradient.state} but its chunk is never updated with it")
        return self.contents

    def _fail(self, node: fx.Node, message: str, other: fx.Node | None = None) -> None:
        fail_at(self.where, self.graph, node, message, other)

    def _check_reads(self, operation: Operation) -> None:
        for resource, content, _ in operation.call.inputs:
            chunk = int(content.key) if content.kind == "parameters" else -1
            if resource.kind == "buffer" and chunk not in self.stays:
                self._fail(operation.node, f"reads chunk {chunk} after it has left its buffer, or before it arrived")
            if chunk in self.gradients:
                other = self.gradients[chunk].node
                self._fail(operation.node, f"reads chunk {chunk} after gradients took its place", other)

    def _check_buffer(self, operation: Operation) -> None:
        buffer, chunk = operation.call.buffer, operation.call.chunk
        if buffer is None or buffer == NO_BUFFER:
            return
        own = self.chunks.buffers + chunk
        right = buffer == own if self.chunks.residency[chunk] == "split" else 0 <= buffer < self.chunks.buffers
        if not right or (is_persistent(self.chunks, chunk) and self.chunks.sharding is None):
            self._fail(operation.node, f"uses buffer {buffer}, which is not for {self.chunks.residency[chunk]} chunks")

    def _prefetch(self, node: fx.Node, chunk: int, buffer: int) -> None:
        if buffer in self.tenant:
            other = self.stays[self.tenant[buffer]]
            self._fail(node, f"fills buffer {buffer} while chunk {self.tenant[buffer]} stays in it", other)
        if chunk in self.gradients:
            gradient = self.gradients[chunk]
            self._fail(node, f"fetches the chunk after its gradient was {gradient.state}", gradient.node)
        self.contents[buffer] = chunk
        if self.divided:
            self.shards.add(buffer)

    def _all_gather(self, node: fx.Node, chunk: int, buffer: int | None) -> None:
        if buffer is None:
            self.gathered.add(chunk)
            return
        if is_persistent(self.chunks, chunk):
            self._prefetch(node, chunk, buffer)  # its shard is on the device
        if self.contents.get(buffer) != chunk or buffer not in self.shards:
            self._fail(node, f"gathers in buffer {buffer}, which has no shard of it")
        self.shards.discard(buffer)

    def _bind(self, node: fx.Node, chunk: int, _: int | None) -> None:
        if self.divided and chunk not in self.gathered:
            self._fail(node, "uses the chunk before it is gathered")

    def _wait(self, node: fx.Node, chunk: int, buffer: int) -> None:
        if buffer != NO_BUFFER and self.contents.get(buffer) != chunk:
            self._fail(node, f"waits for a chunk that nothing brought into buffer {buffer}")
        if buffer in self.shards:
            self._fail(node, f"uses the chunk before it is gathered in buffer {buffer}")
        self._take(node, chunk, buffer, "uses")

    def _take(self, node: fx.Node, chunk: int, buffer: int, what: str) -> None:
        """Let a chunk stay in a buffer from here on."""
        if self.tenant.get(buffer, chunk) != chunk:
            other = self.stays[self.tenant[buffer]]
            self._fail(node, f"{what} buffer {buffer} while chunk {self.tenant[buffer]} stays in it", other)
        self.stays[chunk] = node
        if buffer != NO_BUFFER:
            self.tenant[buffer] = chunk

    def _leave(self, node: fx.Node, chunk: int, buffer: int, what: str) -> None:
        """End a chunk's stay."""
        tenant = chunk if buffer == NO_BUFFER else self.tenant.get(buffer)
        if chunk not in self.stays or tenant != chunk:
            self._fail(node, f"{what} buffer {buffer}, in which the chunk does not stay")
        del self.stays[chunk]
        self.tenant.pop(buffer, None)

    def _release(self, node: fx.Node, chunk: int, buffer: int) -> None:
        self._leave(node, chunk, buffer, "releases")

    def _collect(self, node: fx.Node, chunk: int, buffer: int | None) -> None:
        if not self.chunks.layout.chunks[chunk].trainable:
            self._fail(node, "collects gradients of a frozen chunk")
        if chunk in self.gradients:
            gradient = self.gradients[chunk]
            self._fail(node, f"collects gradients that were {gradient.state} already", gradient.node)
        self.gradients[chunk] = _Gradient("collected", node, _slots(node))
        if buffer is not None:
            self._take(node, chunk, buffer, "writes gradients into")
            self.contents.pop(buffer, None)

    def _reduce_scatter(self, node: fx.Node, chunk: int, buffer: int | None) -> None:
        gradient = self.gradients.get(chunk)
        there = buffer is None or self.tenant.get(buffer) == chunk
        if gradient is None or gradient.state != "collected" or not there:
            self._fail(node, "reduces gradients that were not collected there")
            return
        self.gradients[chunk] = dataclasses.replace(gradient, state="reduced", node=node)

    def _offload(self, node: fx.Node, chunk: int, buffer: int) -> None:
        gradient = self.gradients.get(chunk)
        if gradient is None or gradient.state != self._complete:
            self._fail(node, f"offloads gradients that buffer {buffer} does not hold")
            return
        self._leave(node, chunk, buffer, "offloads")
        self.gradients[chunk] = dataclasses.replace(gradient, state="offloaded", node=node)

    @property
    def _complete(self) -> str:
        """The state of a gradient that may leave or be used."""
        return "reduced" if self.divided else "collected"

    def _update(self, node: fx.Node, chunk: int, _: int | None) -> None:
        expected = self._complete if is_persistent(self.chunks, chunk) else "offloaded"
        gradient = self.gradients.get(chunk)
        if gradient is None or gradient.state != expected:
            state = "not there" if gradient is None else gradient.state
            self._fail(node, f"updates with a gradient that is {state}, not {expected}")
            return
        if gradient.slots != _slots(node):
            self._fail(node, f"updates slots {_slots(node)} with gradients of slots {gradient.slots}", gradient.node)
        self.gradients[chunk] = dataclasses.replace(gradient, state="updated", node=node)


def _slots(node: fx.Node) -> tuple[int, ...]:
    slots: Any = node.kwargs["slots"]
    return tuple(slots)


_VISITS: dict[Callable[..., Any], Callable[[_Walk, fx.Node, int, Any], None]] = {
    ops.all_gather: _Walk._all_gather,
    ops.reduce_scatter: _Walk._reduce_scatter,
    ops.bind: _Walk._bind,
    ops.prefetch: _Walk._prefetch,
    ops.wait: _Walk._wait,
    ops.release: _Walk._release,
    ops.collect: _Walk._collect,
    ops.offload: _Walk._offload,
    ops.update: _Walk._update,
}
