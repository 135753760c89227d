"""The jobs of one step: what each stream does, for how long when nothing disturbs it, and what it waits for.

Operations become jobs as the residency carries them out (``wait``, ``release`` and ``bind`` take no time; they only say
who waits for whom)::

    stream    job         waits for
    compute   call        the arrival of the chunks that it reads
              collect     the arrival and the departure of what was in the buffer
              update      of a persistent chunk
    h2d       prefetch    the buffer's last reader, the departure of gradients from it, the chunk's last update
    d2h       offload     collect; the host to have emptied the landing
    d2h       swap_out    the forward of its segment; what compute does after release waits for it
    h2d       reload      compute so far, as its memory may have had a reader; the departure of the values
    host      update      offload
    gather    all_gather  the shard's arrival in the buffer, or its update on the device
    gather    reduce      collect; what uses the shard of the mean (offload, update) waits for it

A stream does its jobs in order. Jobs of a step may wait for jobs of the step before. The thread that launches them is a
resource, too: it starts a step when the device has done the last one (batches come from pageable memory or the loss is
read, and either waits for the device), and with clipping it waits for the gradient's norm before the updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from protrain_compile.chunks import Residency
from protrain_compile.collective_times import CollectiveTimes
from protrain_compile.lowering import Choice, Lowered, recomputed_segments
from protrain_compile.profile import Format, HardwareProfile, LinkRate, Profile
from protrain_compile.roles import Role
from protrain_compile.step_shape import ChunkShape, StepShape
from protrain_compile.swapped_lives import moved_bytes, swap_plan
from protrain_compile.updates.threads import threads_of_share

COMPUTE, H2D, D2H, HOST, GATHER = range(5)
STREAMS = ("compute", "h2d", "d2h", "host", "gather")

CHUNK_LAUNCHES = {"wait": 1, "release": 1, "prefetch": 4, "collect": 3, "offload": 5, "update": 1}
"""Calls into the driver for an operation on a chunk (waits, copies, kernels and events in ``residency``)."""

RANK_LAUNCHES = {"bind": 1, "all_gather": 6, "reduce_scatter": 8}
"""The same for what only chunks that ranks divide have."""

SWAP_LAUNCHES = {"swap_out": 8, "release_swapped": 1, "reload": 8, "wait_reload": 1}
"""The same for swapped values: events, and about one copy or allocation for each of a few large values."""

COLLECT_PASSES = 3
"""Times that ``collect`` reads or writes a chunk's bytes: it clears the buffer, reads gradients and writes them."""

Ref = int
"""A job: its number in its step; of the step before, its number less how many jobs a step has, which is negative."""

NONE: Ref = -(1 << 60)
"""No job."""


class Job(NamedTuple):
    """One job.

    Attributes:
        stream: COMPUTE, H2D, D2H, HOST or GATHER.
        ms: Its time alone.
        after: The jobs that it waits for.
        launched_ms: When the launching thread has launched it, counted from the end of ``since``.
        since: The job whose end the launching thread waited for last.
    """

    stream: int
    ms: float
    after: tuple[Ref, ...]
    launched_ms: float
    since: Ref


@dataclasses.dataclass(frozen=True)
class StepJobs:
    """The jobs of a step in the order in which they are launched.

    Attributes:
        jobs: The jobs.
        job_of: For every operation of forward and backward, in order: its job, or -1.
        last_compute: The job that ends a step on the device; negative if there is none.
    """

    jobs: tuple[Job, ...]
    job_of: tuple[int, ...]
    last_compute: int


def step_jobs(shape: StepShape, profile: Profile, choice: Choice, lowered: Lowered) -> StepJobs:
    """Return the jobs of a step in steady state: its first prefetches wait for what the step before did last."""
    writer = _Writer(shape, profile, choice)
    writer.write(lowered)
    # A frozen chunk may still be in its buffer when the next step begins: its prefetch is then no job.
    while writer.holder and writer.holder != writer.held_before:
        writer = _Writer(shape, profile, choice, writer.holder)
        writer.write(lowered)
    return StepJobs(writer.finished_jobs(), tuple(writer.job_of), writer.last_compute)


