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
        self.contents = dict(self.entry)
        self.last_stay: dict[int, int] = {}
        self.uses = _uses(self.stays)
        placed = []
        for number, stay in enumerate(self.stays):
            buffer = self._buffer(number, stay)
            fetched = stay.needs_parameters and self.contents.get(buffer) != stay.chunk
            placed.append(Placing(buffer, fetched, self.last_stay.get(buffer, -1)))
            self.last_stay[buffer] = number
            self.contents.pop(buffer, None)
            if stay.keeps_content:
                self.contents[buffer] = stay.chunk
        return placed, self.contents

    def _buffer(self, number: int, stay: Stay) -> int:
        if stay.chunk in self.split:
            return own_buffer(self.buffers, stay.chunk)
        ends = [self._free_since(buffer) for buffer in range(self.buffers)]
        free = [buffer for buffer, end in enumerate(ends) if end < stay.begin]
        for buffer in free:
            if self.contents.get(buffer) == stay.chunk:
                return buffer
        if not free:
            raise PlanError(f"plan: buffers={self.buffers} are too few: one call uses chunks of that many; give more")
        return max(free, key=lambda b: (self._next_use(number, b), -ends[b], -b))

    def _free_since(self, buffer: int) -> int:
        return self.stays[self.last_stay[buffer]].end if buffer in self.last_stay else -1

    def _next_use(self, number: int, buffer: int) -> int:
        """Return the number of the stay that needs a buffer's content next; past the end if none does."""
        content = self.contents.get(buffer)
        later = (use for use in self.uses.get(content, ()) if use > number) if content is not None else iter(())
        return next(later, len(self.stays))


def _uses(stays: Sequence[Stay]) -> dict[int, list[int]]:
    """Return, for every chunk, the stays that need its parameters."""
    found: dict[int, list[int]] = {}
    for number, stay in enumerate(stays):
        if stay.needs_parameters:
            found.setdefault(stay.chunk, []).append(number)
    return found
