"""A timeline of one training step on a CUDA device: how busy compute and copies are, and where compute waits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GAP_MS = 0.3
"""Shorter pauses of compute are launch gaps, and are summed up, not listed."""


@dataclasses.dataclass
class Timeline:
    """What one profiled step shows; times in ms.

    Attributes:
        span_ms: From the first to the last device activity.
        compute_ms: Time in which some kernel runs.
        h2d_ms: Time in which some host-to-device copy runs.
        d2h_ms: The other direction.
        overlapped_ms: Copy time beside a running kernel.
        short_gaps_ms: Pauses of compute below the listing limit, summed.
        gaps: Longer pauses: begin, length, and the kernels before and after.
    """

    span_ms: float
    compute_ms: float
    h2d_ms: float
    d2h_ms: float
    overlapped_ms: float
    short_gaps_ms: float
    gaps: list[tuple[float, float, str, str]]

    def lines(self) -> list[str]:
        """Return the timeline as text."""
        copies = f"h2d {self.h2d_ms:.1f} ms, d2h {self.d2h_ms:.1f} ms, beside compute {self.overlapped_ms:.1f} ms"
        text = [
            f"timeline: span {self.span_ms:.1f} ms, compute busy {self.compute_ms:.1f} ms "
            f"({self.compute_ms / self.span_ms:.1%}), copies {copies}; "
            f"gaps under {GAP_MS} ms sum to {self.short_gaps_ms:.1f} ms"
        ]
        text += [
            f"  gap at {begin:8.1f} ms: {length:7.2f} ms   {before} -> {after}"
            for begin, length, before, after in self.gaps
        ]
        return text


def record_step(step: Callable[[], Any]) -> Timeline:
    """Profile one call of ``step`` between two synchronizations."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    return summarize(_device_events(profiler))


def _device_events(profiler: Any) -> list[tuple[float, float, str]]:
    """Return ``(begin ms, end ms, name)`` of what ran on the device, in order."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        begin = event.start_ns() / 1e6
        found.append((begin, begin + event.duration_ns() / 1e6, event.name()))
    return sorted(found)


def summarize(events: list[tuple[float, float, str]]) -> Timeline:
    """Return the timeline of device events."""
    events = [event for event in events if "ProfilerStep" not in event[2] and event[1] > event[0]]
    h2d = [e for e in events if "HtoD" in e[2]]
    d2h = [e for e in events if "DtoH" in e[2]]
    kernels = [e for e in events if "HtoD" not in e[2] and "DtoH" not in e[2]]
    start = events[0][0]
    busy = _union(kernels)
    gaps, short = [], 0.0
    named = {end: name for _, end, name in kernels}
    begins = {begin: name for begin, _, name in kernels}
    for (_, end), (begin, _) in itertools.pairwise(busy):
        if begin - end < GAP_MS:
            short += begin - end
        else:
            gaps.append((end - start, begin - end, named.get(end, "?")[:48], begins.get(begin, "?")[:48]))
    return Timeline(
        span_ms=max(e[1] for e in events) - start,
        compute_ms=_length(busy),
        h2d_ms=_length(_union(h2d)),
        d2h_ms=_length(_union(d2h)),
        overlapped_ms=_overlap(busy, _union([*h2d, *d2h])),
        short_gaps_ms=short,
        gaps=gaps,
    )


def _union(events: list[tuple[float, float, str]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end, *_ in sorted(events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
