"""The plan space as the search goes through it: figures of policies and of residencies, each computed once.

The figures of a plan are sums of its policies' and its residency's, so that one which cannot be best costs the search a
few additions and is never spelled out.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from protrain_compile.lowering import Choice
from protrain_compile.plan_space import PlanSpace, Policies, Residencies
from protrain_compile.time_bounds import TimeBounds


class Row:
    """A residency.

    Attributes:
        residency: Per chunk.
        counts: The numbers of buffers to choose from.
        standing: Device bytes that are always taken, buffers apart.
        buffer: Device bytes of a buffer.
        host: Host bytes of chunks.
        persistent: How many chunks are persistent.
        rest: What the last chunk is.
        late: What ``PlanSpace.values_of`` asks for.
        own_updates_ms: Compute that depends on the residency.
    """

    def __init__(self, space: PlanSpace, bounds: TimeBounds, residency: Residencies) -> None:
        self.residency = residency
        self.counts = space.buffer_counts(residency)
        self.standing = space.standing_bytes(residency)
        self.buffer = space.buffer_bytes(residency)
        self.host = space.host_bytes(residency, ())
        self.persistent = residency.count("persistent")
        self.rest = residency[-1] if residency else ""
        self.late = space.late_of(residency)
        self.own_updates_ms = bounds.own_updates_ms(residency)
        self.shared_ms = functools.cache(functools.partial(bounds.shared_ms, residency))

    def fitting(self, room: float) -> range:
        """Return the numbers of buffers that ``room`` bytes are enough for."""
        first, last = self.counts[0], self.counts[-1]
        if room < first * self.buffer or room < 0:
            return range(0)
        if self.buffer and room < last * self.buffer:
            last = math.floor(room / self.buffer)
        return range(first, last + 1)


class Pattern:
    """Policies.

    Attributes:
        policies: Per block.
        host: Host bytes of what they swap.
        calls_ms: Compute that depends on them.
        steps: How many single changes of a block lead to them from everything kept.
        values: Tells the bytes of values at their peak for a row's ``late``.
    """

    def __init__(self, space: PlanSpace, bounds: TimeBounds, policies: Policies, steps: int) -> None:
        self.policies = policies
        self.host = space.swapped_bytes(policies)
        self.calls_ms = bounds.calls(policies)[2]
        self.steps = steps
        self.swapped = policies if self.host else ()
        self.values = functools.cache(functools.partial(space.values_of, policies))


@dataclasses.dataclass
class Group:
    """Plans that differ in buffers alone.

    Attributes:
        pattern: Their policies.
        row: Their residency.
        values: Bytes of values at their peak.
        counts: The numbers of buffers that fit.
        least_ms: A bound on the time of all of them.
        bound_by: Which of ``time_bounds`` that is at first.
        bounds: How many kinds of bounds were taken.
        judged: Whether it was decided under assumptions.
    """

    pattern: Pattern
    row: Row
    values: int
    counts: range
    least_ms: float
    bound_by: str
    bounds: int = 0
    judged: bool = False

    def __post_init__(self) -> None:
        """Remember the bound that neighbours are compared by."""
        self.first_ms = self.least_ms

    def choice(self, buffers: int) -> Choice:
        """Return the plan with so many buffers."""
        return Choice(self.pattern.policies, self.row.residency, buffers)

    def peak_bytes(self, buffers: int) -> int:
        """Return its most device memory."""
        return self.row.standing + buffers * self.row.buffer + self.values

    def bound_ms(self, buffers: int) -> float:
        """Return a bound on its time."""
        return max(self.least_ms, self.row.shared_ms(buffers, self.pattern.swapped))

    def below(self, peak_bytes: int) -> range:
        """Return the numbers of buffers with which it takes less than ``peak_bytes``."""
        end = math.ceil((peak_bytes - self.peak_bytes(0)) / max(self.row.buffer, 1))
        return range(self.counts[0], min(self.counts[-1] + 1, end))

    def apart(self, other: Group) -> float:
        """Return the share of blocks and chunks in which another group differs."""
        differ = abs(self.pattern.steps - other.pattern.steps) + abs(self.row.persistent - other.row.persistent)
        alike = self.row.rest == other.row.rest and self.bound_by == other.bound_by
        return differ / len(self.pattern.policies + self.row.residency) if alike else math.inf


class PlanRows:
    """The rows and patterns of a plan space."""

    def __init__(self, space: PlanSpace, bounds: TimeBounds) -> None:
        usable = [residency for residency in space.residencies if space.buffer_counts(residency)]
        self.rows = [Row(space, bounds, residency) for residency in usable]
        self._least_ms = [(row.shared_ms(row.counts[-1], ()), row.own_updates_ms) for row in self.rows]
        found = space.policy_patterns if usable else ()
        self.patterns = [Pattern(space, bounds, policies, steps) for steps, policies in enumerate(found)]

    def least_ms(self, pattern: Pattern) -> float:
        """Return a bound on the time of all plans with some policies."""
        ms = pattern.calls_ms
        return min([max(shared, ms + own) for shared, own in self._least_ms])

    def groups(self, pattern: Pattern, device_bytes: float, host_bytes: float) -> list[Group]:
        """Return the groups with some policies in which a plan fits."""
        found = []
        for row in self.rows:
            values = pattern.values(row.late)
            counts = row.fitting(device_bytes - row.standing - values)
            if not counts or row.host + pattern.host > host_bytes:
                continue
            shared, busy = row.shared_ms(counts[-1], pattern.swapped), pattern.calls_ms + row.own_updates_ms
            found.append(Group(pattern, row, values, counts, max(shared, busy), "busy" if busy > shared else "shared"))
        return found
