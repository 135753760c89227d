"""Shapes for planning: of small captured models, beside the graphs that the passes write, or made up."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.prepared import batch, forced, prepared
from torch import nn

import protrain_compile
from passes import schedule_pipeline
from protrain_compile import Plan
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.chunks import ChunkBinding
from protrain_compile.lowering import Choice, Op
from protrain_compile.plan import POLICIES, Loss
from protrain_compile.program import Program
from protrain_compile.rank_shape import divided
from protrain_compile.schedule import Schedule, operation_of
from protrain_compile.shape_reader import Training, step_shape
from protrain_compile.shards import SHARDINGS, Sharding, World, allowed_sharding
from protrain_compile.step_shape import StepShape


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured, prepared model and its shape."""

    program: Program
    binding: ChunkBinding
    shape: StepShape
    loss: Loss = "whole"

    def shared(self, sharding: Sequence[Sharding], ranks: int = 4) -> Captured:
        """Return the same model where ranks divide its chunks."""
        whole = dataclasses.replace(self.shape, world=World(ranks))
        binding = dataclasses.replace(self.binding, ranks=ranks, sharding=tuple(sharding))
        return dataclasses.replace(self, binding=binding, shape=divided(whole, sharding))

    def schedule(self, choice: Choice) -> Schedule:
        """Return what the passes write for ``choice``."""
        binding = dataclasses.replace(self.binding, residency=choice.residency, buffers=choice.buffers)
        if binding.sharding is not None:
            pairs = zip(choice.residency, binding.sharding, strict=True)
            binding = dataclasses.replace(binding, sharding=tuple(allowed_sharding(*each) for each in pairs))
        plan = Plan(policies=choice.policies, loss=self.loss).fit(self.program.block_names)
        schedule = Schedule(self.program, plan, ArtefactSet("eager"), chunks=binding)
        for each in schedule_pipeline().passes:  # without the verifier, which has tests of its own
            each.run(schedule)
        return schedule


def captured(
    model: nn.Module,
    data: Callable[[int], Any] = batch,
    chunk_bytes: int = 2_000,
    loss: Loss = "whole",
    **training: Any,
) -> Captured:
    """Prepare and run ``model`` once; ``training`` says how it trains."""
    trainee = prepared(model, forced(chunk_bytes=chunk_bytes), data=data)
    trainee.backward()
    schedule = protrain_compile.schedule(trainee.called).parts[0].schedule
    assert schedule.chunks is not None
    layout = schedule.chunks.layout
    moments = tuple(2 if chunk.trainable else 0 for chunk in layout.chunks)
    facts = Training(layout, schedule.chunks.place_of, moments, **training)
    return Captured(schedule.program, schedule.chunks, step_shape(schedule.program, facts, loss), loss)


def real_operations(schedule: Schedule, graph: str) -> list[Op]:
    """Return the operations of a schedule graph as ``lowering`` writes them."""
    found = []
    for node in schedule.graphs[graph].graph.nodes:
        operation = operation_of(node)
        if operation is not None:
            name: Any = node.target.__name__ if "layout" in node.meta else operation.op
            segment = operation.segment if operation.chunk < 0 and name != "snapshot" else -1
            buffer = node.kwargs.get("buffer")
            found.append(Op(name, segment, operation.chunk, -1 if buffer is None else buffer))
    return found


def random_choice(shape: StepShape, draw: random.Random) -> Choice:
    """Return a choice of any kind."""
    policies: Any = tuple(draw.choice(POLICIES) for _ in shape.block_names)
    kinds = draw.choice((("offloaded",), ("persistent", "offloaded"), ("persistent", "offloaded", "split")))
    residency: Any = tuple(draw.choice(kinds) for _ in shape.chunks)
    return Choice(policies, residency, draw.randint(3, 6))


def random_sharding(shape: StepShape, draw: random.Random) -> tuple[Sharding, ...]:
    """Return what ranks divide of each chunk."""
    kinds: Any = draw.choice((*((each,) for each in SHARDINGS), SHARDINGS))
    return tuple(draw.choice(kinds) for _ in shape.chunks)


def token_batch(seed: int) -> torch.Tensor:
    """Return tokens for the small decoders."""
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(seed))
