from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from protrain_compile.profiler import meter
from protrain_compile.profiler.meter import (
    BUDGET_MS,
    MOST_HEATING,
    RUNS,
    WARM_UPS,
    CpuMeter,
    CudaMeter,
    lasting_ms,
    make_meter,
    time_call,
)


class Counted(CpuMeter):
    """Pretends that every call takes ``call_ms``."""

    def __init__(self, call_ms: float) -> None:
        self.call_ms, self.calls = call_ms, 0

    def call(self) -> None:
        self.calls += 1


def runs_of(call_ms: float, monkeypatch: object) -> int:
    counted = Counted(call_ms)
    monkeypatch.setattr(meter, "_elapsed_ms", lambda call: (call(), call_ms)[1])  # type: ignore[attr-defined]
    assert time_call(counted, counted.call).launch_ms == call_ms
    return counted.calls - WARM_UPS


def test_short_calls_run_more_often_than_long_ones(monkeypatch: object) -> None:
    fewest, most = RUNS
    assert runs_of(0.001, monkeypatch) == most
    assert runs_of(BUDGET_MS / 5, monkeypatch) == 5
    assert runs_of(10 * BUDGET_MS, monkeypatch) == fewest


class Slowing(CpuMeter):
    """Of two calls in turn, the first takes 1 ms at first and 2 ms from the tenth round on, the second 5 ms more."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def call(self, number: int) -> None:
        self.calls.append(number)

    def stopwatch(self) -> Any:
        found: list[float] = []

        class Watch:
            def lap(self, call: Any) -> Any:
                found.append((1.0 if len(found) < 20 else 2.0) + 5.0 * (len(found) % 2))
                return call()

            def laps_ms(self) -> list[float]:
                return found

        return Watch()


@pytest.mark.parametrize(("heat_ms", "rounds", "ms"), [(0.0, RUNS[0], 1.0), (60.0, 30, 2.0), (1e6, MOST_HEATING, 2.0)])
def test_under_sustained_load_the_lasting_times_count(
    heat_ms: float, rounds: int, ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_elapsed_ms", lambda call: (call(), 1.0)[1])
    slowing = Slowing()
    calls = [lambda: slowing.call(0), lambda: slowing.call(1)]
    assert lasting_ms(slowing, calls, heat_ms) == [ms, ms + 5.0]
    assert slowing.calls == [0, 1] * (WARM_UPS + rounds)


def test_the_cpu_counts_no_memory() -> None:
    cpu = make_meter(torch.device("cpu"))
    assert cpu.allocated_bytes() is None
    assert cpu.peak_bytes(lambda: 3) == (3, None)


def test_a_stopwatch_returns_what_the_call_returns() -> None:
    watch = CpuMeter().stopwatch()
    assert [watch.lap(lambda each=each: each) for each in (1, 2)] == [1, 2]
    laps = watch.laps_ms()
    assert len(laps) == 2
    assert min(laps) >= 0


class FakeStatistics:
    """The allocator's counters, in place of torch.cuda's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: int, peak: int) -> None:
        self.now, self.peak, self.resets = now, peak, 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, _: torch.device) -> None:
        self.resets += 1
        self.peak = self.now

    def use(self, size_bytes: int) -> str:
        self.peak = max(self.peak, self.now + size_bytes)
        return "result"


@pytest.mark.parametrize(("peak", "resets"), [(100, 0), (900, 1)])
def test_peak_statistics_begin_anew_only_where_they_hide_a_peak_and_say_so(
    peak: int, resets: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = FakeStatistics(monkeypatch, 100, peak)
    cuda = CudaMeter(torch.device("cuda"))
    with caplog.at_level(logging.INFO, "protrain_compile.profiler"):
        assert cuda.peak_bytes(lambda: found.use(50)) == ("result", 50)
        assert found.resets == resets
        assert cuda.peak_bytes(lambda: found.use(30)) == ("result", 30)
    assert ["begins the peak statistics" in record.getMessage() for record in caplog.records] == [True]
