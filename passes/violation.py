"""How the verifier says what is wrong: the pass, the node, the other node, and ten rows of the schedule around them."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import tabulate
from torch import fx

from passes.chunk_views import Operation
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import operation_of

ROWS = 10


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step was issued: in a graph, by an operation; without one between graphs."""

    graph: str
    operation: Operation | None

    def __str__(self) -> str:
        """Return ``offload_2 (backward, chunk 3)``."""
        return self.graph if self.operation is None else _describe(self.graph, self.operation.node)


def fail(where: str, place: Place, message: str, other: Place | None = None) -> NoReturn:
    """Raise for what was found at ``place``.

    Args:
        where: What was checked, such as ``after place: ``.
        place: The step that is wrong.
        message: What is wrong.
        other: What it collides with.

    Raises:
        VerifierError: Always.
    """
    nodes = [each.operation.node for each in (place, other) if each is not None and each.operation is not None]
    end = "" if other is None else f" {other}"
    raise VerifierError(f"{where}{place}: {message}{end}{_excerpt(nodes)}")


def fail_at(where: str, graph: str, node: fx.Node, message: str, other: fx.Node | None = None) -> NoReturn:
    """Raise for a node of a graph; see ``fail``.

    Raises:
        VerifierError: Always.
    """
    end = "" if other is None else f" ({other.name})"
    nodes = [node] if other is None else [node, other]
    raise VerifierError(f"{where}{_describe(graph, node)}: {message}{end}{_excerpt(nodes)}")


def _describe(graph: str, node: fx.Node) -> str:
    operation = operation_of(node)
    return f"{node.name} ({graph}{'' if operation is None else ', ' + operation.what})"


def _excerpt(nodes: list[fx.Node]) -> str:
    """Return ten rows of the schedule around ``nodes``, which are marked; fewer rows each if they lie far apart."""
    if not nodes:
        return ""
    shown = [_around(node, ROWS // len(nodes)) for node in nodes]
    rows = list(dict.fromkeys(each for part in shown for each in part))
    table = [_row(node, node in nodes) for node in rows]
    return "\n" + tabulate.tabulate(table, headers=("", "node", "stream", "op", "what", "buffer"), tablefmt="plain")


def _around(node: fx.Node, count: int) -> list[fx.Node]:
    operations = [each for each in node.graph.nodes if operation_of(each) is not None or each is node]
    here = operations.index(node)
    start = max(0, min(here - count // 2, len(operations) - count))
    return operations[start : start + count]


def _row(node: fx.Node, marked: bool) -> tuple[str, ...]:
    operation = operation_of(node)
    op, what, stream = ("", "", "") if operation is None else (operation.op, operation.what, operation.stream)
    return (">" if marked else "", node.name, stream, op, what, str(node.kwargs.get("buffer", "")))
