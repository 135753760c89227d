"""The shape of a step as one of several ranks has it.

The search and the simulation know ranks by this alone: a chunk's states, gradient and host bytes become one rank's
shard, and ``sharding`` says what else is divided while the chunk is persistent (see ``shards``). A world of one rank
has its shape unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protrain_compile.chunks import Residency
from protrain_compile.plan import Plan
from protrain_compile.shards import Sharding
from protrain_compile.step_shape import ChunkShape, StepShape


def divided(shape: StepShape, sharding: Sequence[Sharding]) -> StepShape:
    """Return the step of one rank of ``shape.world``.

    Args:
        shape: The step with whole chunks.
        sharding: What of each chunk is divided where it is persistent.
    """
    ranks = shape.world.ranks
    if shape.world.size == 1 or not shape.chunks:
        return shape
    chunks = tuple(_shard(chunk, ranks, each) for chunk, each in zip(shape.chunks, sharding, strict=True))
    return dataclasses.replace(shape, chunks=chunks)


def _shard(chunk: ChunkShape, ranks: int, sharding: Sharding) -> ChunkShape:
    assert chunk.sharding is None, "divided twice"
    return dataclasses.replace(
        chunk,
        numel=chunk.numel // ranks,
        companion_bytes=chunk.companion_bytes // ranks,
        moment_bytes=chunk.moment_bytes // ranks,
        gradient_bytes=chunk.gradient_bytes // ranks,
        accumulator_bytes=chunk.accumulator_bytes // ranks,
        ranks=ranks,
        sharding=sharding,
    )


def divided_by(shape: StepShape, plan: Plan, residency: Sequence[Residency]) -> StepShape:
    """Return the step of one rank under a plan; where the plan says nothing, with the least communication.

    Raises:
        PlanError: If the plan's sharding does not fit the chunks or their residency.
    """
    if shape.world.size == 1 or not shape.chunks or shape.chunks[0].sharding is not None:
        return shape
    return divided(shape, plan.fit_sharding(residency) or (sharding_levels(shape)[0],) * len(shape.chunks))


def sharding_choices(shape: StepShape, given: Plan | None) -> list[tuple[Sharding, ...]]:
    """Return what may be divided of every chunk, as far as a plan leaves it open; empty for one rank."""
    count = len(shape.chunks)
    if given is not None and given.sharding is not None and sharding_levels(shape):
        return [given.sharding]
    wanted = None if given is None else given.uniform_sharding
    return [(level,) * count for level in sharding_levels(shape) if wanted in (None, level)] or (
        [(wanted,) * count] if wanted is not None and shape.world.size > 1 else []
    )


MIXED_SHARES = (0.25, 0.5, 0.75)
"""Of all chunks, how many hold whole parameters in the mixes that are tried."""


def sharding_mixes(shape: StepShape, given: Plan | None) -> list[tuple[Sharding, ...]]:
    """Return mixes of whole and divided parameters, the least communication first; empty where a plan says what to do.

    Chunks with whole parameters are spread evenly: they are not gathered right before their use, which leaves the
    gathers of the others more time.
    """
    count = len(shape.chunks)
    is_open = given is None or (given.sharding is None and given.uniform_sharding is None)
    if not is_open or not sharding_levels(shape):
        return []
    wholes = sorted({round(count * share) for share in MIXED_SHARES} - {0, count}, reverse=True)
    return [tuple(_spread(i, whole, count) for i in range(count)) for whole in wholes]


def _spread(index: int, whole: int, count: int) -> Sharding:
    return "gradients" if (index + 1) * whole // count > index * whole // count else "parameters"


def sharding_levels(shape: StepShape) -> tuple[Sharding, ...]:
    """Return what all chunks of a step may have divided, the least communication first; none for one rank.

    Whole gradients on the device serve micro-batches only: they let all but the last one do without communication.
    """
    if shape.world.size == 1 or not shape.chunks:
        return ()
    levels: tuple[Sharding, ...] = ("gradients", "parameters")
    return ("states", *levels) if shape.micro_batches > 1 else levels
