"""The host worker: runs updates on host chunks behind the caller's back, in the order in which they were submitted.

A job may name an event (the arrival of its gradient); the worker waits for it, not the launching thread. Each job
has a ticket, a growing number: a job is done when the worker's count has reached its ticket. A job that fails does not
stop the count, so that nothing waits for ever; its error is raised by ``check``, which ``step()`` calls.

=================  ===========================================  ============================================
jobs run on        the library's dispatcher (``job_queue.py``)  a Python thread, where no C compiler exists
a stream waits by  reading a flag in host memory                the calling thread's waiting in its place
=================  ===========================================  ============================================

Why not always a Python thread: the launching thread may hold the GIL in a call that waits for the device (an
allocation that reaches cudaMalloc), which waits for a stream, which waits for a job, which a Python thread could not
run without the GIL. The dispatcher needs no GIL to run a job, to wait for its event, or to set the flag.

No wait can close a circle: what a job depends on was launched before the job was submitted, and a stream is made to
wait for a job only after that. Host functions in streams (``cuLaunchHostFunc``) do not serve as waits: the driver may
run them one at a time, so that one which waits for a later job can hold up another that waits for an earlier one, on
whose stream the later job depends.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from protrain_compile.errors import ProtrainError
from protrain_compile.runtime.cuda_driver import NOT_SUPPORTED, CudaDriver, CudaDriverError, load_driver
from protrain_compile.runtime.host_memory import HostMemory
from protrain_compile.updates import job_queue
from protrain_compile.updates.definition import Segment
from protrain_compile.updates.formats import ChunkStates
from protrain_compile.updates.host import HostUpdater, NativeUpdater, check_pair, check_update, make_host_updater
from protrain_compile.updates.job_queue import DeviceCalls, NativeQueue, Operation

log = logging.getLogger(__name__)


class Waitable(Protocol):
    """Something that happens: a recorded ``torch.cuda.Event`` or, of other devices, what has happened already."""

    def synchronize(self) -> None:
        """Block until it has happened."""
        ...


class HostUpdateError(ProtrainError, RuntimeError):
    """A host update failed; the cause says why. The parameters of that chunk may be partly updated."""


class HostWorker:
    """Runs host jobs in order.

    Args:
        updater: Executes them; closed with the worker. Direct calls of it may run between jobs.
        driver: Returns the driver of the device whose events and streams take part.

    Attributes:
        updater: The updater.
    """

    def __init__(self, updater: HostUpdater | None = None, *, driver: Callable[[], CudaDriver] = load_driver) -> None:
        self.updater = updater if updater is not None else make_host_updater()
        native = isinstance(self.updater, NativeUpdater)
        self._jobs: _Jobs = _NativeJobs(self.updater, driver) if native else _ThreadJobs(self.updater)

    def update(
        self, states: ChunkStates, gradient: torch.Tensor, segments: Sequence[Segment], after: Waitable | None = None
    ) -> int:
        """Submit an update of one chunk; return its ticket. ``after`` has been recorded and is not recorded again."""
        return self._jobs.update(states, gradient, segments, after)

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, after: Waitable | None = None) -> int:
        """Submit ``total += gradient``; return its ticket."""
        return self._jobs.array(Operation.ACCUMULATE, total, gradient, after)

    def convert(self, target: torch.Tensor, source: torch.Tensor, after: Waitable | None = None) -> int:
        """Submit ``target = source``; return its ticket."""
        return self._jobs.array(Operation.CONVERT, target, source, after)

    def is_done(self, ticket: int) -> bool:
        """Whether the job with ``ticket`` has run."""
        return self._jobs.done >= ticket

    def wait(self, ticket: int) -> None:
        """Block the calling thread until the job with ``ticket`` has run."""
        self._jobs.wait(ticket)

    def drain(self) -> None:
        """Block until every submitted job has run."""
        self._jobs.wait(self._jobs.submitted)

    def make_stream_wait(self, ticket: int, stream: Any) -> None:
        """Make a device stream wait for a job; the caller waits instead where there is no native queue or no flag.

        Args:
            ticket: The job's.
            stream: A ``torch.cuda.Stream``; for anything else the caller waits.
        """
        self._jobs.make_stream_wait(ticket, stream)

    def check(self) -> None:
        """Raise the first error of a job since the last check.

        Raises:
            HostUpdateError: With the job's error as its cause.
        """
        error = self._jobs.take_error()
        if error is not None:
            raise HostUpdateError(
                f"a host update failed: {error}. Its chunk may hold old or partly updated parameters, every other "
                "chunk is whole; all can be read and saved"
            ) from error

    def close(self) -> None:
        """Run what was submitted, then end the worker; may be called again.

        A job whose event never happens is abandoned after a while.
        """
        self._jobs.close()
        self.updater.close()


class _Jobs(Protocol):
    """Submits, runs and counts jobs."""

    @property
    def submitted(self) -> int: ...
    @property
    def done(self) -> int: ...
    def update(
        self, states: ChunkStates, gradient: torch.Tensor, segments: Sequence[Segment], after: Waitable | None
    ) -> int: ...
    def array(
        self, operation: Operation, target: torch.Tensor, source: torch.Tensor, after: Waitable | None
    ) -> int: ...
    def wait(self, ticket: int) -> None: ...
    def make_stream_wait(self, ticket: int, stream: Any) -> None: ...
    def take_error(self) -> BaseException | None: ...
    def close(self) -> None: ...


# ---- on the library's dispatcher -----------------------------------------------------------------------------------


class _NativeJobs:
    """Jobs on a native queue."""

    def __init__(self, updater: HostUpdater, driver: Callable[[], CudaDriver]) -> None:
        assert isinstance(updater, NativeUpdater)
        self._queue = NativeQueue(updater)
        self._driver = driver
        self._device: _DeviceSide | None = None
        self._turn = threading.Lock()

    @property
    def submitted(self) -> int:
        return self._queue.submitted

    @property
    def done(self) -> int:
        return self._queue.done

    def update(
        self, states: ChunkStates, gradient: torch.Tensor, segments: Sequence[Segment], after: Waitable | None
    ) -> int:
        return self._queue.update(states, gradient, segments, self._event(after), after)

    def array(self, operation: Operation, target: torch.Tensor, source: torch.Tensor, after: Waitable | None) -> int:
        return self._queue.array(operation, target, source, self._event(after), after)

    def _event(self, after: Any) -> int:
        """Return the handle of what to wait for; 0 if it has happened, which only a device's event has not."""
        if after is None:
            return 0
        handle: int | None = getattr(after, "cuda_event", None)
        if handle is None:
            after.synchronize()
        elif handle:  # torch creates the event when it is first recorded
            self._device_side(after.device)
        return handle or 0

    def _device_side(self, device: torch.device) -> _DeviceSide:
        with self._turn:
            if self._device is None:
                self._device = _DeviceSide(self._queue, self._driver(), device)
        assert self._device.device == device, f"a host worker of {self._device.device} was given work of {device}"
        return self._device

    def wait(self, ticket: int) -> None:
        self._queue.wait(ticket)

    def make_stream_wait(self, ticket: int, stream: Any) -> None:
        if self._queue.done >= ticket:
            return
        on_device = hasattr(stream, "cuda_stream")
        if not on_device or not self._device_side(stream.device).make_stream_wait(ticket, stream.cuda_stream):
            self.wait(ticket)

    def take_error(self) -> BaseException | None:
        failure = self._queue.take_failure()
        if failure is None:
            return None
        assert self._device is not None
        cause = self._device.error(failure.stage, failure.code)
        error = RuntimeError(f"job {failure.ticket} ({failure.operation.name.lower()}) did not run: {cause}")
        error.__cause__ = cause
        return error

    def close(self) -> None:
        self._queue.end()


