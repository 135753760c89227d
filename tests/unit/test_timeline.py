"""The simulation of jobs on streams: nothing begins too early, or later than it can."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.made_shapes import random_hardware, random_stack

from protrain_compile.cost_model import rates_of
from protrain_compile.lowering import Choice, lower
from protrain_compile.plan import POLICIES
from protrain_compile.step_jobs import STREAMS, StepJobs, step_jobs
from protrain_compile.timeline import Speeds, Timeline, repeated_ms, simulate_jobs


def random_jobs(draw: random.Random) -> tuple[StepJobs, Speeds]:
    stack = random_stack(draw, draw.randint(1, 12))
    shape, profile = stack.shape(), stack.profile(**random_hardware(draw))
    kinds = draw.choice((("offloaded",), ("persistent", "offloaded"), ("persistent", "offloaded", "split")))
    residency: Any = tuple(draw.choice(kinds) for _ in shape.chunks)
    policies: Any = tuple(draw.choice(POLICIES) for _ in shape.block_names)
    choice = Choice(policies, residency, draw.randint(3, 6))
    return step_jobs(shape, profile, choice, lower(shape, choice)), rates_of(shape, profile)


def settled(jobs: StepJobs, timeline: Timeline) -> bool:
    """Whether a step was found that repeats: its compute ends when it does."""
    return timeline.ends[jobs.last_compute] == pytest.approx(timeline.step_ms)


def begins_expected(jobs: StepJobs, timeline: Timeline) -> list[float]:
    """Return for each job the end of the last thing that it waits for; the step before was the same."""
    streams: list[list[int]] = [[] for _ in STREAMS]
    for number, job in enumerate(jobs.jobs):
        streams[job.stream].append(number)
    found = []
    for number, job in enumerate(jobs.jobs):
        order = streams[job.stream]
        place = order.index(number)
        previous = order[place - 1] - (0 if place else len(jobs.jobs))
        ended = [timeline.ends[other] - timeline.step_ms * (other < 0) for other in (*job.after, previous, job.since)]
        found.append(max(*ended[:-1], ended[-1] + job.launched_ms))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_job_begins_when_the_last_that_it_waits_for_has_ended(seed: int) -> None:
    """With copies that wait while compute waits for others of the step before, too."""
    jobs, rates = random_jobs(random.Random(seed))
    found = simulate_jobs(jobs, rates)
    if settled(jobs, found):
        assert found.begins == pytest.approx(begins_expected(jobs, found), abs=1e-4)
    assert repeated_ms(jobs, rates) == found.step_ms


def test_most_steps_settle() -> None:
    draw = random.Random(0)
    found = [random_jobs(draw) for _ in range(30)]
    assert sum(settled(jobs, simulate_jobs(jobs, rates)) for jobs, rates in found) >= 27
