"""bench/search.py on a small model: both ways to update are searched, under the smallest budget and without one."""

from __future__ import annotations

from bench.search import budgets, clipping, measure, plan
from protrain_compile.commands.models import resolve
from protrain_compile.commands.outlook import Workload, step_of
from protrain_compile.profile import HardwareProfile


def test_both_ways_to_update_are_searched() -> None:
    model = resolve("llama:hidden_size=64,intermediate_size=128,num_attention_heads=4,num_hidden_layers=3")
    step = step_of(Workload(model, 2, 32), HardwareProfile.load("h200"))
    for each in (step, clipping(step)):
        least, *_, most = budgets(each)
        ms, simulated = measure(each, least, repeats=1)
        assert ms > 0
        assert simulated > 0
        assert plan(each, least).prediction.peak_bytes <= least < most
    assert plan(clipping(step), None).prediction.exposed_updates_ms >= plan(step, None).prediction.exposed_updates_ms
