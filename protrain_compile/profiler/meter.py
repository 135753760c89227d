"""Times calls and watches the memory that they allocate, on one device."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from protrain_compile.byte_text import format_size

log = logging.getLogger("protrain_compile.profiler")

Call = Callable[[], Any]

WARM_UPS = 2
RUNS = (3, 10)
"""The fewest and the most timed runs of a call."""

BUDGET_MS = 100.0


MOST_HEATING = 1000
"""Rounds of calls that are too short to load the device, however long they take."""


class Timing(NamedTuple):
    """Medians over the runs of a call.

    Attributes:
        ms: Time on the device, launches hidden.
        launch_ms: Time of the launching thread.
    """

    ms: float
    launch_ms: float


class Stopwatch(Protocol):
    """Times calls that follow each other."""

    def lap(self, call: Call) -> Any:
        """Return what ``call`` returns."""
        ...

    def laps_ms(self) -> list[float]:
        """Wait for the device; return the time of each lap on it."""
        ...


class Meter(Protocol):
    """What can be measured of a device."""

    device: torch.device

    def stopwatch(self) -> Stopwatch:
        """Return a new stopwatch; the first lap should follow at once."""
        ...

    def finish(self, call: Call) -> None:
        """Run ``call`` and wait for the device."""
        ...

    def allocated_bytes(self) -> int | None:
        """Return the bytes that are allocated now, or None if nobody counts them."""
        ...

    def peak_bytes(self, call: Call) -> tuple[Any, int | None]:
        """Return what ``call`` returns, and the most allocated inside beyond what was before, or None."""
        ...


def time_call(meter: Meter, call: Call, budget_ms: float = BUDGET_MS) -> Timing:
    """Return the medians of several runs of ``call``, after a warm-up; the results are dropped.

    Args:
        meter: Of the device.
        call: What is timed.
        budget_ms: What the timed runs may take together, the fewest always being made.
    """
    for _ in range(WARM_UPS):
        first_ms = max(_elapsed_ms(lambda: meter.finish(call)), 1e-3)
    fewest, most = RUNS
    runs = max(fewest, min(most, int(budget_ms / first_ms)))
    watch = meter.stopwatch()
    launches = [_elapsed_ms(lambda: (watch.lap(call), None)) for _ in range(runs)]
    return Timing(statistics.median(watch.laps_ms()), statistics.median(launches))


def lasting_ms(meter: Meter, calls: Sequence[Call], heat_ms: float) -> list[float]:
    """Return the median time of each of ``calls``, made in turn until the device runs at the clock that lasts.

    A device under full load draws more power than it may and lowers its clock within some tenths of a second; training
    runs at that clock. It depends on all that runs within such a time: in a loop of its own a light call would run at a
    higher clock than between the heavy ones beside which it is used, and a heavy one at a lower.

    Args:
        meter: Of the device.
        calls: What is timed; results are dropped.
        heat_ms: How long the rounds go on together, of which the second half counts.
    """
    for _ in range(WARM_UPS):
        first_ms = max(sum(_elapsed_ms(lambda call=call: meter.finish(call)) for call in calls), 1e-3)  # type: ignore[misc]
    rounds = max(RUNS[0], min(MOST_HEATING, int(heat_ms / first_ms)))
    watch = meter.stopwatch()
    for _ in range(rounds):
        for call in calls:
            watch.lap(call)
    laps = watch.laps_ms()[rounds // 2 * len(calls) :]
    return [statistics.median(laps[place :: len(calls)]) for place in range(len(calls))]


class CpuStopwatch:
    """A call on the CPU is done when it returns."""

    def __init__(self) -> None:
        self._laps_ms: list[float] = []

    def lap(self, call: Call) -> Any:
        """See :meth:`Stopwatch.lap`."""
        start = time.perf_counter()
        result = call()
        self._laps_ms.append((time.perf_counter() - start) * 1e3)
        return result

    def laps_ms(self) -> list[float]:
        """See :meth:`Stopwatch.laps_ms`."""
        return self._laps_ms


class CpuMeter:
    """The CPU as a device: nobody counts its memory."""

    device = torch.device("cpu")

    def stopwatch(self) -> Stopwatch:
        """See :meth:`Meter.stopwatch`."""
        return CpuStopwatch()

    def finish(self, call: Call) -> None:
        """See :meth:`Meter.finish`."""
        call()

    def allocated_bytes(self) -> int | None:
        """See :meth:`Meter.allocated_bytes`."""
        return None

    def peak_bytes(self, call: Call) -> tuple[Any, int | None]:
        """See :meth:`Meter.peak_bytes`."""
        return call(), None


class CudaStopwatch:
    """Events on the current stream of a CUDA device.

    The device is first kept busy with nothing, so that the launching thread gets ahead: what passes between two events
    is then the device's own time, unless a call synchronizes.
    """

    SLEEP_CYCLES = 40_000_000
    """About 20 ms at 2 GHz: more than the launching thread needs for a block's nodes, or for ten of its parts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda._sleep(self.SLEEP_CYCLES)  # type: ignore[no-untyped-call]

    def lap(self, call: Call) -> Any:
        """See :meth:`Stopwatch.lap`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = call()
        end.record()
        self._pairs.append((begin, end))
        return result

    def laps_ms(self) -> list[float]:
        """See :meth:`Stopwatch.laps_ms`."""
        torch.cuda.synchronize(self._device)
        return list(itertools.starmap(torch.cuda.Event.elapsed_time, self._pairs))


class CudaMeter:
    """A CUDA device, which must be the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._told = False

    def stopwatch(self) -> Stopwatch:
        """See :meth:`Meter.stopwatch`."""
        return CudaStopwatch(self.device)

    def finish(self, call: Call) -> None:
        """See :meth:`Meter.finish`."""
        call()
        torch.cuda.synchronize(self.device)

    def allocated_bytes(self) -> int | None:
        """See :meth:`Meter.allocated_bytes`."""
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self, call: Call) -> tuple[Any, int | None]:
        """See :meth:`Meter.peak_bytes`.

        The allocator counts one peak for all: where one before was higher, it has to begin anew.
        """
        before, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        if peak > before:
            if not self._told:
                log.info(
                    "profiling begins the peak statistics of %s anew; they were at %s", self.device, format_size(peak)
                )
            self._told = True
            torch.cuda.reset_peak_memory_stats(self.device)
        result = call()
        return result, torch.cuda.max_memory_allocated(self.device) - before


def make_meter(device: torch.device) -> Meter:
    """Return the meter of ``device``."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def _elapsed_ms(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
