"""The cost model: what a step of a plan costs, in time and in memory. One function says so for everyone.

``simulate`` serves the search, the printed numbers and the pictures. Its formulas, and where each is::

    operations   = the passes' order, on numbers                                    lowering.lower
    jobs         = operations with their times alone and what they wait for         step_jobs.step_jobs
                   call: measured ms; copy: bytes / link rate; update: parameters / update rate;
                   collect: 3 (with clipping 4) x chunk bytes / device memory rate  step_jobs.Durations
                   collective: measured, or by a ring over the links                collective_times
    step_ms      = end of compute in one step to its end in the next, steady state  timeline.simulate_jobs
                   copies and updates run at speed(what else runs)                  timeline.speeds
                 = compute + exposed copies + exposed updates + exposed launches + exposed collectives
    standing     = held + chunk buffers + persistent (parameters + states + gradients)   memory_model.standing_bytes
    values(t)    = saved values, activations and gradients alive after operation t  memory_model.live_values
    inside(t)    = what operation t returns + its workspace                         memory_model.inside_bytes
    peak_bytes   = standing + max over t of values(t - 1) + inside(t)               memory_model.find_peak
    reserved     = the same with large allocations in units of 2 MiB
    host_bytes   = parameters + states + landings + waiting gradients of chunks     memory_model.host_bytes
                   on the host

Of a chunk that ranks divide, copies, updates, host bytes and states are those of one rank's shard (``rank_shape``).

Not in it yet: a step counts as one forward and backward however many micro-batches are declared; collectives that only
the last of them needs count in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from protrain_compile.chunks import Residency
from protrain_compile.collective_times import traffic_bytes
from protrain_compile.lowering import Choice, Lowered, Op, lower
from protrain_compile.memory_model import (
    find_peak,
    host_bytes,
    live_values,
    reserved_slack_bytes,
    standing_bytes,
    total,
)
from protrain_compile.plan import MIN_BUFFERS, Plan
from protrain_compile.profile import Format, Profile
from protrain_compile.rank_shape import divided_by
from protrain_compile.step_jobs import STREAMS, StepJobs, step_jobs
from protrain_compile.step_shape import StepShape
from protrain_compile.timeline import Speeds, Timeline, simulate_jobs, speeds


@dataclasses.dataclass(frozen=True)
class TimedOperation:
    """One operation of the simulated step.

    Attributes:
        op: Its name.
        what: What it works on.
        graph: ``forward`` or ``backward``.
        stream: Where it runs.
        begin_ms: When it begins, counted from the end of the last step's compute.
        ms: How long it takes.
        live_bytes: Device bytes alive right after it.
    """

    op: str
    what: str
    graph: str
    stream: str
    begin_ms: float
    ms: float
    live_bytes: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a step is predicted to cost.

    Attributes:
        step_ms: Time of a step in steady state; the sum of the five parts that follow.
        compute_ms: Compute busy: calls, gradients written to chunks, updates on the device.
        exposed_copies_ms: Compute waits for copies.
        exposed_updates_ms: Compute waits for copies that wait for updates on the host.
        exposed_launches_ms: Compute waits for the launching thread.
        collectives_ms: Compute waits for other ranks.
        peak_bytes: The most device memory that is allocated at once.
        peak_at: The operation in which that is, such as ``backward of epilogue``.
        reserved_bytes: The least that the allocator takes from the device for it.
        device_bytes: What the peak is made of, by kind.
        host_bytes: Host memory at most: in the first step all gradients wait there.
        host_kinds: What it is made of, by kind.
        traffic_bytes: Bytes that a rank receives from others, by collective.
        operations: Every operation of a step.
    """

    step_ms: float
    compute_ms: float
    exposed_copies_ms: float
    exposed_updates_ms: float
    exposed_launches_ms: float
    collectives_ms: float
    peak_bytes: int
    peak_at: str
    reserved_bytes: int
    device_bytes: Mapping[str, int]
    host_bytes: int
    host_kinds: Mapping[str, int]
    traffic_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    operations: tuple[TimedOperation, ...] = ()


