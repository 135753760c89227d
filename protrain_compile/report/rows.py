"""Rows of a printed schedule: numbered over all its graphs, with equal stretches folded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from passes.apply_policies import block_policies
from protrain_compile.liveness import Liveness, kept_sources, saved_bytes, schedule_liveness
from protrain_compile.schedule import Operation, Schedule, operation_of

GRAPH_ORDER = ("forward", "backward", "inference")


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation of a schedule graph.

    Attributes:
        number: Its number, counted over all graphs of the schedule.
        operation: What it does.
        saved_bytes: Bytes that it leaves for the backward.
        live_bytes: Bytes alive right after it.
        after: Numbers of the operations whose results it uses, those of the forward included.
        pattern: Equal for rows that do the same to equal segments.
    """

    number: int
    operation: Operation
    saved_bytes: int
    live_bytes: int
    after: tuple[int, ...]
    pattern: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Fold:
    """Rows that repeat the stretch before them, block by block.

    Attributes:
        rows: The rows that it stands for.
        count: How many blocks they belong to.
        policy: The policy of these blocks.
    """

    rows: tuple[Row, ...]
    count: int
    policy: str


def schedule_rows(schedule: Schedule) -> dict[str, list[Row]]:
    """Return the rows of every graph of ``schedule``, in the order in which the graphs run."""
    alive, saved = schedule_liveness(schedule), saved_bytes(schedule)
    found: dict[str, list[Row]] = {}
    numbers: dict[fx.Node, int] = {}
    for name in GRAPH_ORDER:
        if name in schedule.graphs:
            if name == "backward":
                numbers |= _kept_numbers(schedule, numbers)
            found[name] = _graph_rows(schedule.graphs[name], alive[name], saved, numbers)
    return found


def _kept_numbers(schedule: Schedule, numbers: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return, for each placeholder of the backward that is a kept value, the number of the operation that made it."""
    makers = ((placeholder, maker) for placeholder, made in kept_sources(schedule).items() for maker in _makers(made))
    return {placeholder: numbers[maker] for placeholder, maker in makers if maker in numbers}


def _graph_rows(
    module: fx.GraphModule, alive: Liveness, saved: Mapping[fx.Node, int], numbers: dict[fx.Node, int]
) -> list[Row]:
    """Return a row per operation of ``module``; add their numbers to ``numbers``, which holds those before them."""
    start = max(numbers.values(), default=0) + 1
    rows: list[Row] = []
    for node in module.graph.nodes:
        operation = operation_of(node)
        if operation is None:
            continue
        numbers[node] = start + len(rows)
        after = tuple(sorted({numbers[source] for source in _operands(node) if source in numbers}))
        left = saved.get(node, 0)
        pattern = (str(node.target), operation.op, left)
        rows.append(Row(numbers[node], operation, left, alive.live_bytes[node], after, pattern))
    return rows


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations that ``node`` takes results of, through pack and getitem."""
    for source in node.all_input_nodes:
        yield from _makers(source)


def _makers(node: fx.Node) -> Iterator[fx.Node]:
    if node.op == "call_function" and operation_of(node) is None:
        yield from _operands(node)
    else:
        yield node


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
            rows_of_all = tuple(itertools.chain.from_iterable(others))
            yield Fold(rows_of_all, len(others), policies[rows_of_all[0].operation.segment])


def unfold(shown: Iterable[Row | Fold]) -> Iterator[Row]:
    """Yield the rows that ``fold`` was given."""
    for each in shown:
        yield from each.rows if isinstance(each, Fold) else (each,)
