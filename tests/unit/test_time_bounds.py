"""Bounds on the time of a step that look at its halves: true of every simulation, and close where copies bind."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from support.made_shapes import Stack, prefix, random_hardware, random_stack

from protrain_compile.cost_model import rates_of
from protrain_compile.lowering import Choice, lower
from protrain_compile.plan import POLICIES
from protrain_compile.profile import Profile
from protrain_compile.step_jobs import step_jobs
from protrain_compile.step_shape import StepShape
from protrain_compile.time_bounds import TimeBounds
from protrain_compile.timeline import simulate_jobs


def halves_and_step(shape: StepShape, profile: Profile, choice: Choice) -> tuple[float, float, bool]:
    """Return the bound, the simulated time, and whether the simulated steps repeat."""
    rates = rates_of(shape, profile)
    jobs = step_jobs(shape, profile, choice, lower(shape, choice))
    found = simulate_jobs(jobs, rates)
    bound = TimeBounds(shape, profile, rates).halves_ms(choice.residency, choice.buffers, choice.policies)
    repeats = found.ends[jobs.last_compute] == pytest.approx(found.step_ms)  # differences of long sums of times
    return bound, found.step_ms, repeats


def any_case(draw: random.Random) -> tuple[StepShape, Profile, Choice]:
    """Return a step of any proportion, its persistent chunks in front or anywhere, on any machine."""
    stack = random_stack(draw, draw.randint(1, 12))
    shape, profile = stack.shape(), stack.profile(**random_hardware(draw))
    policies: Any = tuple(draw.choice(POLICIES) for _ in shape.block_names)
    choice = prefix(shape, draw.randint(0, len(shape.chunks)), "k" * stack.blocks, draw.randint(3, 6))
    if draw.random() < 0.3:
        residency: Any = tuple(draw.choice(("persistent", "offloaded", "split")) for _ in shape.chunks)
        choice = dataclasses.replace(choice, residency=residency)
    return shape, profile, dataclasses.replace(choice, policies=policies)


@pytest.mark.parametrize("seed", range(8))
def test_no_step_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    found = [halves_and_step(*any_case(draw)) for _ in range(25)]
    assert sum(bound > 0 for bound, _, _ in found) > 12
    assert all(bound <= step_ms * (1 + 1e-9) for bound, step_ms, repeats in found if repeats)


@pytest.mark.parametrize("clips", [False, True])
def test_close_where_copies_bind(clips: bool) -> None:
    """What copies and updates take in turn is nearly the whole step; the bound without halves is far below."""
    stack = Stack(blocks=12, forward_ms=0.5, backward_ms=1.0, clips=clips)
    shape, profile = stack.shape(), stack.profile(both=42.0, beside=20.0, beside_copies=4.0)
    choice = prefix(shape, 2, "r" * 12, 4)
    bound, step_ms, _ = halves_and_step(shape, profile, choice)
    assert 0.97 * step_ms < bound <= step_ms
    shared = TimeBounds(shape, profile, rates_of(shape, profile)).shared_ms(choice.residency, 4, choice.policies)
    assert shared < 0.95 * bound


def test_swapped_values_leave_in_either_half() -> None:
    """They make a step longer, in whichever half they leave."""
    stack = Stack(blocks=12, saved_mb=400, forward_ms=0.5, backward_ms=1.0, clips=True)
    shape, profile = stack.shape(), stack.profile(both=42.0, beside=20.0, beside_copies=4.0)
    kept, swapped = (prefix(shape, 2, letters * 3, 4) for letters in ("rrrr", "srrr"))
    assert halves_and_step(shape, profile, swapped)[0] > halves_and_step(shape, profile, kept)[0]


def test_no_halves() -> None:
    """Where the last gradient is not that of the first chunk which is fetched, or all stay on the device."""
    stack = Stack(blocks=4)
    shape, profile = stack.shape(), stack.profile()
    chunks = list(shape.chunks)
    chunks[1], chunks[2] = (
        dataclasses.replace(chunks[i], last_gradient=chunks[j].last_gradient) for i, j in ((1, 2), (2, 1))
    )
    crossed = dataclasses.replace(shape, chunks=tuple(chunks))
    assert halves_and_step(shape, profile, prefix(shape, 1, "kkkk"))[0] > 0
    assert halves_and_step(crossed, profile, prefix(shape, 1, "kkkk"))[0] == 0
    assert halves_and_step(shape, profile, prefix(shape, 6, "kkkk"))[0] == 0
