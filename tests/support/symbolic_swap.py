"""The real ``SwapSpace`` on symbols: what it asks of streams and memory is recorded (see ``symbolic``).

The values of a segment travel through one staging buffer, as small ones do. Device memory is used again as soon as it
may be: what was released is overwritten by whatever the compute stream does next, and memory for values that come back
was written by what compute did before. A slab goes back to the pool when its handle dies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from support.symbolic import Cell, Memory, QueueEvent, QueueStreams, Trace

from protrain_compile.runtime.swap import Swapped, SwapSpace
from protrain_compile.swap_layout import Bundle, Piece, Placed, SwapLayout

SPACING = 64
"""Between values in a slab: neighbours are in different parts of a copy (see ``QueueStreams.copy``)."""


class SwapStreams(QueueStreams):
    """Tells the two uses of the event of a reload apart."""

    def wait(self, event: QueueEvent, stream: str) -> None:
        kind = event.kind
        if kind == "landed":
            kind = "allocated" if stream == "h2d" else "reloaded"
        self.trace.add(stream, after=event.recorded, event=kind)

    def synchronize(self) -> None:
        """Nothing runs yet."""


@dataclasses.dataclass(eq=False)
class Place:
    """A slab, and the events that guard it."""

    cell: Cell
    made: Any
    left: Any
    read: Any

    def bytes_of(self, bundle: Bundle) -> Cell:
        return self.cell


class SymbolicSwap(SwapSpace):
    """A swap space whose memories are names."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(SwapStreams(trace))  # type: ignore[arg-type]
        self.trace = trace
        self._made = 0

    @property
    def held(self) -> int:
        """How many groups of values on the way hold device memory."""
        return len(self._leaving) + len(self._arriving)

    def release(self, swapped: Swapped) -> None:
        under_way = self._leaving.get(swapped.number)
        super().release(swapped)
        for source in under_way[1] if under_way else ():
            self._overwrite(source)  # type: ignore[arg-type]

    def _new(self, kind: str) -> Cell:
        self._made += 1
        return Cell((kind, self._made), self.trace)

    def _overwrite(self, cell: Cell) -> None:
        def run(memory: Memory) -> None:
            memory[cell.name] = {}

        self.trace.add("compute", run, writes=(cell.name,))

    def _layout(self, values: Sequence[Any]) -> SwapLayout:
        pieces = tuple(Piece(i, 0, 1, 0, SPACING * i) for i in range(len(values)))
        placed = tuple(Placed(0, SPACING * i, torch.float32, (), ()) for i in range(len(values)))
        return SwapLayout(pieces, placed, (Bundle(0, 1, tuple(range(len(values))), staged=True),))

    def _take(self, size_bytes: int) -> Any:
        self._take_back()
        if self._free:
            return self._free.pop()
        place = Place(self._new("slab"), *(self.streams.event() for _ in range(3)))
        place.made.kind, place.left.kind, place.read.kind = "computed", "swapped", "slab"
        return place

    def _collect(self, bundle: Bundle, pieces: Sequence[Piece], values: Sequence[Any]) -> Any:  # type: ignore[override]
        staging = self._new("staging")
        places = [dataclasses.replace(staging, offset=piece.offset) for piece in pieces]
        self.trace.move(places, values, lambda old, new: new)
        return staging

    def _room(self, bundle: Bundle) -> Any:
        room = self._new("room")
        self._overwrite(room)
        return room

    def _rebuild(self, layout: SwapLayout, flats: Sequence[Any]) -> Any:
        return tuple(dataclasses.replace(flats[placed.bundle], offset=placed.offset) for placed in layout.values)
