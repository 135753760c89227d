"""The verifier's part about chunks: one walk over each graph in program order, from the contract at entry.

* every use of a chunk's views lies between its ``wait`` and its ``release`` or ``collect`` (DESIGN 7, invariant 1)
* a ``wait`` finds its chunk: a ``prefetch`` brought it into that buffer, or the contract at entry says so (2)
* a buffer is filled anew, or taken for gradients, only after the stay in it has ended (3)
* gradients go collect, [offload,] update, once per chunk; nothing reads the parameters after that (3, 5)
"""

from __future__ import annotations

import dataclasses
import operator

from torch import fx

from passes.schedule_graph import NO_BUFFER, chunk_of
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule

Contents = dict[int, int]


@dataclasses.dataclass
class _Walk:
    """What is known at one point of a graph: what each buffer holds, which stays are open, what became of gradients."""

    where: str
    contents: Contents
    open: dict[int, int] = dataclasses.field(default_factory=dict)
    closed_views: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    views: dict[int, list[fx.Node]] = dataclasses.field(default_factory=dict)
    gradients: dict[int, str] = dataclasses.field(default_factory=dict)

    def fail(self, node: fx.Node, message: str, other: fx.Node | None = None) -> None:
        """Raise, naming the node and the other one."""
        seen = f" ({other.name})" if other is not None else ""
        raise VerifierError(f"{self.where}{node.name}, chunk {node.kwargs.get('chunk', '-')}: {message}{seen}")


def verify_chunks(schedule: Schedule, where: str) -> None:
    """Check the movement of chunks in every graph; does nothing before ``place`` has decided the buffers.

    Raises:
        VerifierError: If an invariant does not hold.
    """
    left: Contents = {}
    for name in ("inference", "forward", "backward"):
        module = schedule.graphs.get(name)
        if module is None or any(node.kwargs.get("buffer") == NO_BUFFER for node in module.graph.nodes):
            continue
        walk = _Walk(f"{where}{name} graph: ", dict(left) if name == "backward" else {})
        for node in module.graph.nodes:
            _visit(walk, node)
        for chunk, state in walk.gradients.items():
            if state != "updated":
                raise VerifierError(f"{walk.where}the gradient of chunk {chunk} is {state} but never updated with")
        left = walk.contents


def _visit(walk: _Walk, node: fx.Node) -> None:
    for source in node.all_input_nodes:
        if source in walk.closed_views:
            walk.fail(node, f"reads {source.name} after its chunk has left", walk.closed_views[source])
    made = node.args[0] if node.target is operator.getitem else None
    if isinstance(made, fx.Node) and (chunk := chunk_of(made, ops.wait, ops.bind)) is not None:
        walk.views.setdefault(chunk, []).append(node)
    visit = _VISITS.get(node.target)  # type: ignore[arg-type]
    if node.op == "call_function" and visit is not None:
        visit(walk, node, int(node.kwargs["chunk"]), node.kwargs.get("buffer"))  # type: ignore[arg-type]


def _prefetch(walk: _Walk, node: fx.Node, chunk: int, buffer: int) -> None:
    if buffer in walk.open:
        walk.fail(node, f"fills buffer {buffer} while chunk {walk.open[buffer]} stays in it")
    if chunk in walk.gradients:
        walk.fail(node, f"fetches the chunk after its gradient was {walk.gradients[chunk]}")
    walk.contents[buffer] = chunk


def _wait(walk: _Walk, node: fx.Node, chunk: int, buffer: int) -> None:
    if walk.contents.get(buffer) != chunk:
        walk.fail(node, f"waits for a chunk that nothing brought into buffer {buffer}")
    if buffer in walk.open:
        walk.fail(node, f"uses buffer {buffer} while chunk {walk.open[buffer]} stays in it")
    walk.open[buffer] = chunk


def _close_views(walk: _Walk, node: fx.Node, chunk: int) -> None:
    walk.closed_views.update((view, node) for view in walk.views.pop(chunk, ()))


def _release(walk: _Walk, node: fx.Node, chunk: int, buffer: int) -> None:
    if walk.open.pop(buffer, None) != chunk:
        walk.fail(node, f"releases buffer {buffer}, in which the chunk does not stay")
    _close_views(walk, node, chunk)


def _collect(walk: _Walk, node: fx.Node, chunk: int, buffer: int | None) -> None:
    if chunk in walk.gradients:
        walk.fail(node, f"collects gradients that were {walk.gradients[chunk]} already")
    walk.gradients[chunk] = "collected"
    _close_views(walk, node, chunk)
    if buffer is None:
        return
    if walk.open.setdefault(buffer, chunk) != chunk:
        walk.fail(node, f"writes gradients into buffer {buffer} while chunk {walk.open[buffer]} stays in it")
    walk.contents.pop(buffer, None)


def _offload(walk: _Walk, node: fx.Node, chunk: int, buffer: int) -> None:
    if walk.gradients.get(chunk) != "collected" or walk.open.pop(buffer, None) != chunk:
        walk.fail(node, f"offloads gradients that buffer {buffer} does not hold")
    walk.gradients[chunk] = "offloaded"


def _update(walk: _Walk, node: fx.Node, chunk: int, _: int | None) -> None:
    expected = "collected" if node.kwargs["stream"] == "compute" else "offloaded"
    if walk.gradients.get(chunk) != expected:
        walk.fail(node, f"updates with a gradient that is {walk.gradients.get(chunk, 'not there')}, not {expected}")
    walk.gradients[chunk] = "updated"


_VISITS = {
    ops.prefetch: _prefetch,
    ops.wait: _wait,
    ops.release: _release,
    ops.collect: _collect,
    ops.offload: _offload,
    ops.update: _update,
}
