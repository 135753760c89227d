"""Schedules of models whose chunks ranks share, without ranks."""

from __future__ import annotations

import dataclasses
import functools

from support.prepared import CHUNKS, Stack, batch, forced, prepared

import passes
import protrain_compile
from protrain_compile.schedule import Schedule
from protrain_compile.shards import allowed_sharding

RANKS = 4
TURNS = {"offloaded": ("offloaded",) * CHUNKS, "persistent": ("persistent",) * CHUNKS}
TURNS["mixed"] = tuple(("offloaded", "persistent", "split")[i % 3] for i in range(CHUNKS))


@functools.cache
def single_schedule() -> Schedule:
    """Return the schedule of a Stack of one rank; not to be changed."""
    trainee = prepared(Stack(), forced("offloaded"))
    trainee.called(batch())
    return protrain_compile.schedule(trainee.called).parts[0].schedule


@functools.cache
def shared_schedule(residency: str, sharding: str) -> Schedule:
    """Return the schedule of a Stack where four ranks share its chunks; not to be changed."""
    single = single_schedule()
    assert single.chunks is not None
    lives = TURNS[residency]
    chunks = dataclasses.replace(
        single.chunks,
        residency=lives,
        ranks=RANKS,
        sharding=tuple(allowed_sharding(each, sharding) for each in lives),  # type: ignore[arg-type]
    )
    schedule = Schedule(single.program, single.plan, single.artefacts, chunks=chunks)
    passes.schedule_pipeline().run(schedule)
    return schedule
