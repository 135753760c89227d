"""Which buffer every stretch of a chunk's use occupies, and when its prefetch starts: plain data in, plain data out.

A *stay* is a chunk's time in a buffer: from ``wait`` (or from a ``collect`` without parameters) to ``release`` or
``offload``. Stays are served in order. A stay whose chunk is still in a buffer needs no copy: so the backward begins
with what the forward fetched last. Otherwise it takes the free buffer whose content is needed again last (the one free
for longest among equals), and its prefetch is put right behind the end of that buffer's last stay, or at the start of
the graph: as early as the buffer allows. Split chunks have a buffer of their own.

The pass ``place`` writes schedules with it, and ``lowering`` predicts them.
"""

from __future__ import annotations

import dataclasses
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
    return _Placement(stays, buffers, split, entry).run()


@dataclasses.dataclass
class _Placement:
    stays: Sequence[Stay]
    buffers: int
    split: frozenset[int]
    entry: Mapping[int, int]

    def run(self) -> tuple[list[Placing], Contents]:
        uses = _uses(self.stays)
        self.never = len(self.stays)
        self.contents = dict(self.entry)
        self.last_stay: dict[int, int] = {}
        self.ends = [-1] * self.buffers
        self.next_use = [self._first_use(uses, self.contents.get(buffer)) for buffer in range(self.buffers)]
        placed = []
        for number, stay in enumerate(self.stays):
            buffer = own_buffer(self.buffers, stay.chunk) if stay.chunk in self.split else self._free_buffer(stay)
            fetched = stay.needs_parameters and self.contents.get(buffer) != stay.chunk
            placed.append(Placing(buffer, fetched, self.last_stay.get(buffer, -1)))
            self.last_stay[buffer] = number
            self.contents.pop(buffer, None)
            if stay.keeps_content:
                self.contents[buffer] = stay.chunk
            if stay.needs_parameters:
                uses[stay.chunk].popleft()
            if buffer < self.buffers:
                self.ends[buffer] = stay.end
                self.next_use[buffer] = self._first_use(uses, self.contents.get(buffer))
        return placed, self.contents

    def _free_buffer(self, stay: Stay) -> int:
        found, latest, since = -1, -1, 0
        for buffer, (end, use) in enumerate(zip(self.ends, self.next_use, strict=True)):
            if end >= stay.begin:
                continue
            if self.contents.get(buffer) == stay.chunk:
                return buffer
            if use > latest or (use == latest and end < since):
                found, latest, since = buffer, use, end
        if found < 0:
            raise PlanError(f"plan: buffers={self.buffers} are too few: one call uses chunks of that many; give more")
        return found

    def _first_use(self, uses: Mapping[int, deque[int]], chunk: int | None) -> int:
        """Return the number of the first stay still to come that needs a chunk's parameters; past the end if none."""
        coming = uses.get(chunk) if chunk is not None else None
        return coming[0] if coming else self.never


def _uses(stays: Sequence[Stay]) -> dict[int, deque[int]]:
    """Return, for every chunk, the stays that need its parameters."""
    found: dict[int, deque[int]] = {}
    for number, stay in enumerate(stays):
        if stay.needs_parameters:
            found.setdefault(stay.chunk, deque()).append(number)
    return found
