"""A CPU device with real streams: every stream is a thread, and a seed decides which of them runs next.

The CPU's own ``Streams`` finish every operation before they return, so that no wait is ever needed. Here operations are
queued, as on a GPU, and run on the threads of their streams, one at a time: a missing wait reads what is not there
yet, or what is gone already. Dead memory is filled with NaN, so that reading it shows.

::

    launching thread -- submit --> queue of each stream -- the scheduler's choice --> thread of the stream

The scheduler is the algorithm of probabilistic concurrency testing (Burckhardt et al., "A randomized scheduler with
probabilistic guarantees of finding bugs", ASPLOS 2010, section 3): the launching thread and every stream have random
priorities, the highest that can run does, and priorities change at random points. A seed reproduces an interleaving.

Each operation has a vector clock: which operations of every stream have certainly happened before it. A wait for what
the clock knows already orders nothing; tests that remove waits ask for that (``Wait.redundant``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("compute", "h2d", "d2h", "host")
PATIENCE_S = 120.0
"""How long to wait for a thread that is not scheduled here (a host worker that a test made itself)."""

RECORD = "record"
"""Name of operations that only mark a point."""

Clock = dict[str, int]


class DeadlockError(AssertionError):
    """Nothing can run, and something is waited for."""


@dataclasses.dataclass(eq=False)
class Op:
    """An operation in a stream's queue: what it does, what must be so before, and whether it is done.

    ``number`` is the place in the stream of the last operation up to it that does or waits for something.
    """

    name: str
    stream: str
    run: Callable[[], int] | None
    ready: Callable[[], bool]
    clock: Clock
    number: int
    done: bool = False

    def end(self) -> None:
        """Note that it is done; let go of what it used and waited for."""
        self.done, self.run, self.ready = True, None, _always


def _always() -> bool:
    return True


class Site(NamedTuple):
    """What identifies a wait in every step.

    Attributes:
        section: Which part of a step gave it: ``forward``, ``backward``, ``inference``, ``step`` or the empty string.
        operation: The number of the operation on chunks or swapped values in that section; -1 outside of one.
        kind: The kind of event, as ``passes.effects`` calls it.
    """

    section: str
    operation: int
    kind: str


@dataclasses.dataclass
class Wait:
    """A wait that a stream was given, or that was left out.

    Attributes:
        site: Where.
        what: Stream and meaning, for people.
        mark: What it waits for; None for what happened long ago.
        redundant: Of one left out: whether the stream's next operation comes after ``mark`` all the same.
    """

    site: Site
    what: str
    mark: Op | None
    redundant: bool = False


class Stream:
    """A queue of operations and the thread that runs them, and the clock of its last operation."""

    def __init__(self, index: int, name: str, kind: str) -> None:
        self.index = index
        self.name = name
        self.kind = kind
        self.queue: deque[Op] = deque()
        self.clock: Clock = {}
        self.count = 0
        self.last_number = 0
        self.left_out: list[Wait] = []


class Event:
    """A point in a stream; see :class:`protrain_compile.runtime.streams.Event`. ``kind`` is as in a ``Site``."""

    def __init__(self, device: ThreadedDevice) -> None:
        self._device = device
        self.kind = ""
        self.mark: Op | None = None

    def synchronize(self) -> None:
        """Block until the stream has reached the point."""
        mark = self.mark
        if mark is not None:
            self._device.finish(mark)


class ThreadedDevice:
    """All streams of one process, and their scheduler.

    Attributes:
        section: What the launching thread is in (see ``Site``).
        operations: By section and number: the name of each operation and its chunk, in its last run.
        records: Whether ``waits`` and ``ran`` are kept.
        waits: Every wait that was given or left out since ``reseed``.
        ran: Stream and operation, and the thread that ran it, in order, since ``reseed``.
        skip: The site whose waits are left out.
        drains: Whether the launching thread waits for the compute stream at the end of every section, as tests need
            that look at results at once.
    """

    def __init__(self, seed: int = 0, *, records: bool = False) -> None:
        self.owner = os.getpid()
        self.records = records
        self.section = ""
        self.skip: Site | None = None
        self.operations: dict[tuple[str, int], tuple[str, int | None]] = {}
        self._operation, self._count = -1, 0
        self.drains = True
        self._lock = threading.RLock()
        self._threads = {kind: ThreadPoolExecutor(1, thread_name_prefix=f"stream-{kind}") for kind in KINDS}
        for thread in self._threads.values():
            thread.submit(lambda: None).result()  # tests compare which threads there are
        self._numbers = itertools.count()
        self._streams: dict[str, Stream] = {}
        self._all: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._known: Clock = {}
        self._error: BaseException | None = None
        self.compute = self.stream("compute", "compute")
        self.reseed(seed)

    def reseed(self, seed: int | str) -> None:
        """Begin anew with another interleaving, once every stream is idle."""
        self.synchronize()
        self._known = {stream.name: stream.count for stream in self._all}
        for stream in self._all:
            stream.clock = dict(self._known)
        self._random = random.Random(seed)
        self._launcher_priority = self._random.random()
        self._priority: dict[str, float] = {}
        self._change = self._random.choice((0.0, 0.02, 0.2))
        self.waits: list[Wait] = []
        self.ran: list[tuple[str, int]] = []

    def stream(self, kind: str, name: str = "") -> Stream:
        """Return a new stream, run by the thread of its kind."""
        if kind not in self._threads:
            self._threads[kind] = ThreadPoolExecutor(1, thread_name_prefix=f"stream-{kind}")
        index = next(self._numbers)
        made = Stream(index, name or f"{kind} {index}", kind)
        with self._lock:
            # An empty queue of a stream that is gone is of no use; one in use comes back with its next operation.
            self._streams = {key: each for key, each in self._streams.items() if each.queue}
            self._streams[made.name] = made
            self._all.add(made)
        return made

    @contextmanager
    def launching(self, section: str) -> Iterator[None]:
        """Let operations of the compute stream lag behind the launching thread."""
        outer, self.section, self._count = self.section, section, 0
        try:
            yield
        finally:
            self.section = outer
            if self.drains and not outer:
                self.drain(self.compute)

    @contextmanager
    def operating(self, name: str, chunk: int | None) -> Iterator[None]:
        """Count an operation of the section, unless it is part of another one."""
        if self._operation >= 0:
            yield
            return
        self._operation, self._count = self._count, self._count + 1
        self.operations[self.section, self._operation] = (name, chunk)
        try:
            yield
        finally:
            self._operation = -1

    # ---- what streams are given --------------------------------------------------------------------------------

    def submit(
        self,
        stream: Stream,
        run: Callable[[], object],
        name: str,
        ready: Callable[[], bool] = _always,
        after: Op | None = None,
    ) -> Op:
        """Queue an operation; let the scheduler run what it likes to."""
        inference = torch.is_inference_mode_enabled()
        with self._lock:
            stream.count += 1
            stream.clock = _joined(stream.clock, self._known, after.clock if after else {})
            if not after:
                for wait in stream.left_out:
                    wait.redundant = wait.mark is None or _includes(stream.clock, wait.mark)
                stream.left_out.clear()
            stream.clock[stream.name] = stream.count
            if name != RECORD:
                stream.last_number = stream.count
            job = functools.partial(_run, run, inference)
            op = Op(name, stream.name, job, ready, stream.clock, stream.last_number)
            stream.queue.append(op)
            self._streams[stream.name] = stream
        self._point()
        if stream is self.compute and not self.section:
            self.drain(stream)
        return op

    def record(self, event: Event, stream: Stream) -> None:
        """Let ``event`` mark what ``stream`` was given so far."""
        event.mark = self.submit(stream, lambda: None, RECORD)

    def wait(
        self, mark: Op | None, stream: Stream, what: str, kind: str, ready: Callable[[], bool] | None = None
    ) -> None:
        """Make ``stream`` wait for an operation of another one, unless a test leaves this wait out."""
        wait = Wait(Site(self.section, self._operation, kind), what, mark)
        if self.records:
            self.waits.append(wait)
        if wait.site == self.skip:
            stream.left_out.append(wait)
            return
        if mark is not None:
            self.submit(stream, lambda: None, what, lambda: mark.done, after=mark)
        elif ready is not None:
            self.submit(stream, lambda: None, what, ready)

    # ---- what the launching thread waits for -------------------------------------------------------------------

    def finish(self, op: Op) -> None:
        """Block until ``op`` is done."""
        self.run_until(lambda: op.done, op.name)
        self._known = _joined(self._known, op.clock)

    def drain(self, stream: Stream) -> None:
        """Block until ``stream`` is idle."""
        self.run_until(lambda: not stream.queue, f"the end of {stream.name}")
        self._known = _joined(self._known, stream.clock)

    def synchronize(self) -> None:
        """Block until every stream is idle."""
        for stream in list(self._streams.values()):
            self.drain(stream)

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let streams run until ``condition`` holds; raise what an operation raised meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self._step(lowest=-1.0):
                deadline = time.monotonic() + PATIENCE_S
            elif time.monotonic() > deadline:
                raise DeadlockError(f"waiting for {what}, and nothing can run:\n{self}")
            elif not condition():
                time.sleep(0.001)  # somebody else's thread is at work
        self._raise()

    def __str__(self) -> str:
        """Return the heads of the queues."""
        return "\n".join(
            f"{stream.name}: {len(stream.queue)} queued, first {stream.queue[0].name}"
            for stream in self._streams.values()
            if stream.queue
        )

    # ---- the scheduler -----------------------------------------------------------------------------------------

    def _point(self) -> None:
        """Run streams that come before the launching thread."""
        while self._step(lowest=self._launcher_priority):
            pass
        self._raise()

    def _step(self, lowest: float) -> bool:
        """Run one operation of the first stream whose priority is above ``lowest``; return whether there was one."""
        with self._lock:
            if self._change and self._random.random() < self._change:
                self._shuffle()
            able = [s for s in self._streams.values() if s.queue and s.queue[0].ready()]
            able.sort(key=lambda s: s.index)  # whatever the order in which streams came into use: a seed is a seed
            able = [s for s in able if self._priority_of(s) > lowest]
            if not able:
                return False
            stream = max(able, key=self._priority_of)
            op = stream.queue[0]
            try:
                assert op.run is not None
                thread = self._threads[stream.kind].submit(op.run).result()
                if self.records:
                    self.ran.append((f"{stream.name}: {op.name}", thread))
            except Exception as error:
                self._error = self._error or error
            finally:
                stream.queue.popleft()
                op.end()
            return True

    def _priority_of(self, stream: Stream) -> float:
        return self._priority.setdefault(stream.name, self._random.random())

    def _shuffle(self) -> None:
        names = [None, *self._priority]
        name = self._random.choice(names)
        if name is None:
            self._launcher_priority = self._random.random()
        else:
            self._priority[name] = self._random.random()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _joined(*clocks: Clock) -> Clock:
    found: Clock = {}
    for clock in clocks:
        for name, count in clock.items():
            found[name] = max(count, found.get(name, 0))
    return found


def _includes(clock: Clock, op: Op) -> bool:
    return clock.get(op.stream, 0) >= op.number


def _run(run: Callable[[], object], inference: bool) -> int:
    """Run an operation on the thread of its stream; return which that is."""
    with torch.inference_mode(inference), torch.no_grad():
        run()
    return threading.get_ident()


def poison(tensor: Tensor) -> None:
    """Fill a dense tensor with bytes that are NaN in every floating type."""
    tensor.data.view(torch.uint8).fill_(0xFF)