class _DeviceSide:
    """What lets one CUDA device and a native queue wait for each other.

    The flag is a page of its own that is never given back: a stream may look at it after the worker's end.
    """

    def __init__(self, queue: NativeQueue, driver: CudaDriver, device: torch.device) -> None:
        self.device = device
        self._driver = driver
        self._context = driver.primary_context(device.index)
        slab = HostMemory(threads=1, huge_pages=False).allocate(mmap.PAGESIZE, "the flag of host updates")
        page = slab.tensor(0, 1, torch.int32)
        job_queue.keep_for_ever(page)
        self._flag: int | None = None
        try:
            self._flag = driver.map_host_memory(self._context, page.data_ptr(), mmap.PAGESIZE)
        except CudaDriverError as error:
            self._give_up_flag(error)
        self._stages = ("cuCtxSetCurrent", "cuEventSynchronize")
        queue.attach(DeviceCalls(self._context, *map(driver.address, self._stages)), page.data_ptr())

    def make_stream_wait(self, ticket: int, stream: int) -> bool:
        """Make a stream wait for a job; False if the device cannot."""
        if self._flag is None:
            return False
        try:
            self._driver.make_stream_wait(self._context, stream, self._flag, ticket)
        except CudaDriverError as error:
            if error.code != NOT_SUPPORTED:
                raise
            self._give_up_flag(error)
            return False
        return True

    def error(self, stage: int, code: int) -> CudaDriverError:
        """Return the error for a failure of the queue."""
        return self._driver.error(self._stages[stage], code)

    def _give_up_flag(self, error: CudaDriverError) -> None:
        log.warning("the launching thread waits for host updates, as streams cannot: %s", error)
        self._flag = None


