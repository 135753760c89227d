"""Lowered operations and their memory are those of the graphs that the passes write, for many plans and models."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import light, models
from support.made_shapes import plain_hardware
from support.prepared import Stack
from support.shapes import Captured, captured, random_choice, random_sharding, real_operations, token_batch
from torch import Tensor, nn

from protrain_compile import PlanError
from protrain_compile.liveness import schedule_liveness
from protrain_compile.lowering import Choice, Op, lower, skeleton
from protrain_compile.memory_model import find_peak, live_values
from protrain_compile.profile import ArtefactCost, Profile, TemplateProfile
from protrain_compile.roles import RECOMPUTES, ROLES
from protrain_compile.step_shape import StepShape
from protrain_compile.value_peaks import ValuePeaks

PLANS = 5


class OldValueBlock(light.Block):
    """Its backward needs the value that a buffer had before the forward changed it: a snapshot."""

    scale: Tensor

    def __init__(self, width: int = light.WIDTH, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.scale.sin())
        self.scale += 0.1
        return x


def old_values() -> nn.Module:
    model = light.GPT(3)
    model.blocks = nn.ModuleList(OldValueBlock() for _ in range(3))
    return model


def frozen() -> nn.Module:
    model = light.GPT(4)
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return model


def half() -> nn.Module:
    return light.GPT(3).to(torch.bfloat16)


CASES: dict[str, Callable[[], Captured]] = {
    "stack": lambda: captured(Stack(blocks=5)),
    "two blocks a chunk": lambda: captured(Stack(blocks=5), chunk_bytes=4_000),
    "tied": lambda: captured(light.GPT(3, tied=True), token_batch),
    "frozen": lambda: captured(frozen(), token_batch, chunk_bytes=1_500),
    "snapshots": lambda: captured(old_values(), token_batch),
    "bf16": lambda: captured(half(), token_batch),
    "sliced loss": lambda: captured(light.GPT(3, tied=True), token_batch, loss="sliced"),
    "llama": lambda: captured(models.Llama(3), lambda seed: models.tokens(seed=seed), chunk_bytes=8_000),
}


@functools.cache
def case(name: str) -> Captured:
    torch.manual_seed(0)
    return CASES[name]()


def as_graphs_see_it(shape: StepShape) -> StepShape:
    """Return the shape without what others hold beyond a graph's last use of it: tangents, and outputs."""
    held = ("tangent", "forward")
    lives = (dataclasses.replace(life, returned=life.returned and life.birth not in held) for life in shape.lives)
    return dataclasses.replace(shape, lives=tuple(lives))


@pytest.mark.parametrize("name", CASES)
def test_as_the_passes_write(name: str) -> None:
    draw = random.Random(name)
    for number in range(PLANS + 4):
        found = case(name)
        if number >= PLANS:
            found = found.shared(random_sharding(found.shape, draw))
        choice = random_choice(found.shape, draw)
        schedule, lowered = found.schedule(choice), lower(found.shape, choice)
        assert list(lowered.forward) == real_operations(schedule, "forward"), choice
        assert list(lowered.backward) == real_operations(schedule, "backward"), choice
        alive = schedule_liveness(schedule)
        lives = live_values(as_graphs_see_it(found.shape), choice, lowered, "size_bytes")
        for graph, live in zip(("forward", "backward"), lives, strict=True):
            expected = [each - alive[graph].held_bytes for each in alive[graph].live_bytes.values()]
            assert live[1:] == expected, (graph, choice)


def test_a_step_by_hand() -> None:
    """A stem, a block and a head, each with a chunk: the first persistent, the others through three buffers."""
    shape = case("stack").shape
    choice = Choice(("keep",) * 5, ("persistent",) + ("offloaded",) * 6, 3)
    lowered = lower(shape, choice)
    assert lowered.forward[:8] == (
        Op("prefetch", chunk=1, buffer=0),
        Op("prefetch", chunk=2, buffer=1),
        Op("prefetch", chunk=3, buffer=2),
        Op("bind", chunk=0),
        Op("forward", segment=0),
        Op("wait", chunk=1, buffer=0),
        Op("forward", segment=1),
        Op("release", chunk=1, buffer=0),
    )
    assert lowered.backward[-2:] == (Op("collect", chunk=0), Op("update", chunk=0))
    fetched = [op.chunk for op in lowered.backward if op.op == "prefetch"]
    assert fetched == [3, 2, 1], "the last three stay in the buffers between forward and backward"


def test_a_shape_as_json() -> None:
    shape = case("frozen").shape
    assert StepShape.from_json(shape.to_json()) == shape


def test_a_shape_does_not_grow_beyond_its_segments() -> None:
    """Storages of one life are one entry: simulating must stay fast for deep models."""
    shallow, deep = case("stack").shape, captured(Stack(blocks=9)).shape
    per_block = (len(deep.lives) - len(shallow.lives)) / 4
    assert per_block <= 8


def test_too_few_buffers() -> None:
    shape = case("stack").shape
    with pytest.raises(PlanError, match="buffers=0"):
        lower(shape, Choice(("keep",) * 5, ("offloaded",) * 7, 0))


@pytest.mark.parametrize("name", CASES)
def test_value_peaks_are_those_of_the_memory_model(name: str) -> None:
    """Whatever is recomputed: snapshots, frozen chunks and values that many segments share included."""
    shape, draw = case(name).shape, random.Random(name)
    costs = {role: ArtefactCost(1.0, draw.randrange(10**6)) for role in ROLES}
    templates = 1 + max(segment.template for segment in shape.segments)
    profile = Profile(plain_hardware(), (TemplateProfile(costs),) * templates)
    peaks = ValuePeaks(shape, profile)
    for _ in range(PLANS):
        policies: Any = tuple(draw.choice(("keep", *RECOMPUTES)) for _ in shape.block_names)
        resident: Any = ("persistent",) * len(shape.chunks)
        choice = Choice(policies, resident, 3)
        found = find_peak(shape, profile, choice, skeleton(shape, policies, resident))
        assert peaks.bytes_of(policies) == found.bytes
