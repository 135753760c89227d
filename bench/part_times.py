"""What each compiled part takes in training, beside what it took alone when it was profiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from bench import common
from protrain_compile.artefacts import Artefact

STEPS = 2
HEADER = ("part", "calls", "profiled ms", "in training", "of profiled", "pauses before, ms")


class PartClock:
    """Events around every call of a part on the compute stream, in order, and the peaks of memory inside."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, Any, Any]] = []
        self.peaks: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time the calls of parts made inside."""
        run = Artefact.__call__

        def timed(artefact: Artefact, boxed: list[Any], *, stream: str) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()
            begin.record()
            results = run(artefact, boxed, stream=stream)
            end.record()
            self.peaks.append((artefact.__name__, torch.cuda.max_memory_allocated()))
            self.marks.append((artefact.__name__, begin, end))
            return results

        with mock.patch.object(Artefact, "__call__", timed):
            yield

    def times(self) -> dict[str, dict[str, float]]:
        """Return calls, and the sums of their times and of the pauses before them, by part."""
        found: dict[str, dict[str, float]] = {}
        before = None
        for name, begin, end in self.marks:
            entry = found.setdefault(name, {"calls": 0, "ms": 0.0, "pauses_ms": 0.0})
            entry["calls"] += 1
            entry["ms"] += begin.elapsed_time(end)
            entry["pauses_ms"] += before.elapsed_time(begin) if before is not None else 0.0
            before = end
        return found


def part_times(step: Callable[[], Any]) -> tuple[dict[str, dict[str, float]], list[tuple[str, int]]]:
    """Run some steps on a CUDA device.

    Returns:
        For one step, every part's calls, times and pauses before; and the peak inside each call, in order.
    """
    clock = PartClock()
    with clock.running():
        for _ in range(STEPS):
            step()
    torch.cuda.synchronize()
    times = {name: {key: value / STEPS for key, value in each.items()} for name, each in clock.times().items()}
    return times, clock.peaks[len(clock.peaks) // STEPS * (STEPS - 1) :]


def parts_table(parts: dict[str, dict[str, float]]) -> str:
    """Return the table of one configuration, and the sums of a step."""
    rows = []
    for name, each in parts.items():
        profiled, mean = each.get("profiled_ms", 0.0), each["ms"] / each["calls"]
        off = f"{mean / profiled - 1:+.1%}" if profiled else ""
        rows.append((name, f"{each['calls']:g}", f"{profiled:.3f}", f"{mean:.3f}", off, f"{each['pauses_ms']:.1f}"))
    told = sum(each.get("profiled_ms", 0.0) * each["calls"] for each in parts.values())
    took, pauses = (sum(each[key] for each in parts.values()) for key in ("ms", "pauses_ms"))
    off = f"{took / told - 1:+.1%}" if told else ""
    return common.table(HEADER, [*rows, ("all", "", f"{told:.0f}", f"{took:.0f}", off, f"{pauses:.1f}")])