class Durations:
    """How long jobs take alone, in ms."""

    def __init__(self, shape: StepShape, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        self._threads = threads_of_share(hardware.cores)
        self._passes = COLLECT_PASSES + (shape.clips and shape.world.size == 1)
        self._collectives = CollectiveTimes(hardware, shape.world) if shape.world.size > 1 else None
        self._micro_batches = shape.micro_batches
        self._host_rates: dict[Format, float] = {}

    @staticmethod
    def copy(size_bytes: int, link: LinkRate) -> float:
        """Return the time of a copy over one direction of the link."""
        return size_bytes / link.alone_gb_per_s / 1e6

    def prefetch(self, chunk: ChunkShape) -> float:
        """Return the time of a copy to the device."""
        return self.copy(chunk.shard_bytes, self.hardware.h2d)

    def offload(self, chunk: ChunkShape) -> float:
        """Return the time of a copy from the device."""
        return self.copy(chunk.shard_bytes, self.hardware.d2h)

    def collect(self, chunk: ChunkShape) -> float:
        """Return the time of writing gradients into a chunk, and with clipping of measuring their norm."""
        return self._passes * chunk.size_bytes / self.hardware.device_gb_per_s / 1e6

    def gather(self, chunk: ChunkShape, *, in_buffer: bool) -> float:
        """Return the time of an all_gather; of a chunk that stays whole, its share of the one after an update."""
        if self._collectives is None or not (in_buffer or chunk.updated):
            return 0.0
        return self._collectives.gather_ms(chunk) / (1 if in_buffer else self._micro_batches)

    def reduce(self, chunk: ChunkShape, residency: Residency) -> float:
        """Return the time of a reduce_scatter; of a whole gradient, its share of the last micro-batch's."""
        if self._collectives is None:
            return 0.0
        ms = self._collectives.reduce_ms(chunk, adds=residency == "persistent")
        return ms / (self._micro_batches if chunk.keeps_gradient(residency) else 1)

    def host_update(self, chunk: ChunkShape) -> float:
        """Return the time of an update on the host."""
        if chunk.format not in self._host_rates:
            rate = self.hardware.host_update(chunk.format, self._threads)
            self._host_rates[chunk.format] = rate.gparams_per_s
        return chunk.numel / self._host_rates[chunk.format] / 1e6

    def device_update(self, chunk: ChunkShape) -> float:
        """Return the time of an update on the device."""
        return chunk.numel / device_update_rate(self.hardware, chunk.format) / 1e6


def device_update_rate(hardware: HardwareProfile, format: Format) -> float:
    """Return G parameters/s of device updates; of the slowest format that was measured for one that was not."""
    rates = hardware.device_update_gparams_per_s
    return rates.get(format) or min(rates.values(), default=hardware.device_gb_per_s / 28)


_Wanted = tuple[str, int]
"""A job that the step before did last: of the writer's attribute of this name, and the key there."""


class _Writer:
    """Writes the jobs of one step. What nothing in the step did before is looked up at its end, in the step before."""

    def __init__(
        self,
        shape: StepShape,
        profile: Profile,
        choice: Choice,
        holder: Mapping[int, int] | None = None,
    ) -> None:
        self.shape = shape
        self.choice = choice
        self.durations = Durations(shape, profile.hardware)
        self.swaps = swap_plan(shape, choice.policies, recomputed_segments(shape, choice.policies))
        self.swapped: dict[int, Ref] = {}
        self.reloaded: dict[int, Ref] = {}
        self.jobs: list[tuple[int, float, list[Ref | _Wanted], float, Ref | None]] = []
        self.job_of: list[int] = []
        self.last_compute: Ref = NONE
        self.held_before = dict(holder or {})
        self.holder = dict(self.held_before)
        self.arrival: dict[int, Ref] = {}
        self.read: dict[int, Ref] = {}
        self.left: dict[int, Ref] = {}
        self.updated: dict[int, Ref] = {}
        self.emptied: list[Ref] = []
        self.offloaded: dict[int, Ref] = {}
        self.gathered: dict[int, Ref] = {}
        self.reduced: dict[int, Ref] = {}
        self.shards: dict[int, int] = {}
        self.is_shared = shape.world.size > 1
        self._awaited: list[Ref | _Wanted] = []
        self._parts = [profile.templates[each.template].parts for each in shape.segments]
        self._launch_ms = profile.hardware.launch_us / 1e3
        self._launched_ms = 0.0
        self._since: Ref | None = None
        self._pending: list[int] = []

    def finished_jobs(self) -> tuple[Job, ...]:
        """Return the jobs, each reference to the step before filled in."""
        count = len(self.jobs)
        last = self.last_compute - count
        found = []
        for stream, ms, after, launched, since in self.jobs:
            refs: list[Ref] = []
            for each in after:
                ref = self._before(*each) - count if isinstance(each, tuple) else each
                if ref not in refs and ref + count >= 0:
                    refs.append(ref)
            found.append(Job(stream, ms, tuple(refs), launched, last if since is None else since))
        return tuple(found)

    def _before(self, name: str, key: int) -> Ref:
        """Return the job that a name and key stand for at the end of a step."""
        if name == "emptied":
            return self.emptied[key] if len(self.emptied) >= -key else NONE
        known: dict[int, Ref] = getattr(self, name)
        return known.get(key, NONE)

    def _last(self, name: str, key: int) -> Ref | _Wanted:
        known: dict[int, Ref] = getattr(self, name)
        return known.get(key, (name, key))

    def write(self, lowered: Lowered) -> None:
        """Write the jobs of a step."""
        carries_out = self._carries_out()
        for op, segment, chunk, buffer in (*lowered.forward, *lowered.backward):
            before = len(self.jobs)
            if op in carries_out:
                launch_ms, job = carries_out[op]
                self._launched_ms += launch_ms
                job(chunk, buffer) if segment < 0 else job(segment)
            elif segment >= 0:
                self._call(op, segment)
            self.job_of.append(before if len(self.jobs) > before else -1)
        if self._pending:
            if self.shape.clips:
                self._since, self._launched_ms = self.last_compute, 0.0
            for chunk in sorted(self._pending):
                self._launch(CHUNK_LAUNCHES["update"])
                self._apply(chunk)

    def _carries_out(self) -> dict[str, tuple[float, Callable[..., None]]]:
        """Return ms of launches and the writer of every operation that is no call."""
        launches = CHUNK_LAUNCHES | SWAP_LAUNCHES | (RANK_LAUNCHES if self.is_shared else {})
        return {name: (each * self._launch_ms, getattr(self, f"_{name}")) for name, each in launches.items()}

    def _launch(self, calls: int) -> None:
        self._launched_ms += calls * self._launch_ms

    def _add(self, stream: int, ms: float, after: list[Ref | _Wanted]) -> Ref:
        self.jobs.append((stream, ms, after, self._launched_ms, self._since))
        return len(self.jobs) - 1

    def _compute(self, ms: float, after: list[Ref | _Wanted]) -> None:
        self.last_compute = self._add(COMPUTE, ms, self._awaited + after)
        self._awaited = []

    def _call(self, role: str, segment: int) -> None:
        cost = self._parts[segment].get(cast("Role", role))
        if cost is not None:
            self._launched_ms += cost.launches * self._launch_ms
        self._compute(cost.ms if cost is not None else 0.0, [])

    def _swap_out(self, segment: int) -> None:
        ms = self.durations.copy(moved_bytes(self.swaps.lives[segment]), self.durations.hardware.d2h)
        self.swapped[segment] = self._add(D2H, ms, [self.last_compute])

    def _release_swapped(self, segment: int) -> None:
        self._awaited.append(self.swapped[segment])

    def _reload(self, segment: int) -> None:
        ms = self.durations.copy(moved_bytes(self.swaps.lives[segment]), self.durations.hardware.h2d)
        self.reloaded[segment] = self._add(H2D, ms, [self.last_compute, self.swapped[segment]])

    def _wait_reload(self, segment: int) -> None:
        self._awaited.append(self.reloaded[segment])

    def _wait(self, chunk: int, buffer: int) -> None:
        self._awaited.append(self._last("arrival", buffer))

    def _release(self, chunk: int, buffer: int) -> None:
        self.read[buffer] = self.last_compute

    def _prefetch(self, chunk: int, buffer: int) -> None:
        if self.holder.get(buffer) == chunk:
            return
        after: list[Ref | _Wanted] = [self._last("read", buffer), self._last("left", buffer)]
        after.append(self._last("updated", chunk))
        self.arrival[buffer] = self._add(H2D, self.durations.prefetch(self.shape.chunks[chunk]), after)
        if self.is_shared:
            self.shards[buffer] = chunk
            self.holder.pop(buffer, None)
        else:
            self.holder[buffer] = chunk

    def _bind(self, chunk: int, buffer: int) -> None:
        self._awaited.append(self._last("gathered", chunk))

    def _all_gather(self, chunk: int, buffer: int) -> None:
        each = self.shape.chunks[chunk]
        if buffer < 0:
            if each.updated:
                ms = self.durations.gather(each, in_buffer=False)
                self.gathered[chunk] = self._add(GATHER, ms, [self._last("updated", chunk)])
            return
        if self.holder.get(buffer) == chunk:
            return
        after: list[Ref | _Wanted] = [self._last("read", buffer), self._last("left", buffer)]
        after.append(self._last("updated", chunk))
        if self.shards.pop(buffer, -1) == chunk:
            after = [self.arrival[buffer]]
        self.arrival[buffer] = self._add(GATHER, self.durations.gather(each, in_buffer=True), after)
        self.holder[buffer] = chunk

    def _reduce_scatter(self, chunk: int, buffer: int) -> None:
        ms = self.durations.reduce(self.shape.chunks[chunk], self.choice.residency[chunk])
        self.reduced[chunk] = self._add(GATHER, ms, [self.last_compute])
        if buffer >= 0:
            self.left[buffer] = self.reduced[chunk]

    def _collect(self, chunk: int, buffer: int) -> None:
        before = ("arrival", "left") if buffer >= 0 else ()
        after: list[Ref | _Wanted] = [self._last(name, buffer) for name in before]
        if self.is_shared and buffer < 0:
            after = [self._last("reduced", chunk)]
        self._compute(self.durations.collect(self.shape.chunks[chunk]), after)
        self.holder.pop(buffer, None)

    def _offload(self, chunk: int, buffer: int) -> None:
        self.read[buffer] = self.last_compute
        ready = self.reduced[chunk] if self.is_shared else self.last_compute
        after: list[Ref | _Wanted] = [ready, self._landing(chunk)]
        self.offloaded[chunk] = self._add(D2H, self.durations.offload(self.shape.chunks[chunk]), after)
        self.left[buffer] = self.offloaded[chunk]

    def _landing(self, chunk: int) -> Ref | _Wanted:
        """Return the host update that empties the landing which this chunk's gradient goes to."""
        slots = self.shape.landings
        if not slots:
            return self._last("updated", chunk)
        done = len(self.emptied)
        return self.emptied[-slots] if done >= slots else ("emptied", done - slots)

    def _update(self, chunk: int, buffer: int) -> None:
        if self.shape.update_mode == "in_backward":
            self._apply(chunk)
        else:
            self._pending.append(chunk)

    def _apply(self, chunk: int) -> None:
        if self.choice.residency[chunk] == "persistent":
            ready: list[Ref | _Wanted] = [self.reduced[chunk]] if self.is_shared else []
            self._compute(self.durations.device_update(self.shape.chunks[chunk]), ready)
            self.updated[chunk] = self.last_compute
            self._forget_held(chunk)
            return
        ms = self.durations.host_update(self.shape.chunks[chunk])
        self.updated[chunk] = self._add(HOST, ms, [self.offloaded[chunk]])
        if self.shape.landings:
            self.emptied.append(self.updated[chunk])
        self._forget_held(chunk)

    def _forget_held(self, chunk: int) -> None:
        """Note that what buffers hold of a chunk is of before its update."""
        for buffer in [buffer for buffer, held in self.holder.items() if held == chunk]:
            del self.holder[buffer]
