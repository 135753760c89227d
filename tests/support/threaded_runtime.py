"""What takes the place of a runtime's streams and host worker on a ``ThreadedDevice``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from support.threaded import Event, Op, Stream, ThreadedDevice, poison
from torch import Tensor

from protrain_compile.runtime.host_worker import HostWorker

JOBS_KEPT = 1_000
"""Jobs of a host worker whose operations are remembered: those of the last steps, which somebody may wait for."""

FRESH = {"h2d": "allocated", "compute": "reloaded", "d2h": "fetched", "gather": ""}
"""What the events stand for that the runtime makes as it goes, by the stream that waits for them."""


class ThreadedStreams:
    """See :class:`protrain_compile.runtime.streams.Streams`.

    A copy's target is filled with NaN from when the copy may begin until it is done; a chunk buffer from when its
    gradients have left.

    Attributes:
        buffers: Addresses of the chunk buffers.
    """

    def __init__(self, device: ThreadedDevice) -> None:
        self.device = torch.device("cpu")
        self._threaded = device
        self._side: dict[str, Stream] = {}
        self.buffers: set[int] = set()

    def _stream(self, name: str) -> Stream:
        if name == "compute":
            return self._threaded.compute
        if name not in self._side:
            self._side[name] = self._threaded.stream(name)
        return self._side[name]

    def event(self) -> Event:
        """See :meth:`Streams.event`."""
        return Event(self._threaded)

    def record(self, event: Event, stream: str) -> None:
        """See :meth:`Streams.record`."""
        self._threaded.record(event, self._stream(stream))

    def wait(self, event: Event, stream: str) -> None:
        """See :meth:`Streams.wait`."""
        source = event.mark.stream if event.mark else "nothing"
        kind = event.kind or FRESH[stream]
        self._threaded.wait(event.mark, self._stream(stream), f"{stream} waits for {source}", kind)

    def wait_host(self, worker: HostWorker, ticket: int, stream: str) -> None:
        """See :meth:`Streams.wait_host`."""
        what, kind = f"{stream} waits for a host update", "updated" if stream == "h2d" else "emptied"
        if isinstance(worker, ScheduledWorker):
            self._threaded.wait(worker.op(ticket), self._stream(stream), what, kind)
        else:
            self._threaded.wait(None, self._stream(stream), what, kind, lambda: worker.is_done(ticket))

    def copy(self, target: Tensor, source: Tensor, stream: str) -> None:
        """See :meth:`Streams.copy`."""
        queue = self._stream(stream)
        self._threaded.submit(queue, lambda: poison(target), f"begin a copy on {stream}")
        self._threaded.submit(queue, lambda: target.data.copy_(source), f"copy on {stream}")
        if stream == "d2h" and source.untyped_storage().data_ptr() in self.buffers:
            self._threaded.submit(queue, lambda: poison(source), "free a buffer")

    def run(self, call: Callable[[], None], stream: str) -> None:
        """See :meth:`Streams.run`."""
        self._threaded.submit(self._stream(stream), call, f"run on {stream}")

    def synchronize(self) -> None:
        """See :meth:`Streams.synchronize`."""
        self._threaded.synchronize()


class ScheduledWorker(HostWorker):
    """A host worker whose jobs begin when the scheduler says so; what a job has used up is filled with NaN.

    Args:
        device: Whose scheduler.
        arguments: As of the host worker; its driver knows the events of ``gates``.
        gates: Makes what a job waits for: it has ``happen`` and looks like an event to the worker.
    """

    def __init__(self, device: ThreadedDevice, gates: Callable[[], Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._threaded = device
        self._gates = gates
        self._stream = device.stream("host")
        self._ops: dict[int, Op] = {}
        weakref.finalize(self, _finish, device, self._stream).atexit = False

    def update(self, states: Any, gradient: Tensor, segments: Any, after: Any = None) -> int:
        """See :meth:`HostWorker.update`."""
        gate = self._gates()
        return self._begin(super().update(states, gradient, segments, gate), gate, after, gradient)

    def accumulate(self, total: Tensor, gradient: Tensor, after: Any = None) -> int:
        """See :meth:`HostWorker.accumulate`."""
        gate = self._gates()
        return self._begin(super().accumulate(total, gradient, gate), gate, after, gradient)

    def convert(self, target: Tensor, source: Tensor, after: Any = None) -> int:
        """See :meth:`HostWorker.convert`."""
        gate = self._gates()
        return self._begin(super().convert(target, source, gate), gate, after, source)

    def _begin(self, ticket: int, gate: Any, after: Any, used: Tensor) -> int:
        jobs = self._jobs

        def run() -> None:
            gate.happen()
            jobs.wait(ticket)
            poison(used)

        if after is not None:
            source = after.mark.stream
            kind = "fetched" if source.startswith("h2d") else "landed"
            self._threaded.wait(after.mark, self._stream, f"host waits for {source}", kind)
        self._ops.pop(ticket - JOBS_KEPT, None)
        self._ops[ticket] = self._threaded.submit(self._stream, run, "job")
        return ticket

    def op(self, ticket: int) -> Op | None:
        """Return the operation that runs a job; None if that was done long ago."""
        return self._ops.get(ticket)

    def is_done(self, ticket: int) -> bool:
        """See :meth:`HostWorker.is_done`."""
        op = self._ops.get(ticket)
        return super().is_done(ticket) if op is None else op.done

    def wait(self, ticket: int) -> None:
        """See :meth:`HostWorker.wait`."""
        op = self._ops.get(ticket)
        if op is not None and os.getpid() == self._threaded.owner:
            self._threaded.finish(op)
        super().wait(ticket)

    def drain(self) -> None:
        """See :meth:`HostWorker.drain`."""
        self.wait(self._jobs.submitted)

    def close(self) -> None:
        """See :meth:`HostWorker.close`."""
        _finish(self._threaded, self._stream)
        super().close()


def _finish(device: ThreadedDevice, stream: Stream) -> None:
    if os.getpid() == device.owner:
        device.drain(stream)
