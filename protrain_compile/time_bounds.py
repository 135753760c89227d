"""Lower bounds on the time of a step that cost next to nothing, so that the search simulates few plans.

Each is true of every simulation (``timeline.simulate_jobs``), whatever the number of buffers::

    busy      compute cannot take less than all its jobs                                    compute_ms
    shared    copies and updates take turns or slow each other down: the least time for the
              work of all three, as a linear program over which of them run, by its dual     shared_ms
    gathered  collectives take turns, too: the sum of those that no buffer spares                shared_ms
    cycle     a chunk's update precedes its fetch in the next step, which precedes its
              forward, and so the first gradients, and the updates before its own            cycle_ms
    halves    a forward's fetches wait for an update that waits for all gradients, which wait
              for the fetches before: so copies and updates share the one half of a step, or
              the other                                                                      halves_ms
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence

from protrain_compile.lowering import late_chunks, recomputed_segments
from protrain_compile.plan_space import Policies, Residencies
from protrain_compile.profile import Profile
from protrain_compile.roles import SWAPS, Role
from protrain_compile.step_jobs import Durations
from protrain_compile.step_shape import CallShape, StepShape
from protrain_compile.swapped_lives import moved_bytes, swap_plan
from protrain_compile.timeline import Speeds

Work = tuple[float, float, float]
"""Work of h2d, d2h and host, in ms alone."""


class TimeBounds:
    """Bounds for the plans of one shape."""

    def __init__(self, shape: StepShape, profile: Profile, rates: Speeds) -> None:
        self.shape = shape
        self.profile = profile
        durations = self.durations = Durations(shape, profile.hardware)
        self.fetch = [durations.prefetch(chunk) for chunk in shape.chunks]
        self.leave = [durations.offload(chunk) for chunk in shape.chunks]
        self.update = [durations.host_update(chunk) if chunk.updated else 0.0 for chunk in shape.chunks]
        self.own_update = [durations.device_update(chunk) if chunk.updated else 0.0 for chunk in shape.chunks]
        self.collect = [durations.collect(chunk) if chunk.updated else 0.0 for chunk in shape.chunks]
        self.prices = shared_prices(rates)
        self.first_use = _first_uses(shape)
        self.own_updates_ms = functools.cache(self._own_updates)
        self.calls = functools.cache(self._calls)
        self.moved = functools.cache(self._moved)
        self.swapped = functools.cache(self._swapped)
        self.gathers = functools.cache(self._gathers)
        self.halves = functools.cache(self._halves)
        self.read_again = {c for each in shape.segments for c in _backward_chunks(each.calls)}

    # ---- compute -------------------------------------------------------------------------------------------------

    def compute_ms(self, policies: Policies, residency: Residencies) -> float:
        """Return the time of all compute jobs."""
        return self.calls(policies)[2] + self.own_updates_ms(residency)

    def _own_updates(self, residency: Residencies) -> float:
        """Return the time of gradients written to chunks and of updates on the device."""
        own = (ms for ms, each in zip(self.own_update, residency, strict=True) if each == "persistent")
        return sum(self.collect) + sum(own)

    @functools.cached_property
    def _ms(self) -> list[dict[Role | None, float]]:
        """The time of each segment's calls, of the backward's with what a segment is recomputed by."""
        found: list[dict[Role | None, float]] = []
        for segment in self.shape.segments:
            parts = self.profile.templates[segment.template].parts
            ms: dict[Role | None, float] = {r: parts[r].ms if r in parts else 0.0 for r in segment.calls}
            found.append({None: 0.0, "forward": 0.0, "backward": 0.0, **ms})
        return found

    def _calls(self, policies: Policies) -> tuple[list[float], list[float], float]:
        """Return when each segment's forward begins and its backward ends at the earliest, and when the last ends."""
        *begins, now = self._begins
        if not self.shape.differentiable:
            return begins, [0.0] * len(begins), now
        again = map(dict.get, self._ms, recomputed_segments(self.shape, policies), itertools.repeat(0.0))
        backwards = [ms + costs["backward"] for ms, costs in zip(again, self._ms, strict=True)]
        ends = list(itertools.accumulate(reversed(backwards), initial=now))
        return begins, ends[:0:-1], ends[-1]

    @functools.cached_property
    def _begins(self) -> list[float]:
        """When each segment's forward begins, and when the last one ends."""
        return list(itertools.accumulate((ms["forward"] for ms in self._ms), initial=0.0))

    # ---- copies and updates --------------------------------------------------------------------------------------

    def _moved(self, residency: Residencies) -> tuple[float, float, float, list[float]]:
        """Return work of h2d in the forward, d2h and host, and the backward's fetches, the longest first."""
        moving = [c for c, each in enumerate(residency) if each != "persistent" and self.shape.chunks[c].updated]
        forward = sum(self.fetch[c] for c in moving if c in self.first_use)
        again = sorted(self.fetch[c] for c in moving if residency[c] == "offloaded" and c in self.read_again)
        leave, update = sum(self.leave[c] for c in moving), sum(self.update[c] for c in moving)
        return forward, leave, update, list(reversed(again))

    def shared_ms(self, residency: Residencies, buffers: int, policies: Policies = ()) -> float:
        """Return the least time for all copies and updates; buffers keep some chunks for the backward."""
        forward, leave, update, again = self.moved(residency)
        swapped_in, swapped_out = self.swapped(policies)
        work = (forward + sum(again[buffers:]) + swapped_in, leave + swapped_out, update)
        copies = max(_earned(each, work) for each in self.prices)
        if (
            self.shape.landings == 1 and self.shape.update_mode == "in_backward"
        ):  # each gradient leaves when the one before has been used up
            copies = max(copies, leave + update)
        return max(copies, self._collectives_ms(residency, buffers)) if self.shape.world.size > 1 else copies

    def _collectives_ms(self, residency: Residencies, buffers: int) -> float:
        """Return the least time of all collectives; buffers keep some chunks for the backward."""
        once, again = self.gathers(residency)
        return once + sum(again[buffers:])

    def _gathers(self, residency: Residencies) -> tuple[float, list[float]]:
        """Return the time of the forward's gathers and of the reduces, and the backward's gathers, longest first."""
        once, again = 0.0, []
        for number, (chunk, each) in enumerate(zip(self.shape.chunks, residency, strict=True)):
            if not chunk.updated:
                continue
            once += self.durations.reduce(chunk, each)
            if number in self.first_use:
                once += self.durations.gather(chunk, in_buffer=not chunk.stays(each))
            if chunk.is_fetched(each) and number in self.read_again:
                again.append(self.durations.gather(chunk, in_buffer=True))
        return once, sorted(again, reverse=True)

    def _swapped(self, policies: Policies) -> tuple[float, float]:
        """Return work of h2d and d2h for swapped values."""
        if set(SWAPS).isdisjoint(policies):
            return 0.0, 0.0
        swaps = swap_plan(self.shape, policies, recomputed_segments(self.shape, policies))
        size = sum(moved_bytes(lives) for lives in swaps.lives.values())
        hardware = self.profile.hardware
        return Durations.copy(size, hardware.h2d), Durations.copy(size, hardware.d2h)

    # ---- halves of a step ----------------------------------------------------------------------------------------

    def halves_ms(self, residency: Residencies, buffers: int, policies: Policies) -> float:
        """Return the least time of a step, where it has halves with work of their own; 0 elsewhere.

        The first ends with the forward's last fetch. It begins with the update that the first fetch waits for, behind
        which the others queue::

            updates        first half                    second half
            in_backward    the forward's fetches         updates, the last of which is that one; other copies
            at_step        updates, the first of which   other copies
                           is that one; fetches

        Swapped values may leave in either. In the second half nothing else leaves, and nothing is updated, before
        compute has made the first gradient.
        """
        halves = self.halves(residency)
        if halves is None:
            return 0.0
        fetches, leave, update, again = self.moved(residency)
        swapped_in, out = self.swapped(policies)
        late = update if self.shape.update_mode == "at_step" else 0.0
        first, second = (fetches, 0.0, late), (sum(again[buffers:]) + swapped_in, leave, update - late)
        begins, ends, last = self.calls(policies)
        used, made = halves
        alone = ends[made] - begins[used]
        firsts = [(_earned(p, first), p[1]) for p in self.prices]
        seconds = [(_earned(p, second) + alone * max(0.0, 1 - p[0] - p[1] * (out > 0)), p[1]) for p in self.prices]
        ms = max(a + b + min(p, q) * out for (a, p), (b, q) in itertools.product(firsts, seconds))
        if not self.shape.clips:
            return ms
        # Updates come after all compute but those on the device.
        return max(ms, max(firsts)[0] + last - begins[used] + sum(self.collect))

    def _halves(self, residency: Residencies) -> tuple[int, int] | None:
        """Return the segments that the last fetch is for, and that make the first gradient; None without halves."""
        chunks, used = self.shape.chunks, self.first_use
        moving = [chunk for chunk, *_ in self._updates if residency[chunk] != "persistent"]
        is_plain = self.shape.world.size == 1 and all(chunk.updated for chunk in chunks)
        if not moving or not is_plain or not used.keys() >= set(moving):
            return None
        fetched = moving.pop(0 if self.shape.update_mode == "at_step" else -1)
        made = chunks[fetched].last_gradient
        if not all(used[fetched] < used[each] and made < chunks[each].last_gradient for each in moving):
            return None
        moving.append(fetched)
        return max(used[each] for each in moving), max(chunks[each].last_gradient for each in moving)

    # ---- the cycle -----------------------------------------------------------------------------------------------

    def cycle_ms(self, policies: Policies, residency: Residencies) -> float:
        """Return the longest way from a chunk's forward over gradients and updates to its forward in the next step.

        From the forward that reads chunk j over the compute until chunk i's gradient is complete, its copy to the
        host, the updates from i's to j's, and j's copy to the device; i is updated no later than j.
        """
        begins, ends, last = self.calls(policies)
        least = last if self.shape.clips else float("-inf")
        best, behind, updates = 0.0, float("-inf"), 0.0
        for chunk, made, leaves_ms, update_ms, fetch_ms, used in self._updates:
            if residency[chunk] == "persistent":
                continue
            complete = ends[made] + leaves_ms
            ahead = (complete if complete > least else least) - updates
            if ahead > behind:
                behind = ahead
            updates += update_ms
            if used >= 0:
                around = behind + updates + fetch_ms - begins[used]
                if around > best:
                    best = around
        return best

    @functools.cached_property
    def _updates(self) -> list[tuple[int, int, float, float, float, int]]:
        """Updates on the host in their order, and ways around them.

        Each is a chunk, the segment of its last gradient, ms until that is on the host, of the update, and of the copy
        back, and the segment that uses it first, or -1.
        """
        return [
            (
                i,
                self.shape.chunks[i].last_gradient,
                self.collect[i] + self.leave[i],
                self.update[i],
                self.fetch[i],
                self.first_use.get(i, -1),
            )
            for i in self._update_order()
        ]

    def _update_order(self) -> list[int]:
        """Return the order of updates on the host; empty where it is not the same for all plans."""
        updated = [i for i, chunk in enumerate(self.shape.chunks) if chunk.updated and chunk.last_gradient >= 0]
        if late_chunks(self.shape):
            return []
        if self.shape.update_mode == "at_step":
            return updated
        made = [self.shape.chunks[i].last_gradient for i in updated]
        if len(set(made)) < len(made):
            return []
        return sorted(updated, key=lambda i: -self.shape.chunks[i].last_gradient)


