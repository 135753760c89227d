"""Rates of the host-device link: each way alone, both ways at once, and both beside host updates.

On a CUDA device copies run on the two streams that training uses, from pinned memory; the rate of a direction is that
of its own copies, told by events. On the CPU, where a copy is a copy in memory and done when it returns, the two
directions take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory, layout_offsets
from protrain_compile.runtime.streams import make_streams

DIRECTIONS = ("h2d", "d2h")
COPIES = 4
UPDATES = 6
"""Updates that must have ended before a rate is told from when they did."""


class Rates(NamedTuple):
    """GB/s of both directions; 0 for one that was not used."""

    h2d: float
    d2h: float


class Link(Protocol):
    """What copies between the host and a device."""

    def rates(self, directions: tuple[str, ...]) -> Rates:
        """Return the rates of ``directions``, which copy at once."""
        ...


def measure_link(link: Link) -> tuple[Rates, Rates]:
    """Return the rates of each direction alone, and of both at once."""
    link.rates(DIRECTIONS)  # the first copies are slower
    return Rates(link.rates(("h2d",)).h2d, link.rates(("d2h",)).d2h), link.rates(DIRECTIONS)


def measure_beside(link: Link, update: Callable[[], object]) -> tuple[Rates, float]:
    """Return the rates of copies both ways beside ``update``, and its calls a second."""
    with repeated(update) as ends:
        beside = link.rates(DIRECTIONS)
        while len(ends) < UPDATES:  # copies that are done sooner are made again
            beside = link.rates(DIRECTIONS)
        return beside, (len(ends) - 1) / (ends[-1] - ends[0])


@contextmanager
def repeated(call: Callable[[], object]) -> Iterator[list[float]]:
    """Repeat ``call`` on another thread; the value lists when the calls ended, in seconds.

    An error of the call is raised at the end; the list is then filled up, so that nobody waits for more.
    """
    ends: list[float] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                call()
                ends.append(time.perf_counter())
        except BaseException as error:
            errors.append(error)
            ends.extend(float(i) for i in range(UPDATES))

    thread = threading.Thread(target=run, name="protrain-measured-updates")
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


class CpuLink:
    """Copies between two places in host memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pairs = {each: torch.zeros(2, size_bytes, dtype=torch.uint8) for each in DIRECTIONS}

    def rates(self, directions: tuple[str, ...]) -> Rates:
        """See :meth:`Link.rates`; directions take turns."""
        start = time.perf_counter()
        for _ in range(COPIES):
            for each in directions:
                self._pairs[each][0].copy_(self._pairs[each][1])
        seconds = time.perf_counter() - start
        rate = COPIES * self.size_bytes / max(seconds, 1e-9) / 1e9
        return Rates(*(rate if each in directions else 0.0 for each in DIRECTIONS))


class CudaLink:
    """Copies between pinned host memory and a CUDA device."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self._streams = make_streams(device)
        self._memory = HostMemory(CudaRegistrar())
        offsets, total = layout_offsets([size_bytes] * len(DIRECTIONS))
        slab = self._memory.allocate(total, "measuring the link")
        self._host = {d: slab.tensor(at, size_bytes, torch.uint8) for d, at in zip(DIRECTIONS, offsets, strict=True)}
        self._there = {d: torch.zeros(size_bytes, dtype=torch.uint8, device=device) for d in DIRECTIONS}

    def rates(self, directions: tuple[str, ...]) -> Rates:
        """See :meth:`Link.rates`."""
        torch.cuda.synchronize(self.device)
        marks = {each: self._copies(each) for each in directions}
        torch.cuda.synchronize(self.device)
        found = {each: COPIES * self.size_bytes / begin.elapsed_time(end) / 1e6 for each, (begin, end) in marks.items()}
        return Rates(*(found.get(each, 0.0) for each in DIRECTIONS))

    def _copies(self, direction: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        source, target = self._host[direction], self._there[direction]
        if direction == "d2h":
            source, target = target, source
        self._streams.record(begin, direction)
        for _ in range(COPIES):
            self._streams.copy(target, source, direction)
        self._streams.record(end, direction)
        return begin, end

    def close(self) -> None:
        """Give the pinned memory back."""
        self._host.clear()
        self._memory.close()
