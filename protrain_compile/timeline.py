"""Timeline: a step's jobs on their streams in steady state, copies and host updates slowing each other down.

Compute keeps its pace whatever else happens (measured: copies do not slow matrix products), and so do collectives
(assumed: they are on links of their own). Copies and host updates share the host's memory and the link: while several
of them run, each has the speed that ``speeds`` gives to that combination. Steps are simulated one after the other, each
beginning as the last one left the streams, until a step repeats the one before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from protrain_compile.profile import Format, HardwareProfile
from protrain_compile.step_jobs import COMPUTE, GATHER, HOST, STREAMS, Job, Ref, StepJobs
from protrain_compile.updates.threads import threads_of_share

MAX_STEPS = 12
"""A step usually repeats the one before from the third on; where none does, the mean of the last half counts."""
SAME_MS = 1e-6

Speeds = tuple[tuple[float, float, float], ...]
"""Speeds of h2d, d2h and host, relative to each alone, by which of them run (bits 1, 2 and 4)."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step in steady state; times in ms, from the end of the last step's compute.

    Attributes:
        step_ms: From the end of compute to the end of the next step's.
        begins: When each job begins.
        ends: When each job ends.
        compute_ms: How long compute is busy.
        copies_ms: How long compute waits for a copy that is under way, or behind other copies.
        updates_ms: How long it waits for a copy that waits for its chunk's update.
        launches_ms: How long it waits for the launching thread.
        collectives_ms: How long it waits for collectives, under way or behind others.
    """

    step_ms: float
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    compute_ms: float
    copies_ms: float
    updates_ms: float
    launches_ms: float
    collectives_ms: float = 0.0


def speeds(hardware: HardwareProfile, format: Format = "split") -> Speeds:
    """Return the speeds of copies and host updates beside each other.

    Measured are each alone, both directions together, and all three. One direction beside an update gets at most what
    both get together; an update beside one direction loses half of what both take from it.
    """
    host = hardware.host_update(format, threads_of_share(hardware.cores))
    lost = min(1.0, host.beside_copies_gparams_per_s / host.gparams_per_s)
    links = (hardware.h2d, hardware.d2h)
    both = [min(1.0, link.both_gb_per_s / link.alone_gb_per_s) for link in links]
    beside = [link.beside_updates_gb_per_s / link.alone_gb_per_s for link in links]
    shared = sum(link.beside_updates_gb_per_s for link in links)
    one = [min(1.0, shared / link.alone_gb_per_s) for link in links]
    found = [(1.0, 1.0, 1.0)] * 8
    found[3] = (both[0], both[1], 1.0)
    found[5] = (one[0], 1.0, (1.0 + lost) / 2)
    found[6] = (1.0, one[1], (1.0 + lost) / 2)
    found[7] = (min(both[0], beside[0]), min(both[1], beside[1]), lost)
    return tuple(found)


def simulate_jobs(step: StepJobs, rates: Speeds, steps: int = MAX_STEPS) -> Timeline:
    """Return a step of the steady state."""
    if step.last_compute < 0:
        return Timeline(0.0, (), (), 0.0, 0.0, 0.0, 0.0)
    engine = _Engine(step, rates, steps)
    step_ms = engine.run()
    here, origin = engine.base(engine.number), engine.finish(engine.number - 1)
    begins, ends = (
        tuple([time - origin for time in each[here : here + engine.count]]) for each in (engine.begins, engine.ends)
    )
    return Timeline(step_ms, begins, ends, *_Parts(step.jobs, engine).sums())


def repeated_ms(step: StepJobs, rates: Speeds, steps: int = MAX_STEPS) -> float:
    """Return the time of a step of the steady state: all that the search compares."""
    return _Engine(step, rates, steps).run() if step.last_compute >= 0 else 0.0


class _Side:
    """A stream beside compute, and its next or running job.

    Attributes:
        index: Its place in ``Speeds``.
        bit: What stands for it in the numbers of combinations there.
        order: Its jobs of a step.
        position: The next one, or that which runs, in ``order``.
        base: Where that one's step begins in the engine's lists.
        left: What is left of it, in ms alone; -1 before it begins.
        ready: When it may begin, as far as is known; NaN if it is not.
        free: When the one before ended.
        blocked: A job, in the engine's lists, before whose end nothing more is known.
    """

    __slots__ = ("base", "bit", "blocked", "free", "index", "left", "order", "position", "ready")

    def __init__(self, index: int, order: list[int], base: int) -> None:
        self.index = index
        self.bit = 1 << index if index >= 0 else 0
        self.order = order
        self.base = base
        self.position = 0
        self.left = -1.0
        self.ready = math.nan
        self.free = 0.0
        self.blocked = 0


class _Engine:
    """Runs job after job, step after step; ``number`` is the step that it came to.

    ``begins`` and ``ends`` are over all steps, NaN for what is not known yet. Before the first step lies one that ended
    at 0, so that a job of the step before is always at the same distance. This is where planning spends its time:
    attributes are copied to local names, and what is looked at again and again lies in lists of numbers.
    """

    def __init__(self, step: StepJobs, rates: Speeds, steps: int) -> None:
        self.count = count = len(step.jobs)
        self.rates: Sequence[Sequence[float]] = rates
        self.steps = steps
        self.last = step.last_compute
        self.number = 0
        self.now = 0.0
        self.ms = [job.ms for job in step.jobs]
        self.launched = [job.launched_ms for job in step.jobs]
        self.since = [job.since for job in step.jobs]
        self.after = [job.after for job in step.jobs]
        self.begins = [0.0] * count + [math.nan] * (count * steps)
        self.ends = self.begins.copy()
        orders: list[list[int]] = [[] for _ in STREAMS]
        for number, job in enumerate(step.jobs):
            orders[job.stream].append(number)
        self.compute = _Side(-1, orders[COMPUTE], count)
        self.sides = [_Side(i, order, count) for i, order in enumerate(orders[COMPUTE + 1 :]) if order]
        if orders[GATHER]:
            self.rates = [(*each, 1.0) for each in rates] * 2

    def base(self, number: int) -> int:
        """Return where a step's jobs begin in ``begins`` and ``ends``."""
        return (number + 1) * self.count

    def finish(self, number: int) -> float:
        """Return when a step's compute ended; 0 for step -1."""
        return self.ends[self.base(number) + self.last]

    def run(self) -> float:
        """Run until a step repeats the one before; return its time, or the mean of the last half if none does."""
        tail = [0.0] * self.count
        for number in range(self.steps):
            self.number, base = number, self.base(number)
            while self._advance(base):
                pass
            finish = self.finish(number)
            # No job of the next step begins before this one's compute has ended: only what runs on later matters to it.
            before, tail = tail, [max(0.0, end - finish) for end in self.ends[base : base + self.count]]
            if all(-SAME_MS < old - new < SAME_MS for old, new in zip(before, tail, strict=True)):
                return finish - self.finish(number - 1)
        back = (self.steps + 1) // 2
        return (self.finish(self.number) - self.finish(self.number - back)) / back

    def _advance(self, base: int) -> bool:
        """Let time pass until a job beside compute begins or ends; False when the step at ``base`` is done."""
        limit, unfinished = base, False
        for side in self.sides:
            if side.base <= base:
                unfinished = True
            elif side.base > limit:
                limit = side.base
        blocking = self.ends[self.compute.blocked]
        if blocking == blocking:
            self._run_compute(limit)
        if not unfinished:
            return False
        until, running = self._begin_what_is_ready()
        bits = 0
        for side in running:
            bits |= side.bit
        rates, now, ending = self.rates[bits], self.now, None
        for side in running:
            end = now + side.left / rates[side.index]
            if end < until:
                until, ending = end, side
        passed = until - now
        for side in running:
            left = side.left - passed * rates[side.index]
            side.left = left if left > 0.0 else 0.0
        self.now = until
        if ending is not None:
            self._end(ending)
        return True

    def _begin_what_is_ready(self) -> tuple[float, list[_Side]]:
        """Begin jobs; return when the next one may begin, and the streams that run."""
        until, now, ends, running = math.inf, self.now, self.ends, []
        for side in self.sides:
            if side.left < 0.0:
                if side.ready != side.ready:
                    blocking = ends[side.blocked]
                    if blocking == blocking:
                        self._look(side)
                if not side.ready <= now:  # later, or not known
                    if side.ready < until:
                        until = side.ready
                    continue
                number = side.order[side.position]
                self.begins[side.base + number] = now
                side.left = self.ms[number]
            running.append(side)
        return until, running

    def _look(self, side: _Side) -> None:
        """Find out when a stream's next job may begin, if that is known and there is one."""
        if side.base >= len(self.ends):
            return
        ends, base, number = self.ends, side.base, side.order[side.position]
        since = base + self.since[number]
        ready = ends[since] + self.launched[number]
        if ready != ready:
            side.blocked = since
            return
        for reference in self.after[number]:
            end = ends[base + reference]
            if end != end:
                side.blocked = base + reference
                return
            if end > ready:
                ready = end
        side.ready = max(ready, side.free)

    def _end(self, side: _Side) -> None:
        self.ends[side.base + side.order[side.position]] = side.free = self.now
        side.left = -1.0
        side.ready = math.nan
        side.position += 1
        if side.position == len(side.order):
            side.position = 0
            side.base += self.count

    def _run_compute(self, limit: int) -> None:
        """Begin and end every compute job of which all is known, up to the step at ``limit``."""
        ends, compute = self.ends, self.compute
        begins, ms, launched, since, after = self.begins, self.ms, self.launched, self.since, self.after
        order, base, free = compute.order, compute.base, compute.free
        while base <= limit and base < len(ends):
            for position in range(compute.position, len(order)):
                number = order[position]
                begin = ends[base + since[number]] + launched[number]
                for reference in after[number]:
                    end = ends[base + reference]
                    if not end <= begin:  # later, or NaN
                        begin = end
                        if end != end:
                            compute.blocked = base + reference
                            compute.position, compute.base, compute.free = position, base, free
                            return
                if begin < free:
                    begin = free
                begins[base + number] = begin
                ends[base + number] = free = begin + ms[number]
            compute.position = 0
            base += self.count
        compute.base, compute.free = base, free


