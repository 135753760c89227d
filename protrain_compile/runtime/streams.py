"""Streams and events of one device: ``compute`` (the caller's current stream), ``h2d``, ``d2h``, ``gather``.

On a CUDA device the two copy streams let copies overlap compute; a copy waits on the device, never in the launching
thread. On the CPU every operation is done when it returns, so the same calls are right and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from protrain_compile.runtime.host_worker import HostWorker


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has reached the point."""
        ...


class Streams(Protocol):
    """What the residency asks of a device."""

    device: torch.device

    def event(self) -> Event:
        """Return a new event; waiting on it before it is recorded returns at once."""
        ...

    def record(self, event: Event, stream: str) -> None:
        """Let ``event`` mark what ``stream`` was given so far."""
        ...

    def wait(self, event: Event, stream: str) -> None:
        """Make ``stream`` wait for ``event``."""
        ...

    def wait_host(self, worker: HostWorker, ticket: int, stream: str) -> None:
        """Make ``stream`` wait for a job of the host worker."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        """Copy on ``stream``."""
        ...

    def run(self, call: Callable[[], None], stream: str) -> None:
        """Run ``call``, which launches work on the current stream, with ``stream`` as that."""
        ...

    def synchronize(self) -> None:
        """Block until every stream is idle."""
        ...


class CpuEvent:
    """An event of a device whose operations are done when they return."""

    def synchronize(self) -> None:
        """Return."""


class CpuStreams:
    """The CPU as a device: copies are done when they return."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def event(self) -> Event:
        """See :meth:`Streams.event`."""
        return CpuEvent()

    def record(self, event: Event, stream: str) -> None:
        """See :meth:`Streams.record`."""

    def wait(self, event: Event, stream: str) -> None:
        """See :meth:`Streams.wait`."""

    def wait_host(self, worker: HostWorker, ticket: int, stream: str) -> None:
        """See :meth:`Streams.wait_host`."""
        worker.wait(ticket)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        """See :meth:`Streams.copy`."""
        target.copy_(source)

    def run(self, call: Callable[[], None], stream: str) -> None:
        """See :meth:`Streams.run`."""
        call()

    def synchronize(self) -> None:
        """See :meth:`Streams.synchronize`."""


class CudaStreams:
    """A CUDA device with one stream for each direction of the link, and one for collectives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: dict[str, torch.cuda.Stream] = {
            name: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for name in ("h2d", "d2h", "gather")
        }

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self._side.get(name) or torch.cuda.current_stream(self.device)

    def event(self) -> Event:
        """See :meth:`Streams.event`; a thread that synchronizes on it sleeps instead of spinning."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def record(self, event: Event, stream: str) -> None:
        """See :meth:`Streams.record`."""
        assert isinstance(event, torch.cuda.Event)
        event.record(self._stream(stream))

    def wait(self, event: Event, stream: str) -> None:
        """See :meth:`Streams.wait`."""
        assert isinstance(event, torch.cuda.Event)
        self._stream(stream).wait_event(event)

    def wait_host(self, worker: HostWorker, ticket: int, stream: str) -> None:
        """See :meth:`Streams.wait_host`; the calling thread waits only where the worker has no flag for the device."""
        if not worker.is_done(ticket):
            worker.make_stream_wait(ticket, self._stream(stream))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        """See :meth:`Streams.copy`."""
        with torch.cuda.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def run(self, call: Callable[[], None], stream: str) -> None:
        """See :meth:`Streams.run`."""
        with torch.cuda.stream(self._stream(stream)):
            call()

    def synchronize(self) -> None:
        """See :meth:`Streams.synchronize`."""
        torch.cuda.synchronize(self.device)


def make_streams(device: torch.device) -> Streams:
    """Return the streams of ``device``."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
