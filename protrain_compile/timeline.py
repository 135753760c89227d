"""Timeline: a step's jobs on their streams in steady state, copies and host updates slowing each other down.

Compute keeps its pace whatever else happens (measured: copies do not slow matrix products). Copies and host updates
share the host's memory and the link: while several of them run, each has the speed that ``speeds`` gives to that
combination. Steps are simulated one after the other, each beginning as the last one left the streams, until a step
repeats the one before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from protrain_compile.profile import Format, HardwareProfile
from protrain_compile.step_jobs import COMPUTE, H2D, HOST, Job, StepJobs
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
    """

    step_ms: float
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    compute_ms: float
    copies_ms: float
    updates_ms: float
    launches_ms: float


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
    count = len(step.jobs)
    engine = _Engine(step.jobs, rates, steps)
    number, repeats = engine.run(step.last_compute)
    finished = [0.0, *(engine.ends[n * count + step.last_compute] for n in range(number + 1))]
    back = 1 if repeats else (number + 2) // 2
    step_ms = (finished[-1] - finished[-1 - back]) / back
    begins, ends = (
        tuple(time - finished[-2] for time in each[number * count : (number + 1) * count])
        for each in (engine.begins, engine.ends)
    )
    return Timeline(step_ms, begins, ends, *_Parts(step.jobs, engine, number).sums())


def undisturbed_ms(step: StepJobs, steps: int = MAX_STEPS) -> float:
    """Return the time of a step in which nothing slows anything down: no more than ``simulate_jobs`` finds."""
    count = len(step.jobs)
    before: list[float] = [0.0] * count
    free = [0.0, 0.0, 0.0, 0.0]
    finished = [0.0]
    for number in range(steps):
        now: list[float] = []
        for stream, ms, after, launched, since in step.jobs:
            begin = launched
            if since[0] >= 0 and (number or not since[1]):
                begin += before[since[0]] if since[1] else now[since[0]]
            begin = max(begin, free[stream])
            for other, back in after:
                if number or not back:
                    begin = max(begin, before[other] if back else now[other])
            free[stream] = begin + ms
            now.append(free[stream])
        finished.append(now[step.last_compute] if step.last_compute >= 0 else 0.0)
        shift = finished[-1] - finished[-2]
        if number and all(abs(end - old - shift) < SAME_MS for end, old in zip(now, before, strict=True)):
            return shift
        before = now
    back = (steps + 1) // 2
    return (finished[-1] - finished[-1 - back]) / back


