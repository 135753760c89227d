from __future__ import annotations

import torch

from protrain_compile.profiler import meter
from protrain_compile.profiler.meter import BUDGET_MS, RUNS, WARM_UPS, CpuMeter, make_meter, time_call


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