class _Parts:
    """Splits a step into busy compute and what compute waited for."""

    def __init__(self, jobs: Sequence[Job], engine: _Engine) -> None:
        self.jobs = jobs
        self.engine = engine
        self.base = engine.base(engine.number)

    def sums(self) -> tuple[float, float, float, float, float]:
        """Return ms of busy compute, and of waits for copies, updates, launches and collectives."""
        engine = self.engine
        free = engine.finish(engine.number - 1)
        busy = copies = updates = launches = collectives = 0.0
        for number in engine.compute.order:
            gap = engine.begins[self.base + number] - free
            late_copy, late_update, late = self._causes(number, free) if gap > 0 else (0.0, 0.0, 0.0)
            copies += late_copy
            updates += late_update
            collectives += late
            launches += max(0.0, gap - late_copy - late_update - late)
            busy += self.jobs[number].ms
            free = engine.ends[self.base + number]
        return busy, copies, updates, launches, collectives

    def _end(self, ref: Ref) -> float:
        return self.engine.ends[self.base + ref]

    def _causes(self, number: int, free: float) -> tuple[float, float, float]:
        """Return how long compute waited, from ``free`` on, for copies, the updates before them, and collectives."""
        after = self.jobs[number].after
        if not after:
            return 0.0, 0.0, 0.0
        latest = max(after, key=self._end)
        end, collective = self._end(latest), 0.0
        if self.jobs[latest].stream == GATHER:
            shards = [ref for ref in self.jobs[latest].after if self.jobs[ref].stream != COMPUTE]
            arrived = max((self._end(ref) for ref in shards), default=free)
            collective = max(0.0, end - max(free, arrived))
            if arrived <= free:
                return 0.0, 0.0, collective
            latest, end = max(shards, key=self._end), arrived
        copy = self.jobs[latest]
        updates = [self._end(ref) for ref in copy.after if self.jobs[ref].stream == HOST]
        updated = min(max(updates, default=free), end)
        others = [self._end(ref) for ref in copy.after if self.jobs[ref].stream != HOST]
        waited = max(0.0, updated - max([free, *others]))
        return max(0.0, end - free) - waited, waited, collective
