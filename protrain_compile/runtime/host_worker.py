"""The host worker: one thread that runs updates on host chunks, in the order in which they were submitted.

A job may name an event (the arrival of its gradient); the worker waits for it, not the launching thread. Each job has a
ticket, a growing number: a job is done when the worker's count has reached its ticket. A job that fails does not stop the
count, so that nothing waits for ever; its error is raised by ``check``, which ``step()`` calls.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from protrain_compile.errors import ProtrainError
from protrain_compile.updates.definition import Segment
from protrain_compile.updates.formats import ChunkStates
from protrain_compile.updates.host import HostUpdater, make_host_updater


class Waitable(Protocol):
    """Something that the worker can wait for."""

    def synchronize(self) -> None:
        """Block until it has happened."""
        ...


class HostUpdateError(ProtrainError, RuntimeError):
    """A host update failed; the cause says why. The parameters of that chunk may be partly updated."""


Job = Callable[[], None]


class HostWorker:
    """Runs host jobs on a thread of its own."""

    def __init__(self, updater: HostUpdater | None = None) -> None:
        self.updater = updater if updater is not None else make_host_updater()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._submitted = 0
        self._state = _Progress()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, self._state), name="protrain-host-updates", daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, self._jobs, self._thread)

    def update(
        self, states: ChunkStates, gradient: torch.Tensor, segments: Sequence[Segment], after: Waitable | None = None
    ) -> int:
        """Submit an update of one chunk; return its ticket."""
        return self._submit(after, lambda: self.updater.update(states, gradient, segments))

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, after: Waitable | None = None) -> int:
        """Submit ``total += gradient``; return its ticket."""
        return self._submit(after, lambda: self.updater.accumulate(total, gradient))

    def convert(self, target: torch.Tensor, source: torch.Tensor, after: Waitable | None = None) -> int:
        """Submit ``target = source``; return its ticket."""
        return self._submit(after, lambda: self.updater.convert(target, source))

    def _submit(self, after: Waitable | None, run: Job) -> int:
        def job() -> None:
            if after is not None:
                after.synchronize()
            run()

        self._submitted += 1
        self._jobs.put(job)
        return self._submitted

    def is_done(self, ticket: int) -> bool:
        """Whether the job with ``ticket`` has run."""
        return self._state.done >= ticket

    def wait(self, ticket: int) -> None:
        """Block the calling thread until the job with ``ticket`` has run."""
        if not self.is_done(ticket):
            with self._state.changed:
                self._state.changed.wait_for(lambda: self._state.done >= ticket)

    def drain(self) -> None:
        """Block until every submitted job has run."""
        self.wait(self._submitted)

    def make_stream_wait(self, ticket: int, stream: Any) -> None:
        """Make a device stream wait for a job."""
        self.wait(ticket)

    def check(self) -> None:
        """Raise the first error of a job since the last check.

        Raises:
            HostUpdateError: With the job's error as its cause.
        """
        error, self._state.error = self._state.error, None
        if error is not None:
            raise HostUpdateError(f"a host update failed: {error}") from error

    def close(self) -> None:
        """Run what was submitted, then end the thread; may be called again."""
        self._stop()
        self.updater.close()


class _Progress:
    """What the thread shares with its owner."""

    def __init__(self) -> None:
        self.done = 0
        self.error: BaseException | None = None
        self.changed = threading.Condition()


def _work(jobs: queue.SimpleQueue[Job | None], state: _Progress) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:
            if state.error is None:
                state.error = error
        del job
        with state.changed:
            state.done += 1
            state.changed.notify_all()


def _stop(jobs: queue.SimpleQueue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
