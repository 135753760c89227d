"""Peaks from parts that repeat are those of all values, followed through the operations."""

from __future__ import annotations

import dataclasses
import random

import pytest
from support.made_shapes import random_stack

from protrain_compile.chunks import Residency
from protrain_compile.lowering import Choice, skeleton
from protrain_compile.memory_model import find_peak
from protrain_compile.plan import POLICIES
from protrain_compile.profile import Profile
from protrain_compile.step_shape import StepShape
from protrain_compile.value_peaks import ValuePeaks


def drawn(draw: random.Random) -> tuple[StepShape, Profile]:
    """Return a step some of whose values would be swapped through a staging buffer."""
    stack = random_stack(draw, draw.randint(1, 12))
    shape = stack.shape()
    lives = tuple(
        dataclasses.replace(life, staged=draw.random() < 0.5, products_staged=draw.random() < 0.5)
        for life in shape.lives
    )
    return dataclasses.replace(shape, lives=lives), stack.profile()


@pytest.mark.parametrize("seed", range(8))
def test_any_policies(seed: int) -> None:
    draw = random.Random(seed)
    shape, profile = drawn(draw)
    resident: Residency = "persistent"
    residency = (resident,) * len(shape.chunks)
    without, peaks = (ValuePeaks(shape, profile, swaps=swaps) for swaps in (False, True))
    for _ in range(12):
        policies = tuple(draw.choice(POLICIES) for _ in shape.block_names)
        lowered = skeleton(shape, policies, residency)
        expected = find_peak(shape, profile, Choice(policies, residency, 3), lowered).bytes
        assert peaks.bytes_of(policies) == expected
        if not any(policy.startswith("swap") for policy in policies):
            assert without.bytes_of(policies) == expected
