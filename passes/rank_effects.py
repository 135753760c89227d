"""Effects where ranks share chunks: one rank's view of the rows that differ from ``effects``.

Collectives run on stream ``gather``, and each rank moves and updates its shard only. What ranks do to each other's
memory is no part of this: a collective ends when all have come, and all issue the same (see ``schedule_digest``).

===================  ================================================  ===============================================
resource             what it is                                        holds
===================  ================================================  ===============================================
parameters c         a persistent chunk's parameters: this rank's      shard, or parameters once they are gathered
                     shard, or all of them where only states or
                     gradients are divided
buffer b             a chunk buffer                                    shard, then parameters; local gradients, then
                                                                       (a host chunk's) gradients: the shard of the mean
whole gradients c    gradients of a persistent chunk of which only     local gradients
                     states are divided
gradients c          a persistent chunk's shard of the mean            gradients
===================  ================================================  ===============================================

=============  =====================================================================================
event          recorded when
=============  =====================================================================================
arrival b      also: the chunk in buffer b has been gathered
left b         also: the gradients in buffer b have been reduced
written c      the last update of chunk c's shard on the device has run
gathered c     chunk c, whole on the device, has been gathered
collected c    the whole gradients of chunk c have been written
reduced c      the shard of the mean of chunk c's gradients is there
=============  =====================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from passes import effects
from passes.effects import (
    EFFECTS,
    Access,
    Call,
    Content,
    Effect,
    Event,
    Ledger,
    Resource,
    Step,
    Steps,
    buffered,
    gradients,
    home,
)
from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding
from protrain_compile.shards import Sharding


@dataclasses.dataclass
class RankLedger(Ledger):
    """What the launching thread of one rank knows; see the fields of ``ShardedResidency``.

    Attributes:
        sharding: Per chunk.
        last: Whether no other declared micro-batch of the step follows the backward that runs.
        shards: The chunk of which each buffer holds the shard only.
        stale: Chunks whole on the device that must be gathered before use.
        unreduced: Chunks whose whole gradients wait for the last micro-batch.
        summed: Chunks on the device whose shard of the mean waits for an update.
    """

    sharding: tuple[Sharding, ...] = ()
    last: bool = True
    shards: dict[int, int] = dataclasses.field(default_factory=dict)
    stale: set[int] = dataclasses.field(default_factory=set)
    unreduced: set[int] = dataclasses.field(default_factory=set)
    summed: set[int] = dataclasses.field(default_factory=set)

    def is_whole(self, chunk: int) -> bool:
        """Whether a chunk's parameters are whole on the device."""
        return self.on_device(chunk) and self.sharding[chunk] != "parameters"

    def optimizer_step(self) -> Steps:
        """See :meth:`Ledger.optimizer_step`: reduces that wait come first."""
        reduced = [step for chunk in sorted(self.unreduced) for step in _reduce_whole(chunk, self)]
        return (*reduced, *(step for chunk in sorted(self.pending) for step in _apply(chunk, self)))

    def written(self, chunk: int) -> tuple[Access, tuple[Event, ...]]:
        """See :meth:`Ledger.written`: of this rank's shard, which is to be gathered again."""
        self.forget(chunk)
        if self.is_whole(chunk):
            self.stale.add(chunk)
        return _shard(chunk), (Event("written", chunk),)


def ledger_of(chunks: ChunkBinding, landings: int) -> Ledger:
    """Return the ledger at the start; see ``Ledger.of``."""
    if chunks.sharding is None:
        return Ledger.of(chunks, landings)
    ledger = RankLedger.of(chunks, landings)
    ledger.sharding = chunks.sharding
    ledger.stale = {chunk for chunk in range(len(chunks.residency)) if ledger.is_whole(chunk)}
    return ledger


def table_of(chunks: ChunkBinding | None) -> Mapping[Callable[..., Any], Effect]:
    """Return the table for a model's chunks."""
    return EFFECTS if chunks is None or chunks.sharding is None else RANK_EFFECTS