class _Engine:
    """Runs job after job; ``begins`` and ``ends`` are over all steps, NaN for what is not known yet."""

    def __init__(self, jobs: Sequence[Job], rates: Speeds, steps: int) -> None:
        self.jobs = jobs
        self.rates = rates
        self.steps = steps
        self.begins = [math.nan] * (len(jobs) * steps)
        self.ends = [math.nan] * (len(jobs) * steps)
        streams: list[list[int]] = [[], [], [], []]
        for number, job in enumerate(jobs):
            streams[job.stream].append(number)
        self.streams = [[s * len(jobs) + n for s in range(steps) for n in numbers] for numbers in streams]
        self.next = [0, 0, 0, 0]
        self.free = [0.0, 0.0, 0.0, 0.0]
        self.left: list[float | None] = [None, None, None, None]
        self.now = 0.0

    def run(self, last: int) -> tuple[int, bool]:
        """Run until a step repeats the one before; return its number, and whether one did."""
        count = len(self.jobs)
        for number in range(self.steps):
            bound = (number + 1) * count
            while any(p < len(s) and s[p] < bound for s, p in zip(self.streams, self.next, strict=True)):
                self._advance()
            if number and self._repeats(number, last):
                return number, True
        return self.steps - 1, False

    def _repeats(self, number: int, last: int) -> bool:
        count = len(self.jobs)
        here, before = number * count, (number - 1) * count
        shift = self.ends[here + last] - self.ends[before + last]
        return all(
            abs(self.ends[here + i] - self.ends[before + i] - shift) < SAME_MS
            and abs(self.begins[here + i] - self.begins[before + i] - shift) < SAME_MS
            for i in range(count)
        )

    def _ready(self, job: int) -> float:
        """Return when a job may begin, as far as others matter; NaN if that is not known yet."""
        count = len(self.jobs)
        step, number = divmod(job, count)
        _, _, after, launched, since = self.jobs[number]
        base = step * count
        ready = 0.0
        if since[0] >= 0 and (step or not since[1]):
            ready = self.ends[base + since[1] * count + since[0]]
        ready += launched
        for other, back in after:
            if step or not back:
                end = self.ends[base + back * count + other]
                if not end <= ready:  # later, or NaN
                    ready = end
                    if end != end:
                        break
        return ready

    def _run_compute(self) -> None:
        """Begin and end every compute job of which all is known."""
        order, position, free = self.streams[COMPUTE], self.next[COMPUTE], self.free[COMPUTE]
        count = len(self.jobs)
        while position < len(order):
            job = order[position]
            ready = self._ready(job)
            if ready != ready:
                break
            begin = max(free, ready)
            free = begin + self.jobs[job % count].ms
            self.begins[job], self.ends[job] = begin, free
            position += 1
        self.next[COMPUTE], self.free[COMPUTE] = position, free

    def _advance(self) -> None:
        """Let time pass until a copy or host update begins or ends."""
        self._run_compute()
        running, until = 0, math.inf
        for stream in range(H2D, HOST + 1):
            if self.left[stream] is None and self.next[stream] < len(self.streams[stream]):
                job = self.streams[stream][self.next[stream]]
                ready = max(self._ready(job), self.free[stream])
                if ready <= self.now:
                    self.begins[job] = self.now
                    self.left[stream] = self.jobs[job % len(self.jobs)].ms
                elif ready < until:
                    until = ready
            if self.left[stream] is not None:
                running |= 1 << (stream - 1)
        rates = self.rates[running]
        ending = -1
        for stream in range(H2D, HOST + 1):
            left = self.left[stream]
            if left is not None and self.now + left / rates[stream - 1] < until:
                until, ending = self.now + left / rates[stream - 1], stream
        if until < math.inf:
            self._pass_time(until, rates, ending)

    def _pass_time(self, until: float, rates: tuple[float, float, float], ending: int) -> None:
        for stream in range(H2D, HOST + 1):
            left = self.left[stream]
            if left is not None:
                self.left[stream] = max(0.0, left - (until - self.now) * rates[stream - 1])
        self.now = until
        if ending >= 0:
            self.ends[self.streams[ending][self.next[ending]]] = until
            self.free[ending] = until
            self.left[ending] = None
            self.next[ending] += 1


class _Parts:
    """Splits a step into busy compute and what compute waited for."""

    def __init__(self, jobs: Sequence[Job], engine: _Engine, step: int) -> None:
        self.jobs = jobs
        self.engine = engine
        self.base = step * len(jobs)

    def sums(self) -> tuple[float, float, float, float]:
        """Return ms of busy compute, and of waits for copies, updates and launches."""
        order = self.engine.streams[COMPUTE]
        per_step = sum(job.stream == COMPUTE for job in self.jobs)
        first = self.base // len(self.jobs) * per_step
        free = self.engine.ends[order[first - 1]] if first else 0.0
        busy = copies = updates = launches = 0.0
        for job in order[first : first + per_step]:
            gap = self.engine.begins[job] - free
            late_copy, late_update = self._causes(job - self.base, free) if gap > 0 else (0.0, 0.0)
            copies += late_copy
            updates += late_update
            launches += max(0.0, gap - late_copy - late_update)
            busy += self.jobs[job - self.base].ms
            free = self.engine.ends[job]
        return busy, copies, updates, launches

    def _end(self, ref: tuple[int, int]) -> float:
        at = self.base + ref[1] * len(self.jobs) + ref[0]
        return self.engine.ends[at] if at >= 0 else 0.0

    def _causes(self, number: int, free: float) -> tuple[float, float]:
        """Return how long compute waited, from ``free`` on, for copies and for the updates before them."""
        after = self.jobs[number].after
        if not after:
            return 0.0, 0.0
        latest = max(after, key=self._end)
        end = self._end(latest)
        copy = self.jobs[latest[0]]
        updates = [self._end(ref) for ref in copy.after if self.jobs[ref[0]].stream == HOST]
        updated = min(max(updates, default=free), end)
        others = [self._end(ref) for ref in copy.after if self.jobs[ref[0]].stream != HOST]
        waited = max(0.0, updated - max([free, *others]))
        return max(0.0, end - free) - waited, waited
