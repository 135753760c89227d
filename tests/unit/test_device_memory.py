"""A step's peak against its prediction."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
import torch

from protrain_compile.runtime.device_memory import WATCHED_STEPS, PeakWatch, watch_of

MIB = 1 << 20


def watched(peaks: Iterable[int], predicted: int = 100, reserve: int = 5) -> PeakWatch:
    """Return a watch that saw one step for each two of ``peaks``, in MiB."""
    readings = list(peaks)
    watch = PeakWatch(predicted * MIB, reserve * MIB, lambda: readings.pop(0) * MIB)
    while readings:
        watch.begin()
        watch.end()
    return watch


def test_within_the_reserve(caplog: pytest.LogCaptureFixture) -> None:
    assert watched([10, 105]).measured_bytes == 105 * MIB
    assert not caplog.records


def test_one_warning_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "protrain_compile"):
        assert watched([10, 106]).measured_bytes == 106 * MIB
    assert len(caplog.records) == 1
    assert "peaked at 106.0 MiB, 6.0 MiB more than the predicted 100.0 MiB" in caplog.text
    assert "memory_budget" in caplog.text


def test_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    readings = [10, 150, 150, 200]
    watch = PeakWatch(100 * MIB, 0, lambda: readings.pop(0) * MIB)
    for _ in range(2):
        watch.begin()
        watch.end()
    assert len(caplog.records) == 1
    assert readings == [150, 200], "a watch that has warned reads no more"


def test_a_peak_of_before_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Something larger ran before and the user did not reset the statistics."""
    assert watched([500, 500]).measured_bytes is None
    assert not caplog.records


def test_ends_after_some_steps() -> None:
    readings = [1] * 100
    watch = PeakWatch(MIB, 0, lambda: readings.pop() * MIB)
    for _ in range(20):
        watch.begin()
        watch.end()
    assert len(readings) == 100 - 2 * WATCHED_STEPS


def test_a_backward_without_its_forward_is_ignored() -> None:
    watch = PeakWatch(MIB, 0, lambda: 1)
    watch.end()
    assert watch.measured_bytes is None


def test_the_cpu_has_none() -> None:
    assert watch_of(torch.device("cpu"), 1, 1) is None