# ---- rows ----------------------------------------------------------------------------------------------------------


def _shard(chunk: int) -> Access:
    return Access(Resource("parameters", chunk), Content("shard", chunk))


def _resident(chunk: int, ledger: RankLedger) -> Access:
    """Return what a persistent chunk's parameters are now."""
    gathered = ledger.is_whole(chunk) and chunk not in ledger.stale
    return effects.parameters(chunk) if gathered else _shard(chunk)


def _whole_gradients(chunk: int) -> Access:
    return Access(Resource("whole gradients", chunk), Content("local gradients", chunk))


def _reduced(chunk: int) -> Event:
    return Event("reduced", chunk)


def _of_rank(row: Callable[[Call, RankLedger], Steps]) -> Effect:
    def effect(call: Call, ledger: Ledger) -> Steps:
        assert isinstance(ledger, RankLedger)
        return row(call, ledger)

    return effect


def _fetch_shard(chunk: int, buffer: int, ledger: RankLedger) -> Steps:
    ledger.holder.pop(buffer, None)
    ledger.shards[buffer] = chunk
    free = (Event("read", buffer), Event("left", buffer))
    there, records = (buffered(buffer, "shard", chunk),), [Event("arrival", buffer)]
    if ledger.on_device(chunk):
        return (Step("gather", (*free, Event("written", chunk)), (_shard(chunk),), there, tuple(records)),)
    if chunk in ledger.pending:
        ledger.fetched.add(chunk)
        records.append(Event("fetched", chunk))
    return (Step("h2d", (*free, Event("updated", chunk)), (home(chunk),), there, tuple(records)),)


def _gather_in(chunk: int, buffer: int, ledger: RankLedger) -> Steps:
    del ledger.shards[buffer]
    ledger.holder[buffer] = chunk
    shard, whole = (buffered(buffer, kind, chunk) for kind in ("shard", "parameters"))
    arrival = (Event("arrival", buffer),)
    return (Step("gather", arrival, (shard,), (whole,), arrival),)


def _prefetch(call: Call, ledger: RankLedger) -> Steps:
    assert call.buffer is not None
    return () if ledger.holder.get(call.buffer) == call.chunk else _fetch_shard(call.chunk, call.buffer, ledger)


def _all_gather(call: Call, ledger: RankLedger) -> Steps:
    chunk, buffer = call.chunk, call.buffer
    if buffer is None:
        if chunk not in ledger.stale:
            return ()
        ledger.stale.remove(chunk)
        whole = effects.parameters(chunk)
        waits, records = (Event("written", chunk),), (Event("gathered", chunk),)
        return (Step("gather", waits, (_shard(chunk),), (whole,), records),)
    if ledger.holder.get(buffer) == chunk:
        return ()
    fetched = () if ledger.shards.get(buffer) == chunk else _fetch_shard(chunk, buffer, ledger)
    return (*fetched, *_gather_in(chunk, buffer, ledger))


def _bind(call: Call, ledger: RankLedger) -> Steps:
    repair: Steps = ()
    if call.chunk in ledger.stale:
        ledger.misses += 1
        repair = _all_gather(call, ledger)
    return (*repair, Step("compute", waits=(Event("gathered", call.chunk),)))


def _wait(call: Call, ledger: RankLedger) -> Steps:
    chunk, buffer = call.chunk, call.buffer
    assert buffer is not None
    repair: Steps = ()
    if ledger.holder.get(buffer) != chunk:
        ledger.misses += 1
        last_use = Step("compute", records=(Event("read", buffer),))
        repair = (last_use, *_fetch_shard(chunk, buffer, ledger), *_gather_in(chunk, buffer, ledger))
    return (*repair, Step("compute", waits=(Event("arrival", buffer),)))


