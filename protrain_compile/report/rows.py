"""Rows of a printed schedule: numbered, with equal stretches folded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from torch import fx

from passes.apply_policies import block_policies
from protrain_compile import ops
from protrain_compile.liveness import liveness
from protrain_compile.schedule import Operation, Schedule, operation_of


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation of a schedule graph.

    Attributes:
        number: Its number, counted over all graphs of the schedule.
        operation: What it does.
        live_bytes: Bytes alive right after it.
        after: Numbers of the operations whose results it uses.
        pattern: Equal for rows that do the same to equal segments.
    """

    number: int
    operation: Operation
    live_bytes: int
    after: tuple[int, ...]
    pattern: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Fold:
    """A stretch of rows that repeats the one before it, block by block."""

    first: str
    last: str
    count: int
    policy: str


def graph_rows(schedule: Schedule, module: fx.GraphModule, start: int) -> list[Row]:
    """Return a row per operation of ``module``, numbered from ``start``."""
    live = liveness(module).live_bytes
    numbers: dict[fx.Node, int] = {}
    rows = []
    for node in module.graph.nodes:
        operation = operation_of(node)
        if operation is None:
            continue
        numbers[node] = start + len(numbers)
        after = tuple(sorted({numbers[source] for source in _operands(node) if source in numbers}))
        pattern = (str(node.target), operation.op, operation.saved_bytes)
        rows.append(Row(numbers[node], operation, live[node], after, pattern))
    return rows


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations that ``node`` takes results of, through pack and getitem."""
    for source in node.all_input_nodes:
        if source.target is ops.pack or (source.op == "call_function" and operation_of(source) is None):
            yield from _operands(source)
        else:
            yield source


def fold(schedule: Schedule, rows: list[Row]) -> Iterator[Row | Fold]:
    """Yield the rows of each stretch that differs from the one before it, and a Fold for the equal ones after it."""
    policies = block_policies(schedule)
    stretches = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.operation.segment)]
    for _, equal in itertools.groupby(stretches, key=lambda stretch: tuple(row.pattern for row in stretch)):
        first, *others = equal
        yield from first
        if len(others) == 1 and len(others[0]) == 1:
            yield from others[0]
        elif others:
            names = [stretch[0].operation.what for stretch in others]
            yield Fold(names[0], names[-1], len(names), policies[others[0][0].operation.segment])