# ---- on a Python thread --------------------------------------------------------------------------------------------

Job = Callable[[], None]


class _ThreadJobs:
    """Jobs on a thread of their own, for updaters that are Python code."""

    def __init__(self, updater: HostUpdater) -> None:
        self._updater = updater
        self._pending: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._state = _Progress()
        thread = threading.Thread(
            target=_work, args=(self._pending, self._state), name="protrain-host-updates", daemon=True
        )
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._pending, thread, self._state)

    @property
    def submitted(self) -> int:
        return self._state.submitted

    @property
    def done(self) -> int:
        return self._state.done

    def update(
        self, states: ChunkStates, gradient: torch.Tensor, segments: Sequence[Segment], after: Waitable | None
    ) -> int:
        check_update(states, gradient, segments)
        return self._submit(after, functools.partial(self._updater.update, states, gradient, segments))

    def array(self, operation: Operation, target: torch.Tensor, source: torch.Tensor, after: Waitable | None) -> int:
        check_pair(target, source)
        run = self._updater.accumulate if operation is Operation.ACCUMULATE else self._updater.convert
        return self._submit(after, functools.partial(run, target, source))

    def _submit(self, after: Waitable | None, run: Job) -> int:
        def job() -> None:
            if after is not None:
                after.synchronize()
            run()

        self._state.check_process()
        if not self._stop.alive:
            raise RuntimeError("the queue of host updates is closed")
        with self._turn:
            self._pending.put(job)
            self._state.submitted += 1
            return self._state.submitted

    def wait(self, ticket: int) -> None:
        assert ticket <= self.submitted, f"ticket {ticket} was not given out yet"
        if self.done >= ticket:
            return
        self._state.check_process()
        with self._state.changed:
            while not self._state.changed.wait_for(lambda: self.done >= ticket, job_queue.SLICE_S):
                if not self._stop.alive:
                    raise RuntimeError("the queue of host updates was stuck when it was closed")

    def make_stream_wait(self, ticket: int, stream: Any) -> None:
        self.wait(ticket)

    def take_error(self) -> BaseException | None:
        error, self._state.error = self._state.error, None
        return error

    def close(self) -> None:
        self._stop()


class _Progress:
    """What the thread shares with its owner."""

    def __init__(self) -> None:
        self.submitted = 0
        self.done = 0
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.owner = os.getpid()

    def check_process(self) -> None:
        """Raise in a forked child, which has no such thread."""
        if os.getpid() != self.owner:
            raise RuntimeError("this process was forked from the one that runs the host updates; it cannot use them")


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


def _stop(jobs: queue.SimpleQueue[Job | None], thread: threading.Thread, state: _Progress) -> None:
    if os.getpid() != state.owner:
        return
    jobs.put(None)

    def ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    if thread is not threading.current_thread():
        job_queue.wait_while_progressing(ended, lambda: state.done, job_queue.STALL_LIMIT_S)