def full_choice(shape: StepShape, plan: Plan) -> Choice:
    """Return a plan without gaps: chunks of which it says nothing are persistent, and buffers as few as possible.

    Raises:
        PlanError: If the plan is for other blocks or another number of chunks.
    """
    policies = plan.fit(shape.block_names).policies
    assert policies is not None
    resident: Residency = "persistent"
    residency = plan.fit_chunks(len(shape.chunks)) or (resident,) * len(shape.chunks)
    return Choice(policies, residency, plan.buffers or MIN_BUFFERS)


def simulate(shape: StepShape, profile: Profile, plan: Plan) -> Prediction:
    """Return what a step of ``plan`` costs.

    Raises:
        PlanError: If the plan does not fit the shape, or one call uses more chunks than there are buffers.
    """
    choice = full_choice(shape, plan)
    shape = divided_by(shape, plan, choice.residency)
    lowered = lower(shape, choice)
    jobs = step_jobs(shape, profile, choice, lowered)
    timeline = simulate_jobs(jobs, rates_of(shape, profile))
    peak = find_peak(shape, profile, choice, lowered)
    reserved = find_peak(shape, profile, choice, lowered, "segment_bytes")
    standing = standing_bytes(shape, choice)
    on_host = host_bytes(shape, choice)
    graph = lowered.forward if peak.graph == "forward" else lowered.backward
    return Prediction(
        step_ms=timeline.step_ms,
        compute_ms=timeline.compute_ms,
        exposed_copies_ms=timeline.copies_ms,
        exposed_updates_ms=timeline.updates_ms,
        exposed_launches_ms=timeline.launches_ms,
        collectives_ms=timeline.collectives_ms,
        peak_bytes=total(standing) + peak.bytes,
        peak_at=describe(shape, graph[peak.position]) if peak.position >= 0 else f"start of the {peak.graph}",
        reserved_bytes=total(standing) + reserved_slack_bytes(shape, choice) + reserved.bytes,
        device_bytes={**standing, "activations": peak.values_bytes, "inside calls": peak.inside_bytes},
        host_bytes=total(on_host),
        host_kinds=on_host,
        traffic_bytes=traffic_bytes(shape, lowered),
        operations=timed_operations(shape, choice, lowered, jobs, timeline),
    )


def rates_of(shape: StepShape, profile: Profile) -> Speeds:
    """Return the speeds of copies and host updates beside each other, for the format that most of a model has."""
    sizes: dict[Format, int] = {}
    for chunk in shape.chunks:
        if chunk.trainable:
            sizes[chunk.format] = sizes.get(chunk.format, 0) + chunk.size_bytes
    return speeds(profile.hardware, max(sizes, key=sizes.__getitem__, default="split"))


def describe(shape: StepShape, op: Op) -> str:
    """Return what an operation does, such as ``forward of block 3`` or ``collect of chunk 2``."""
    return f"{op.op} of {_what(shape, op)}"


def _what(shape: StepShape, op: Op) -> str:
    if op.segment >= 0:
        return shape.segments[op.segment].name
    return f"chunk {op.chunk}" if op.chunk >= 0 else "an input"


def timed_operations(
    shape: StepShape, choice: Choice, lowered: Lowered, jobs: StepJobs, timeline: Timeline
) -> tuple[TimedOperation, ...]:
    """Return every operation with its time and the memory after it; what takes no time begins with what follows."""
    standing = total(standing_bytes(shape, choice))
    live = live_values(shape, choice, lowered)
    found: list[TimedOperation] = []
    graphs = (("forward", lowered.forward, live[0]), ("backward", lowered.backward, live[1]))
    ops = [(graph, op, alive[i + 1]) for graph, each, alive in graphs for i, op in enumerate(each)]
    free = 0.0
    for (graph, op, alive), job in zip(ops, jobs.job_of, strict=True):
        begin = timeline.begins[job] if job >= 0 else free
        ms = timeline.ends[job] - begin if job >= 0 else 0.0
        stream = STREAMS[jobs.jobs[job].stream] if job >= 0 else "compute"
        if stream == "compute":
            free = begin + ms
        found.append(TimedOperation(op.op, _what(shape, op), graph, stream, begin, ms, standing + alive))
    return tuple(found)
