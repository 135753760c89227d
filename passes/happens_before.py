"""Happens-before: which steps of a schedule are certain to be over when another begins.

A step comes after the one before it in its stream, after the records that it waits for, and after whatever the
launching thread (stream ``caller``) did before it was issued. Nothing else is certain, however long a step takes.

Every step has a *clock*: for each stream, how many of that stream's steps are over when it begins, itself included. A
stream is a total order, so this is the whole transitive closure, and "before" is one comparison::

    before(a, b)  =  clock(b)[stream of a] >= position of a in its stream

Steps are added in the order in which they are issued. Waits refer to earlier steps, so the relation has no circle and
no wait can hang.
"""

from __future__ import annotations

from collections.abc import Iterable

from passes.effects import STREAMS

Clock = tuple[int, ...]

START: Clock = (0,) * len(STREAMS)
CALLER = STREAMS.index("caller")


class HappensBefore:
    """Grows by one step at a time; steps have numbers from 0."""

    def __init__(self) -> None:
        self._tails = [START] * len(STREAMS)
        self._clocks: list[Clock] = []
        self._places: list[tuple[int, int]] = []

    def add(self, stream: str, waits: Iterable[int]) -> int:
        """Add a step that waits for earlier ones; return its number."""
        here = STREAMS.index(stream)
        clock = self._join(here, waits)
        position = clock[here] + 1
        clock = (*clock[:here], position, *clock[here + 1 :])
        self._tails[here] = clock
        self._clocks.append(clock)
        self._places.append((here, position))
        return len(self._clocks) - 1

    def before(self, first: int, second: int) -> bool:
        """Whether ``first`` is over when ``second`` begins (or is the same)."""
        stream, position = self._places[first]
        return self._clocks[second][stream] >= position

    def would_follow(self, stream: str, waits: Iterable[int], first: int) -> bool:
        """Whether a step issued now on ``stream`` that waits for ``waits`` would come after ``first``."""
        place, position = self._places[first]
        return self._join(STREAMS.index(stream), waits)[place] >= position

    def _join(self, stream: int, waits: Iterable[int]) -> Clock:
        """Return what is over for a step on ``stream`` that is issued now."""
        clock = self._tails[stream]
        caller = self._tails[CALLER]
        if caller[CALLER] > clock[CALLER]:
            clock = tuple(map(max, clock, caller))
        for number in waits:
            place, position = self._places[number]
            if clock[place] < position:
                clock = tuple(map(max, clock, self._clocks[number]))
        return clock
