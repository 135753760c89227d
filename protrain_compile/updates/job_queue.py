"""Jobs for the host kernel, run one after another by a thread of the library, which never takes the GIL.

::

    submit (any thread) -> first in, first out -> dispatcher: wait for the job's event, run it on the pool, announce it
                                                     |-> the count that `wait` waits for
                                                     '-> a flag in host memory that device streams wait on

A job's ticket is its number, from 1; it is done when the count has reached its ticket, also when it failed, so that
nothing waits for ever. A job whose event failed does not run. The dispatcher sleeps when there is nothing to do.

What a job reads and writes is kept alive until it is done. A dispatcher that makes no progress when the queue is ended
(its event never happens) is abandoned after ``STALL_LIMIT_S``, with what its jobs use. In a forked child there is no
dispatcher: submitting and waiting raise, and ending does nothing.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from protrain_compile.updates.definition import Segment
from protrain_compile.updates.formats import ChunkStates
from protrain_compile.updates.host import NativeUpdater, array_struct, update_struct

log = logging.getLogger(__name__)

STALL_LIMIT_S = 30.0
"""How long the end of a queue waits for one job: far longer than the update of a chunk, which takes under a second."""

SLICE_S = 0.1
"""How long a wait lasts in the library, where signals such as Ctrl-C are not noticed."""

_CLOSED = -1
_NO_MEMORY = -2
_FORKED = -3


class Operation(IntEnum):
    """What a job does; the numbers are shared with ``kernel.c``."""

    UPDATE = 0
    ACCUMULATE = 1
    CONVERT = 2


class Failure(NamedTuple):
    """A job that did not run: waiting for its event failed with ``code``.

    Attributes:
        ticket: The job's.
        operation: The job's.
        stage: 0 if the device's context could not be made current, 1 if the event failed.
        code: What the device's function returned.
    """

    ticket: int
    operation: Operation
    stage: int
    code: int


class DeviceCalls(NamedTuple):
    """How the dispatcher waits for a device's events: addresses of C functions that return 0 for success.

    Attributes:
        context: Argument of ``make_current``.
        make_current: ``int (*)(void *context)``, called before each wait; 0 for none.
        wait_for_event: ``int (*)(void *event)``.
    """

    context: int
    make_current: int
    wait_for_event: int


class NativeQueue:
    """Runs jobs of one updater in order, beside its direct calls; jobs may be submitted and awaited by any thread."""

    def __init__(self, updater: NativeUpdater) -> None:
        queue = updater.library.protrain_queue_create(updater.pool)
        if not queue:
            raise MemoryError("no memory or thread for the queue of host updates")
        self._library = updater.library
        self._queue = queue
        self._turn = threading.Lock()
        self._kept: deque[tuple[int, object]] = deque()
        weakref.finalize(self, self._library.protrain_queue_release, queue).atexit = False
        self._end = weakref.finalize(self, _end, self._library, queue, (self._kept, updater))

    def attach(self, calls: DeviceCalls, flag_address: int = 0) -> None:
        """Let jobs wait for events of a device and, through the flag, its streams for jobs.

        Args:
            calls: How to wait.
            flag_address: An int32 that the device reads, set to each ticket (its low 32 bits) in turn; 0 for none. It
                has to stay until the queue has ended and no stream waits on it.
        """
        self._library.protrain_queue_attach(self._queue, flag_address, *calls)

    def update(
        self, states: ChunkStates, gradient: Tensor, segments: Sequence[Segment], event: int = 0, keep: object = None
    ) -> int:
        """Submit an update; return its ticket.

        Args:
            states: See :meth:`HostUpdater.update`.
            gradient: See :meth:`HostUpdater.update`.
            segments: See :meth:`HostUpdater.update`.
            event: Handle of the event to wait for, which has been recorded; 0 for none.
            keep: Kept alive until the job is done; what the event's handle belongs to.
        """
        job, table = update_struct(states, gradient, segments)
        return self._submit("protrain_queue_update", (ctypes.byref(job), table, event), (states, gradient, keep))

    def array(self, operation: Operation, target: Tensor, source: Tensor, event: int = 0, keep: object = None) -> int:
        """Submit ACCUMULATE or CONVERT; return its ticket."""
        job = array_struct(target, source)
        return self._submit("protrain_queue_array", (int(operation), ctypes.byref(job), event), (target, source, keep))

    def _submit(self, function: str, arguments: tuple[object, ...], used: object) -> int:
        with self._turn:
            self._forget_done()
            self._kept.append((self.submitted + 1, used))  # first: from the call on, the dispatcher may use it
            ticket: int = getattr(self._library, function)(self._queue, *arguments)
            if ticket < 0:
                self._kept.pop()
        _check_ticket(ticket)
        return ticket

    def _forget_done(self) -> None:
        done = self.done
        while self._kept and self._kept[0][0] <= done:
            self._kept.popleft()

    @property
    def submitted(self) -> int:
        """The last ticket given out; 0 before the first."""
        return int(self._library.protrain_queue_submitted(self._queue))

    @property
    def done(self) -> int:
        """The last ticket whose job has run or failed."""
        return int(self._library.protrain_queue_done(self._queue))

    def wait(self, ticket: int) -> None:
        """Block the calling thread until the job with ``ticket`` is done; let go of what the done jobs used.

        Raises:
            RuntimeError: If it never will be: in a forked child, or after the end of a queue that was stuck.
        """
        assert ticket <= self.submitted, f"ticket {ticket} was not given out yet"
        while not (state := self._library.protrain_queue_wait(self._queue, ticket, int(SLICE_S * 1000))):
            if not self._end.alive:
                raise RuntimeError("the queue of host updates was stuck when it was closed")
        _check_ticket(state)
        with self._turn:
            self._forget_done()

    def take_failure(self) -> Failure | None:
        """Return the first failure since the last call."""
        taken = self._library.protrain_queue_take_failure(self._queue)
        if not taken.ticket:
            return None
        return Failure(taken.ticket, Operation(taken.operation), taken.stage, taken.code)

    def end(self) -> None:
        """Run what was submitted, then end the dispatcher, or abandon it if it is stuck; may be called again."""
        self._end()


def _check_ticket(ticket: int) -> None:
    if ticket == _FORKED:
        raise RuntimeError("this process was forked from the one that runs the host updates; it cannot use them")
    if ticket == _CLOSED:
        raise RuntimeError("the queue of host updates is closed")
    if ticket == _NO_MEMORY:
        raise MemoryError("no memory for a host update")


def _end(library: ctypes.CDLL, queue: int, used: tuple[deque[tuple[int, object]], NativeUpdater]) -> None:
    ended = False
    try:
        ended = wait_while_progressing(
            lambda seconds: bool(library.protrain_queue_end(queue, int(seconds * 1000))),
            lambda: int(library.protrain_queue_done(queue)),
            STALL_LIMIT_S,
        )
    finally:
        if ended:
            used[0].clear()
        else:
            keep_for_ever(used)


def wait_while_progressing(wait: Callable[[float], bool], progress: Callable[[], int], limit_s: float) -> bool:
    """Return whether ``wait`` (for so many seconds) succeeded before ``progress`` stood still for ``limit_s``."""
    reached, deadline = progress(), time.monotonic() + limit_s
    while not wait(min(SLICE_S, limit_s)):
        if progress() != reached:
            reached, deadline = progress(), time.monotonic() + limit_s
        elif time.monotonic() >= deadline:
            log.warning("host updates made no progress for %.0f s while they were being closed: abandoned", limit_s)
            return False
    return True


def keep_for_ever(thing: object) -> None:
    """Never free ``thing``: something that Python does not see may use it until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
