"""The residency of one rank of several: chunks are whole only while in use, gradients only until they are reduced.

Data flow of an offloaded chunk in one step (a persistent one has its shards on the device, not in host and landing)::

    host shard --prefetch (h2d)--> its place in a buffer --all_gather (gather)--> views --> artefacts
    gradients --collect--> the buffer --reduce_scatter (gather)--> shard of the mean --offload (d2h)--> landing

What orders them, beyond what orders a residency of one rank: a gather waits for its shard (``arrival``, or the update
of a chunk on the device) and artefacts wait for the gather; a reduce waits for ``collect``, and whatever uses the shard
of the mean (offload, update, norm) waits for the reduce. Every rank issues the same collectives in the same order:
whether one runs depends only on what ran before, which is the same on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from protrain_compile.chunks import Chunk
from protrain_compile.residency import Buffer, ChunkResidency, SegmentsOf, UpdateMode
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.runtime.sharded_store import ShardedStore
from protrain_compile.runtime.streams import Streams
from protrain_compile.updates.definition import Segment


class ShardedResidency(ChunkResidency):
    """Carries out the operations on chunks that ranks share (see ``ops.RankOperations``)."""

    store: ShardedStore

    def __init__(
        self,
        store: ShardedStore,
        streams: Streams,
        worker: HostWorker,
        buffers: int,
        segments_of: SegmentsOf,
        *,
        measures_norms: bool,
    ) -> None:
        """Allocate the chunk buffers; arguments as of :class:`ChunkResidency`."""
        self._sharding = store.division.sharding
        layout = store.division.layout
        super().__init__(
            store,
            streams,
            worker,
            buffers,
            functools.partial(_filled_segments, segments_of),
            measures_norms=measures_norms,
            layout=layout,
        )
        self.ranks = store.ranks
        self._reduces = True
        self._shards: dict[Buffer, int] = {}
        self._stale = set(store.whole_parameters)
        self._unreduced: set[int] = set()
        self._summed: set[int] = set()
        self._gathered = {chunk: streams.event() for chunk in store.whole_parameters}
        self._collected = {chunk: streams.event() for chunk in store.whole_gradients}
        self._reduced = {chunk.index: streams.event() for chunk in layout.chunks if chunk.trainable}
        self._updated = {
            chunk: streams.event() for chunk, kind in enumerate(store.spec.residency) if kind == "persistent"
        }
        first = [layout.parameters[chunk.slots[0].parameter].name for chunk in layout.chunks]
        self._names = [f"chunk {index} ({name} and what follows)" for index, name in enumerate(first)]

    # ---- operations of a schedule ----------------------------------------------------------------------------

    def bind(self, chunk: int, slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """See :meth:`protrain_compile.ops.ChunkOperations.bind`."""
        if chunk in self._stale:
            self.counters.misses += 1
            self.all_gather(chunk, None)
        self.streams.wait(self._gathered[chunk], "compute")
        return super().bind(chunk, slots)

    def prefetch(self, chunk: int, buffer: int) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.prefetch`: of this rank's shard."""
        target = self._buffers[buffer]
        if target.holder != chunk:
            self._fetch_shard(chunk, target)

    def all_gather(self, chunk: int, buffer: int | None) -> None:
        """See :meth:`protrain_compile.ops.RankOperations.all_gather`; nothing to do where the chunk is whole."""
        if buffer is None:
            if chunk in self._stale:
                self.streams.wait(self._updated[chunk], "gather")
                self._gather(chunk, self.store.whole_parameters[chunk])
                self.streams.record(self._gathered[chunk], "gather")
                self._stale.discard(chunk)
            return
        target = self._buffers[buffer]
        if target.holder == chunk:
            return
        if self._shards.get(target) != chunk:
            self._fetch_shard(chunk, target)
        self._gather_in(chunk, target)

    def collect(self, chunk: int, buffer: int | None, slots: tuple[int, ...], gradients: list[Any]) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.collect`: this rank's gradients."""
        if buffer is None:
            self.streams.wait(self._reduced[chunk], "compute")
            flat, fresh = self.store.whole_gradients[chunk], chunk not in self._unreduced
        else:
            flat, fresh = self._claim(chunk, self._buffers[buffer]), True
        self._write_gradients(chunk, flat, slots, gradients, fresh=fresh)

    def reduce_scatter(self, chunk: int, buffer: int | None) -> None:
        """See :meth:`protrain_compile.ops.RankOperations.reduce_scatter`.

        Whole gradients on the device wait for the last micro-batch, or for ``complete``.
        """
        if buffer is None:
            self._unreduced.add(chunk)
            if self._reduces:
                self._reduce_whole(chunk)
            return
        source = self._buffers[buffer]
        self.streams.record(source.read, "compute")
        self.streams.wait(source.read, "gather")
        self._reduce(chunk, self._flat(chunk, source))
        self.streams.record(source.left, "gather")

    def offload(self, chunk: int, buffer: int) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.offload`: of the shard of the mean."""
        self.streams.wait(self._reduced[chunk], "d2h")
        super().offload(chunk, buffer)

    # ---- updates -----------------------------------------------------------------------------------------------

    def begin_backward(self, mode: UpdateMode, *, last: bool) -> None:
        """See :meth:`ChunkResidency.begin_backward`."""
        super().begin_backward(mode, last=last)
        self._reduces = last

    def complete(self) -> None:
        """Reduce the gradients that were kept whole."""
        for chunk in sorted(self._unreduced):
            self._reduce_whole(chunk)

    def apply(self, chunk: int, multiplier: float) -> None:
        """See :meth:`ChunkResidency.apply`: this rank's shard."""
        if chunk not in self._updated:
            super().apply(chunk, multiplier)
            return
        self.streams.wait(self._reduced[chunk], "compute")
        super().apply(chunk, multiplier)
        self._summed.discard(chunk)
        self.written(chunk)

    def drop_pending(self) -> None:
        """See :meth:`ChunkResidency.drop_pending`."""
        super().drop_pending()
        self._unreduced.clear()
        self._summed.clear()

    def wait_from_zero(self, chunk: int, slot: int) -> None:
        """See :meth:`ChunkResidency.wait_from_zero`."""
        super().wait_from_zero(chunk, slot)
        if chunk in self.store.gradients:
            self._summed.add(chunk)

    def gradient_norm(self, *, exact: bool) -> float:
        """See :meth:`ChunkResidency.gradient_norm`; of all ranks' shards, so the same on every rank."""
        for chunk in self.pending:
            self.streams.wait(self._reduced[chunk], "compute")
        own = super().gradient_norm(exact=exact)
        return float(self.ranks.total(own**2, "the norm of all gradients") ** 0.5)

    def written(self, chunk: int) -> None:
        """See :meth:`ChunkResidency.written`; gathers wait for writes on the device, on the compute stream."""
        super().written(chunk)
        if chunk in self._updated:
            self.streams.record(self._updated[chunk], "compute")
        if chunk in self.store.whole_parameters:
            self._stale.add(chunk)

    def waiting_gradient(self, chunk: int) -> torch.Tensor:
        """See :meth:`ChunkResidency.waiting_gradient`: this rank's shard of the mean."""
        if chunk in self._unreduced:
            self._reduce_whole(chunk)
        self.streams.wait(self._reduced[chunk], "compute")
        return super().waiting_gradient(chunk)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _moves(self, chunk: Chunk) -> bool:
        residency, sharding = self.store.spec.residency[chunk.index], self._sharding[chunk.index]
        in_buffer = sharding == "parameters" or (sharding == "gradients" and chunk.trainable)
        return residency == "offloaded" or (residency == "persistent" and in_buffer)

    def _fetch(self, chunk: int, target: Buffer) -> None:
        """Bring a whole chunk that no node brought."""
        self._fetch_shard(chunk, target)
        self._gather_in(chunk, target)

    def _fetch_shard(self, chunk: int, target: Buffer) -> None:
        if chunk in self._updated:
            for event in (target.read, target.left, self._updated[chunk]):
                self.streams.wait(event, "gather")
            self.streams.copy(self._home_in(chunk, target), self.store.parameters[chunk], "gather")
            self.streams.record(target.arrival, "gather")
        else:
            super()._fetch(chunk, target)
        target.holder = None
        self._shards[target] = chunk

    def _gather_in(self, chunk: int, target: Buffer) -> None:
        del self._shards[target]  # first: a gather that raises leaves what nobody knows
        self.streams.wait(target.arrival, "gather")
        self._gather(chunk, self._flat(chunk, target))
        self.streams.record(target.arrival, "gather")
        target.holder = chunk

    def _gather(self, chunk: int, flat: torch.Tensor) -> None:
        self.streams.run(functools.partial(self.ranks.all_gather, flat, self._names[chunk]), "gather")

    def _reduce_whole(self, chunk: int) -> None:
        self.streams.record(self._collected[chunk], "compute")
        self.streams.wait(self._collected[chunk], "gather")
        self._reduce(chunk, self.store.whole_gradients[chunk])
        self._unreduced.discard(chunk)

    def _reduce(self, chunk: int, flat: torch.Tensor) -> None:
        """Reduce a whole gradient; of a chunk on the device, add the shard of the mean to what waits."""
        fresh = chunk not in self._summed
        self._added_up = self._added_up or not fresh
        self.streams.run(functools.partial(self._reduce_now, chunk, flat, fresh=fresh), "gather")
        self.streams.record(self._reduced[chunk], "gather")
        if chunk in self.store.gradients:
            self._summed.add(chunk)

    def _reduce_now(self, chunk: int, flat: torch.Tensor, *, fresh: bool) -> None:
        self.ranks.reduce_scatter(flat, self._names[chunk])
        own, total = self.ranks.shard(flat), self.store.gradients.get(chunk)
        if total is not None and fresh:
            total.copy_(own)
        elif total is not None:
            total.add_(own)
        self._measure(chunk, own)

    def _home_in(self, chunk: int, buffer: Buffer) -> torch.Tensor:
        return self.ranks.shard(self._flat(chunk, buffer))

    def _resident(self, chunk: int) -> torch.Tensor:
        return self.store.whole_parameters[chunk]


def _filled_segments(segments_of: SegmentsOf, chunk: int, slots: Sequence[int], multiplier: float) -> list[Segment]:
    """Return the segments of an update that have elements on this rank."""
    return [each for each in segments_of(chunk, slots, multiplier) if each.begin < each.end]
