"""What simulated plans let the search expect of others. Assumed, not proven; a test measures the regret.

::

    same residency       fewer buffers are not faster, and less compute spares no more than itself
    neighbouring groups  bounds of one kind are off alike
"""

from __future__ import annotations

import math

from protrain_compile.plan_rows import Group, Row

NEAR_SHARE = 0.06
"""How far apart groups may be whose bounds are taken to be off alike: blocks and chunks that differ, of all."""

MANY_BUFFERS = 8
"""From so many on, more buffers spare copies and no waits to speak of."""


class Expectations:
    """What is known of the plans that were simulated."""

    def __init__(self) -> None:
        self._of_row: dict[Row, list[tuple[int, float, float]]] = {}
        self._off: list[tuple[Group, float]] = []

    def note(self, group: Group, buffers: int, ms: float) -> None:
        """Note the time of one plan."""
        self._of_row.setdefault(group.row, []).append((buffers, group.pattern.calls_ms, ms))

    def note_judged(self, group: Group, ms: float) -> None:
        """Note the time that a group is judged by: that with the most buffers."""
        self._off.append((group, ms / max(group.first_ms, 1e-9)))

    def least_ms(self, group: Group, buffers: int) -> float:
        """Return a time that a plan is not expected to fall below, by plans of the same residency."""
        calls_ms = group.pattern.calls_ms
        known = self._of_row.get(group.row, ())
        return max((ms - max(0.0, calls - calls_ms) for more, calls, ms in known if more >= buffers), default=0.0)

    def judged_ms(self, group: Group) -> float:
        """Return the time that a group is expected to be judged by, by its nearest neighbour; 0 where it has none."""
        # A bound is off the more, the fewer buffers there are.
        enough = min(group.counts[-1], MANY_BUFFERS)
        known = ((group.apart(each), off) for each, off in self._off if each.counts[-1] >= enough)
        near, off = min(known, default=(math.inf, 0.0))
        return group.first_ms * off if near <= NEAR_SHARE else 0.0
