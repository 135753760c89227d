"""Residency: the only owner of chunk buffers, and the executor of a schedule's operations on chunks.

Data flow of an offloaded chunk in one step::

    host parameters --prefetch (h2d)--> buffer --views--> artefacts                       forward, backward
    gradients --collect (compute)--> the same buffer --offload (d2h)--> landing           end of its backward
    landing --update (host worker)--> host parameters, states                             in_backward
    landing --> accumulator ... step() --update (host worker)--> host parameters, states  at_step

What orders them: a buffer is filled only behind its last reader (``read``) and behind the departure of gradients
(``left``); artefacts read it behind its ``arrival``; a chunk is fetched only behind its own update, and updated only
behind fetches for a forward that came between its backward and ``step()`` (``fetched``); a landing is filled only
behind the job that emptied it. Host jobs run in order, so a job is named by a ticket. Nothing here blocks the calling
thread except on the CPU, where every operation is done when it returns. ``passes.effects`` says the same as a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from protrain_compile.chunks import Chunk, ChunkLayout
from protrain_compile.runtime.chunk_store import ChunkStore
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.runtime.streams import Event, Streams
from protrain_compile.updates.definition import Segment
from protrain_compile.updates.device import DeviceUpdater

UpdateMode = Literal["in_backward", "at_step"]
SegmentsOf = Callable[[int, Sequence[int], float], list[Segment]]
"""Returns the segments of an update: chunk, slots, gradient multiplier. Counts the step of each slot's parameter."""


@dataclasses.dataclass
class Counters:
    """What happened since the counters were last reset.

    Attributes:
        fetched_bytes: Bytes copied to the device.
        offloaded_bytes: Bytes copied from the device.
        misses: Chunks that ``wait`` had to fetch because the contract at entry did not hold.
    """

    fetched_bytes: int = 0
    offloaded_bytes: int = 0
    misses: int = 0


class Buffer:
    """A chunk buffer: device bytes, whose parameters they hold, and the events that guard them."""

    def __init__(self, size_bytes: int, streams: Streams) -> None:
        self.bytes = torch.empty(size_bytes, dtype=torch.uint8, device=streams.device)
        self.holder: int | None = None
        self.arrival = streams.event()
        self.read = streams.event()
        self.left = streams.event()


