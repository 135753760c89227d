"""Rows of a printed schedule: numbered over all its graphs, with equal stretches folded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from passes.apply_policies import block_policies
from protrain_compile.liveness import Liveness, kept_sources, saved_bytes, schedule_liveness
from protrain_compile.schedule import Operation, Schedule, operation_of

GRAPH_ORDER = ("forward", "backward", "inference")
MAX_STRETCH = 64
"""Rows of the longest stretch whose repetitions are looked for: a block with its movements has about ten."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation of a schedule graph.

    Attributes:
        number: Its number, counted over all graphs of the schedule.
        operation: What it does.
        saved_bytes: Bytes that it leaves for the backward.
        live_bytes: Bytes alive right after it.
        after: Numbers of the operations whose results it uses, those of the forward included, and of the operation
            on the same chunk before it.
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
    """Rows that repeat the stretch before them.

    Attributes:
        rows: The rows that it stands for.
        count: How many times they repeat that stretch.
        what: What they work on, such as ``blocks 2 to 9``.
        policy: The policy of these blocks; several joined by ``+``; empty if there is none.
    """

    rows: tuple[Row, ...]
    count: int
    what: str
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
    last_on_chunk: dict[int, int] = {}
    for node in module.graph.nodes:
        operation = operation_of(node)
        if operation is None:
            continue
        numbers[node] = start + len(rows)
        after = {numbers[source] for source in _operands(node) if source in numbers}
        if operation.chunk >= 0:
            after |= {last_on_chunk[operation.chunk]} if operation.chunk in last_on_chunk else set()
            last_on_chunk[operation.chunk] = numbers[node]
        left = saved.get(node, 0)
        pattern = (str(node.target), operation.op, operation.stream, operation.moved_bytes, left)
        rows.append(Row(numbers[node], operation, left, alive.live_bytes[node], tuple(sorted(after)), pattern))
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
    """Yield the rows of each stretch that differs from the one before it, and a Fold for its repetitions."""
    position = 0
    while position < len(rows):
        length, count = _best_repetition(rows, position)
        yield from rows[position : position + length]
        position += length
        if count:
            yield _fold(schedule, tuple(rows[position : position + length * count]), count)
            position += length * count


def _best_repetition(rows: list[Row], position: int) -> tuple[int, int]:
    """Return the length of the stretch at ``position`` and how often it is repeated; (1, 0) if that folds nothing.

    A better repetition that starts inside the stretch is left to start there: one that folds more rows, or as many
    without cutting a segment in two.
    """
    length, count = _longest_repetition(rows, position)
    worth = _worth(rows, position)
    if count and all(_worth(rows, position + ahead) <= worth for ahead in range(1, length + 1)):
        return length, count
    return 1, 0


def _worth(rows: list[Row], position: int) -> tuple[int, bool]:
    length, count = _longest_repetition(rows, position)
    return length * count, _starts_segment(rows, position) and _starts_segment(rows, position + length)


def _starts_segment(rows: list[Row], position: int) -> bool:
    before, here = rows[position - 1 : position], rows[position : position + 1]
    return [row.operation.segment for row in before] != [row.operation.segment for row in here]


def _longest_repetition(rows: list[Row], position: int) -> tuple[int, int]:
    best = (1, 0)
    for length in range(1, min(MAX_STRETCH, (len(rows) - position) // 2) + 1):
        if rows[position + length].pattern != rows[position].pattern:
            continue
        stretch = [row.pattern for row in rows[position : position + length]]
        count = 0
        while [row.pattern for row in rows[position + length * (count + 1) :][:length]] == stretch:
            count += 1
        # A single row is shown rather than a line that stands for it.
        if length * count > max(1, best[0] * best[1]):
            best = (length, count)
    return best


def _fold(schedule: Schedule, rows: tuple[Row, ...], count: int) -> Fold:
    policies = block_policies(schedule)
    blocks = [row.operation for row in rows if row.operation.what.startswith("block ")]
    named = blocks or [row.operation for row in rows]
    kind, _, first = named[0].what.rpartition(" ")
    last = named[-1].what.rpartition(" ")[2]
    what = f"{kind} {first}" if first == last else f"{kind}s {first} to {last}"
    policy = "+".join(dict.fromkeys(policies[operation.segment] for operation in blocks))
    return Fold(rows, count, what, policy)


def unfold(shown: Iterable[Row | Fold]) -> Iterator[Row]:
    """Yield the rows that ``fold`` was given."""
    for each in shown:
        yield from each.rows if isinstance(each, Fold) else (each,)