def _gather(call: Call, ledger: RankLedger) -> Steps:
    """Exact values come from every rank, on the current stream."""
    if not ledger.on_device(call.chunk):
        return EFFECTS[ops.gather](call, ledger)
    made = () if call.result is None else (call.result,)
    return (Step("compute", reads=(_resident(call.chunk, ledger),), writes=made),)


def _collect(call: Call, ledger: RankLedger) -> Steps:
    chunk, buffer = call.chunk, call.buffer
    if buffer is None:
        before = (_whole_gradients(chunk),) if chunk in ledger.unreduced else ()
        return (Step("compute", (_reduced(chunk),), (*call.inputs, *before), (_whole_gradients(chunk),)),)
    (step,) = EFFECTS[ops.collect](call, ledger)
    return (dataclasses.replace(step, writes=(buffered(buffer, "local gradients", chunk),)),)


def _reduce_scatter(call: Call, ledger: RankLedger) -> Steps:
    chunk, buffer = call.chunk, call.buffer
    if buffer is None:
        ledger.unreduced.add(chunk)
        return _reduce_whole(chunk, ledger) if ledger.last else ()
    read, source = (Event("read", buffer),), buffered(buffer, "local gradients", chunk)
    *reduced, last = _reduce(chunk, read, source, ledger)
    last = dataclasses.replace(last, records=(*last.records, Event("left", buffer)))
    return (Step("compute", records=read), *reduced, last)


def _reduce_whole(chunk: int, ledger: RankLedger) -> Steps:
    ledger.unreduced.discard(chunk)
    collected = (Event("collected", chunk),)
    return (Step("compute", records=collected), *_reduce(chunk, collected, _whole_gradients(chunk), ledger))


def _reduce(chunk: int, waits: tuple[Event, ...], source: Access, ledger: RankLedger) -> Steps:
    """Reduce in place; of a chunk on the device, add the shard of the mean to what waits."""
    if not ledger.on_device(chunk):
        mean = Access(source.resource, Content("gradients", chunk))
        return (Step("gather", waits, (source,), (mean,), (_reduced(chunk),)),)
    mean = Access(source.resource, Content("mean", chunk))
    waiting = (gradients(chunk),) if chunk in ledger.summed else ()
    ledger.summed.add(chunk)
    add = Step("gather", reads=(mean, *waiting), writes=(gradients(chunk),), records=(_reduced(chunk),))
    return (Step("gather", waits, (source,), (mean,)), add)


def _offload(call: Call, ledger: RankLedger) -> Steps:
    *before, copy = EFFECTS[ops.offload](call, ledger)
    return (*before, dataclasses.replace(copy, waits=(_reduced(call.chunk), *copy.waits)))


def _update(call: Call, ledger: RankLedger) -> Steps:
    if not ledger.on_device(call.chunk):
        return EFFECTS[ops.update](call, ledger)
    ledger.pending.add(call.chunk)
    return _apply(call.chunk, ledger) if ledger.mode == "in_backward" else ()


def _apply(chunk: int, ledger: RankLedger) -> Steps:
    if not ledger.on_device(chunk):
        return effects.apply_update(chunk, ledger)
    ledger.pending.remove(chunk)
    ledger.summed.discard(chunk)
    reads = (gradients(chunk), _resident(chunk, ledger))
    shard, records = ledger.written(chunk)
    return (Step("compute", (_reduced(chunk),), reads, (shard,), records),)


RANK_EFFECTS: dict[Callable[..., Any], Effect] = {
    **EFFECTS,
    ops.bind: _of_rank(_bind),
    ops.gather: _of_rank(_gather),
    ops.prefetch: _of_rank(_prefetch),
    ops.wait: _of_rank(_wait),
    ops.collect: _of_rank(_collect),
    ops.offload: _of_rank(_offload),
    ops.update: _of_rank(_update),
    ops.all_gather: _of_rank(_all_gather),
    ops.reduce_scatter: _of_rank(_reduce_scatter),
}
"""What each named operation does where ranks share chunks."""
