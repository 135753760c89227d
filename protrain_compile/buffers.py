"""Which buffer every stretch of a chunk's use occupies, and when its prefetch starts: plain data in, plain data out.

A *stay* is a chunk's time in a buffer: from ``wait`` (or from a ``collect`` without parameters) to ``release`` or
``offload``. Stays are served in order. A stay whose chunk is still in a buffer needs no copy: so the backward begins
with what the forward fetched last. Otherwise it takes the free buffer whose content is needed again last (the one free
for longest among equals), and its prefetch is put right behind the end of that buffer's last stay, or at the start of
the graph: as early as the buffer allows. Split chunks have a buffer of their own.

The pass ``place`` writes schedules with it, and ``lowering`` predicts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protrain_compile.errors import PlanError

Contents = dict[int, int]
"""Which chunk's parameters each buffer holds."""


class Stay(NamedTuple):
    """A chunk's time in a buffer.

    Attributes:
        chunk: The chunk.
        begin: Position of its first operation; positions only need to ascend in the order of a graph.
        end: Position of its last operation.
        needs_parameters: Whether the parameters must be there when it begins.
        keeps_content: Whether the parameters are still there when it ends: no gradient was written over them.
    """

    chunk: int
    begin: int
    end: int
    needs_parameters: bool
    keeps_content: bool


class Placing(NamedTuple):
    """Where a stay is, and whence its parameters come.

    Attributes:
        buffer: The buffer.
        fetched: Whether a prefetch is needed.
        behind: The stay (by number) behind whose end the prefetch is put; -1 for the start of the graph.
    """

    buffer: int
    fetched: bool
    behind: int


def own_buffer(buffers: int, chunk: int) -> int:
    """Return the number of a split chunk's own buffer, beyond the ``buffers`` of standard size."""
    return buffers + chunk


def place_stays(
    stays: Sequence[Stay], buffers: int, split: frozenset[int], entry: Mapping[int, int]
) -> tuple[list[Placing], Contents]:
    """Place the stays of one graph.

    Args:
        stays: In order of their begin.
        buffers: How many standard buffers there are.
        split: The chunks that have a buffer of their own.
        entry: What the buffers hold at the start of the graph.

    Returns:
        A Placing for every stay, and what the buffers hold at the end.

    Raises:
        PlanError: If one call uses more chunks than there are buffers.
    """
    uses, never = _uses(stays), len(stays)
    contents = dict(entry)
    held = [contents.get(buffer, -1) for buffer in range(buffers)]
    ends = [-1] * buffers
    next_use = [uses[chunk][0] if chunk in uses else never for chunk in held]
    last_stay: dict[int, int] = {}
    placed = []
    for number, (chunk, begin, end, needs_parameters, keeps_content) in enumerate(stays):
        is_split = chunk in split
        buffer = own_buffer(buffers, chunk) if is_split else _free_buffer(chunk, begin, ends, next_use, held)
        fetched = needs_parameters and contents.get(buffer) != chunk
        placed.append(Placing(buffer, fetched, last_stay.get(buffer, -1)))
        last_stay[buffer] = number
        if needs_parameters:
            uses[chunk].popleft()
        if keeps_content:
            contents[buffer] = chunk
        else:
            contents.pop(buffer, None)
        if not is_split:
            ends[buffer], held[buffer] = end, chunk if keeps_content else -1
            coming = uses.get(held[buffer])
            next_use[buffer] = coming[0] if coming else never
    return placed, contents


def _free_buffer(chunk: int, begin: int, ends: Sequence[int], next_use: Sequence[int], held: Sequence[int]) -> int:
    """Return the free buffer for a stay of ``chunk`` that begins at ``begin``.

    Args:
        chunk: The chunk.
        begin: Where the stay begins.
        ends: Where the last stay in each buffer ends.
        next_use: The first stay still to come that needs the parameters which each buffer holds; past the end if none.
        held: The chunk whose parameters each buffer holds, or -1.
    """
    found, latest, since = -1, -1, 0
    for buffer, (end, use, content) in enumerate(zip(ends, next_use, held, strict=True)):
        if end >= begin:
            continue
        if content == chunk:
            return buffer
        if use > latest or (use == latest and end < since):
            found, latest, since = buffer, use, end
    if found < 0:
        raise PlanError(f"plan: buffers={len(ends)} are too few: one call uses chunks of that many; give more")
    return found


def _uses(stays: Sequence[Stay]) -> dict[int, deque[int]]:
    """Return, for every chunk, the stays that need its parameters."""
    found: dict[int, deque[int]] = {}
    for number, stay in enumerate(stays):
        if stay.needs_parameters:
            found.setdefault(stay.chunk, deque()).append(number)
    return found