class ChunkResidency:
    """Carries out the operations on the chunks of one prepared model (see ``ops.ChunkOperations``)."""

    def __init__(
        self,
        store: ChunkStore,
        streams: Streams,
        worker: HostWorker,
        buffers: int,
        segments_of: SegmentsOf,
        *,
        measures_norms: bool,
        layout: ChunkLayout | None = None,
    ) -> None:
        """Allocate the chunk buffers.

        Args:
            store: Where the chunks lie.
            streams: The device's streams.
            worker: Runs the updates of host chunks.
            buffers: How many standard chunk buffers.
            segments_of: Says how a chunk is updated.
            measures_norms: Whether the norm of each chunk's gradient is measured in the backward (for clipping).
            layout: The whole chunks, where the store holds shards of them; by default the store's own.
        """
        self.store = store
        self.streams = streams
        self.worker = worker
        self.counters = Counters()
        self.mode: UpdateMode = "at_step"
        self.pending: dict[int, set[int]] = {}
        self.updated: dict[int, set[int]] = {}
        self._segments_of = segments_of
        self._added_up = False
        self._device_updater = DeviceUpdater(streams.device)
        self.layout = layout = layout or store.spec.layout
        moving = [chunk.size_bytes for chunk in layout.chunks if self._moves(chunk)]
        count = buffers if moving else 0
        self._buffers = {number: Buffer(max(moving), streams) for number in range(count)}
        for chunk in layout.chunks:
            if store.spec.residency[chunk.index] == "split":
                self._buffers[buffers + chunk.index] = Buffer(chunk.size_bytes, streams)
        self._views: dict[tuple[int, int | None, tuple[int, ...]], tuple[torch.Tensor, ...]] = {}
        self._ticket = dict.fromkeys(range(len(layout.chunks)), 0)
        self._turn = 0
        self._landing_ticket = dict.fromkeys(range(len(store.landings)), 0)
        self._landed: dict[int, tuple[int, torch.Tensor, Event]] = {}
        self._fetched: dict[int, Event] = {}
        self.norms = torch.zeros(len(layout.chunks), device=streams.device) if measures_norms else None

    # ---- operations of a schedule ----------------------------------------------------------------------------

    def bind(self, chunk: int, slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """See :meth:`protrain_compile.ops.ChunkOperations.bind`."""
        return self._views_of(chunk, None, slots)

    def gather(self, chunk: int, slots: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """See :meth:`protrain_compile.ops.ChunkOperations.gather`; blocks until the chunk's update has run."""
        self.settle(chunk)
        parameters = [self.layout.chunks[chunk].slots[slot].parameter for slot in slots]
        return tuple(self.store.read(parameter, dtype).to(self.streams.device) for parameter in parameters)

    def prefetch(self, chunk: int, buffer: int) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.prefetch`."""
        target = self._buffers[buffer]
        if target.holder != chunk:
            self._fetch(chunk, target)

    def wait(self, chunk: int, buffer: int, slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """See :meth:`protrain_compile.ops.ChunkOperations.wait`."""
        target = self._buffers[buffer]
        if target.holder != chunk:
            self.counters.misses += 1
            self.streams.record(target.read, "compute")
            self._fetch(chunk, target)
        self.streams.wait(target.arrival, "compute")
        return self._views_of(chunk, buffer, slots)

    def release(self, chunk: int, buffer: int) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.release`."""
        self.streams.record(self._buffers[buffer].read, "compute")

    def collect(self, chunk: int, buffer: int | None, slots: tuple[int, ...], gradients: list[Any]) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.collect`."""
        if buffer is None:
            flat, fresh = self.store.gradients[chunk], not self.pending.get(chunk)
        else:
            flat, fresh = self._claim(chunk, self._buffers[buffer]), True
        self._write_gradients(chunk, flat, slots, gradients, fresh=fresh)
        self._measure(chunk, flat)

    def offload(self, chunk: int, buffer: int) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.offload`."""
        source = self._buffers[buffer]
        self.streams.record(source.read, "compute")
        self.streams.wait(source.read, "d2h")
        if chunk in self.pending and chunk in self._landed and not self.store.spec.landings:
            self._move_to_accumulator(chunk)
        number, landing = self.store.landing(chunk, self._turn)
        self._turn += 1
        self.streams.wait_host(self.worker, self._landing_ticket[number], "d2h")
        self.streams.copy(landing, self._home_in(chunk, source), "d2h")
        self.streams.record(source.left, "d2h")
        self._landed[chunk] = (number, landing, self._mark("d2h"))
        self.counters.offloaded_bytes += landing.nbytes

    def update(self, chunk: int, slots: tuple[int, ...]) -> None:
        """See :meth:`protrain_compile.ops.ChunkOperations.update`."""
        waiting = self.pending.get(chunk, set())
        must_move = bool(self.store.spec.landings) or chunk in self.store.accumulators
        if chunk in self._landed and must_move and (self.mode == "at_step" or waiting):
            try:
                self._accumulate(chunk, first=not waiting)
            except BaseException:
                self._landed.pop(chunk, None)  # its landing goes to other chunks: this gradient is lost
                raise
        self.pending[chunk] = waiting.union(slots)
        if self.mode == "in_backward":
            self.apply(chunk, 1.0)

    # ---- updates -----------------------------------------------------------------------------------------------

    def begin_backward(self, mode: UpdateMode, *, last: bool) -> None:
        """Begin a backward.

        Args:
            mode: When its chunks are updated.
            last: Whether no other declared micro-batch of the step follows.
        """
        self.updated.clear()
        self.mode = mode

    def apply(self, chunk: int, multiplier: float) -> None:
        """Update a chunk with its waiting gradient times ``multiplier``; it waits no longer."""
        slots = sorted(self.pending.pop(chunk))
        segments = self._segments_of(chunk, slots, multiplier)
        self.updated.setdefault(chunk, set()).update(slots)
        states = self.store.states[chunk]
        if chunk in self.store.gradients:
            self._device_updater.update(states, self.store.gradients[chunk], segments)
            return
        fetched = self._fetched.pop(chunk, None)
        if chunk in self._landed:
            number, landing, arrived = self._landed.pop(chunk)
            if fetched is not None:
                self.streams.wait(fetched, "d2h")
                arrived = self._mark("d2h")
            ticket = self.worker.update(states, landing, segments, after=arrived)
            self._landing_ticket[number] = ticket
        else:
            ticket = self.worker.update(states, self.store.accumulators[chunk], segments, after=fetched)
        self._ticket[chunk] = ticket
        for buffer in self._buffers.values():
            if buffer.holder == chunk:
                buffer.holder = None

    def drop_pending(self) -> None:
        """Forget the gradients that wait."""
        self.worker.drain()
        self.pending.clear()
        self._landed.clear()
        self._fetched.clear()

    def forget(self, chunk: int, slot: int) -> None:
        """Drop the waiting gradient of one parameter."""
        place = self.store.spec.layout.chunks[chunk].slots[slot]
        self.waiting_gradient(chunk)[place.offset : place.offset + place.numel].zero_()
        self.pending[chunk].discard(slot)
        if not self.pending[chunk]:
            del self.pending[chunk]
            self._landed.pop(chunk, None)

    def wait_from_zero(self, chunk: int, slot: int) -> None:
        """Let a gradient of zeros wait for one parameter that has none waiting."""
        if chunk not in self.pending and chunk not in self.store.gradients:
            self.store.accumulator(chunk)
        flat = self.waiting_gradient(chunk)
        place = self.store.spec.layout.chunks[chunk].slots[slot]
        # With nothing waiting, all of it is left over from an earlier step.
        part = flat[place.offset : place.offset + place.numel] if chunk in self.pending else flat
        part.zero_()
        self.pending.setdefault(chunk, set()).add(slot)
        self._added_up = True

    def leave_gradient(self, chunk: int) -> None:
        """Leave the memory of a gradient that waits no longer to its holders."""
        self.worker.drain()
        self.store.renew_gradient(chunk)

    def release_accumulators(self) -> None:
        """Give the memory of gradients that waited back."""
        if self.store.accumulators:
            self.worker.drain()
            self.store.drop_accumulators()

    def gradient_norm(self, *, exact: bool) -> float:
        """Return the norm of all waiting gradients.

        The norms that ``collect`` measured serve where no gradient was added to another since (nor, with ``exact``,
        changed by the user); else the gradients themselves are read.
        """
        assert self.norms is not None
        chunks = sorted(self.pending)
        if not self._added_up and not exact:
            return float(torch.linalg.vector_norm(self.norms[chunks]))
        total = 0.0
        for chunk in chunks:
            flat = self.waiting_gradient(chunk)
            if flat.device.type == "cpu":
                total += self.worker.updater.square_sum(flat)
            else:
                total += float(torch.linalg.vector_norm(flat, dtype=torch.float32)) ** 2
        self._added_up = False
        return float(total**0.5)

    def settle(self, chunk: int) -> None:
        """Block until a chunk's home holds its newest parameters."""
        if chunk in self.store.gradients:
            return
        self.worker.wait(self._ticket[chunk])

    def written(self, chunk: int) -> None:
        """Note that a chunk's home was written from outside: buffers that hold it are stale."""
        for buffer in self._buffers.values():
            if buffer.holder == chunk:
                buffer.holder = None

    def waiting_gradient(self, chunk: int) -> torch.Tensor:
        """Return the flat gradient that waits for ``step()``: on the device, or on the host once it has arrived."""
        if chunk in self.store.gradients:
            return self.store.gradients[chunk]
        if chunk in self._landed:
            _, landing, arrived = self._landed[chunk]
            arrived.synchronize()
            return landing
        self.worker.drain()
        return self.store.accumulators[chunk]

    def widen(self, chunk: int) -> None:
        """Move a gradient that waits in its landing to the accumulator, where gradients have their full type."""
        if chunk in self._landed:
            self._accumulate(chunk, first=chunk not in self.store.accumulators)

    def close(self) -> None:
        """End the worker and free what the residency holds."""
        self.worker.close()
        self.streams.synchronize()
        self._views.clear()
        self._buffers.clear()
        self._landed.clear()
        self.store.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _moves(self, chunk: Chunk) -> bool:
        """Whether a chunk or its gradient takes a chunk buffer of standard size."""
        return self.store.spec.residency[chunk.index] == "offloaded"

    def _fetch(self, chunk: int, target: Buffer) -> None:
        self.streams.wait(target.read, "h2d")
        self.streams.wait(target.left, "h2d")
        self.streams.wait_host(self.worker, self._ticket[chunk], "h2d")
        source = self.store.parameters[chunk]
        target.holder = None
        self.streams.copy(self._home_in(chunk, target), source, "h2d")
        self.streams.record(target.arrival, "h2d")
        if chunk in self.pending:
            self._fetched[chunk] = self._mark("h2d")
        target.holder = chunk
        self.counters.fetched_bytes += source.nbytes

    def _mark(self, stream: str) -> Event:
        """Return an event of its own: the worker may not have waited for an earlier one yet."""
        event = self.streams.event()
        self.streams.record(event, stream)
        return event

    def _claim(self, chunk: int, target: Buffer) -> torch.Tensor:
        """Return a buffer for gradients on the compute stream; whatever parameters it holds are lost."""
        self.streams.wait(target.arrival, "compute")
        self.streams.wait(target.left, "compute")
        target.holder = None
        return self._flat(chunk, target)

    def _write_gradients(
        self, chunk: int, flat: torch.Tensor, slots: tuple[int, ...], gradients: list[Any], *, fresh: bool
    ) -> None:
        """Write gradients into a flat one, or add them to it."""
        places = [self.layout.chunks[chunk].slots[i] for i in slots]
        views = [flat[s.offset : s.offset + s.numel].view(s.shape) for s in places]
        if fresh:
            flat.zero_()
            torch._foreach_copy_(views, gradients)
        else:
            torch._foreach_add_(views, gradients)
            self._added_up = True

    def _measure(self, chunk: int, flat: torch.Tensor) -> None:
        if self.norms is not None:
            torch.linalg.vector_norm(flat, dtype=torch.float32, out=self.norms[chunk])

    def _flat(self, chunk: int, buffer: Buffer) -> torch.Tensor:
        layout = self.layout.chunks[chunk]
        return buffer.bytes[: layout.size_bytes].view(layout.dtype)

    def _home_in(self, chunk: int, buffer: Buffer) -> torch.Tensor:
        """Return the part of a buffer that crosses the link: all of the chunk."""
        return self._flat(chunk, buffer)

    def _resident(self, chunk: int) -> torch.Tensor:
        """Return the parameters of a chunk that stays on the device."""
        return self.store.parameters[chunk]

    def _views_of(self, chunk: int, buffer: int | None, slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        key = (chunk, buffer, slots)
        if key not in self._views:
            flat = self._resident(chunk) if buffer is None else self._flat(chunk, self._buffers[buffer])
            places = [self.layout.chunks[chunk].slots[i] for i in slots]
            self._views[key] = tuple(flat[s.offset : s.offset + s.numel].view(s.shape) for s in places)
        return self._views[key]

    def _accumulate(self, chunk: int, *, first: bool) -> None:
        """Empty a chunk's landing into its accumulator."""
        total = self.store.accumulator(chunk)
        number, landing, arrived = self._landed.pop(chunk)
        self._added_up = True
        move = self.worker.convert if first else self.worker.accumulate
        self._landing_ticket[number] = move(total, landing, after=arrived)

    def _move_to_accumulator(self, chunk: int) -> None:
        """Make room in a chunk's own landing for a second gradient before ``step()``."""
        first = chunk not in self.store.accumulators
        self._accumulate(chunk, first=first)