def _earned(prices: Work, work: Work) -> float:
    (a, b, c), (x, y, z) = prices, work
    return a * x + b * y + c * z


def _first_uses(shape: StepShape) -> dict[int, int]:
    """Return the first segment whose forward reads each chunk."""
    found: dict[int, int] = {}
    for index, segment in enumerate(shape.segments):
        for chunk in segment.calls["forward"].chunks if "forward" in segment.calls else ():
            found.setdefault(chunk, index)
    return found


def _backward_chunks(calls: Mapping[Role, CallShape]) -> Sequence[int]:
    return calls["backward"].chunks if "backward" in calls else ()


def shared_prices(rates: Speeds) -> list[Work]:
    """Return the corners of the dual of sharing: prices of work such that no combination earns above its time.

    The time T for work w is at least ``max over prices p of p . w``: in every state s of what runs, work is done at
    ``rates[s]``, and ``p . rates[s] <= 1``. Corners are where three of the limits (and signs) meet; those that earn no
    more than another with any work are left out.
    """
    limits = [(*(r if s >> i & 1 else 0.0 for i, r in enumerate(rates[s])), 1.0) for s in range(1, 8)]
    signs = [(1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)]
    found: dict[Work, None] = {}
    for rows in itertools.combinations([*limits, *signs], 3):
        point = _meet(rows)
        if point is None or min(point) < -1e-9:
            continue
        if all(sum(a * p for a, p in zip(row, point, strict=False)) <= 1 + 1e-9 for row in limits):
            found[point] = None
    return [p for p in found if not any(p != q and all(map(operator.le, p, q)) for q in found)]


def _meet(rows: Sequence[Sequence[float]]) -> Work | None:
    """Return the point on three planes ``a . p = b`` (Cramer's rule), or None if they have none or many."""
    (a, b, c, u), (d, e, f, v), (g, h, i, w) = rows
    whole = _determinant(a, b, c, d, e, f, g, h, i)
    if abs(whole) < 1e-12:
        return None
    return (
        _determinant(u, b, c, v, e, f, w, h, i) / whole,
        _determinant(a, u, c, d, v, f, g, w, i) / whole,
        _determinant(a, b, u, d, e, v, g, h, w) / whole,
    )


def _determinant(a: float, b: float, c: float, d: float, e: float, f: float, g: float, h: float, i: float) -> float:
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
