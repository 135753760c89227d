from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.capture import gpt_program, schedule_of
from support.counting import CountingMeter
from support.light import GPT
from support.models import tokens
from support.profiles import machine
from torch.utils._python_dispatch import TorchDispatchMode

from protrain_compile.artefacts import ArtefactSet
from protrain_compile.profiler import nodes, templates
from protrain_compile.profiler.estimate import estimate_template
from protrain_compile.profiler.meter import CpuMeter
from protrain_compile.profiler.nodes import measure_nodes
from protrain_compile.profiler.templates import TemplateRun, measure_template, measure_templates, template_device

MACHINE = machine()


def test_every_part_is_measured() -> None:
    program = gpt_program()
    measured = measure_templates(program, ArtefactSet("eager"), MACHINE)
    for template, found in zip(program.templates, measured, strict=True):
        expected = estimate_template(template, MACHINE, "eager")
        assert found.measured
        assert found.parts.keys() == expected.parts.keys()
        for role, cost in found.parts.items():
            assert cost.ms > 0
            assert cost.launches == expected.parts[role].launches
            assert cost.workspace_bytes == expected.parts[role].workspace_bytes  # nobody counts memory on the CPU


def test_profiling_leaves_the_random_state_alone() -> None:
    program = schedule_of(GPT(2, dropout=0.1), tokens()).program
    torch.manual_seed(3)
    state = torch.get_rng_state()
    measure_templates(program, ArtefactSet("eager"), MACHINE)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_of_a_template_is_left() -> None:
    program = gpt_program()
    run = TemplateRun(program.templates[program.template_of[1]], _compiled(), MACHINE, CpuMeter())
    run.parts()
    inputs = [weakref.ref(value) for value in run.inputs]
    del run
    gc.collect()
    assert inputs
    assert all(ref() is None for ref in inputs)


def _compiled() -> ArtefactSet:
    program, artefacts = gpt_program(), ArtefactSet("eager")
    for template in program.templates:
        templates.compile_parts(template, artefacts)
    return artefacts


@pytest.mark.parametrize("segment", [1, -1])
def test_counted_workspace_is_that_told_from_sizes(segment: int) -> None:
    template = gpt_program().templates[gpt_program().template_of[segment]]
    meter = CountingMeter()
    with meter, torch.no_grad():
        counted = TemplateRun(template, _compiled(), MACHINE, meter).parts()
    told = estimate_template(template, MACHINE, "eager").parts
    assert {role: cost.workspace_bytes for role, cost in counted.items()} == {
        role: cost.workspace_bytes for role, cost in told.items()
    }
    assert all(cost.workspace_bytes > 0 for cost in counted.values())


def test_what_does_not_fit_is_estimated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(templates, "time_call", fail)
    monkeypatch.setattr(nodes, "make_inputs", fail)
    template = gpt_program().templates[1]
    expected = estimate_template(template, MACHINE, "eager")
    assert measure_template(template, ArtefactSet("eager"), MACHINE) == expected
    assert measure_nodes(template, MACHINE) == expected.nodes
    assert caplog.text.count("does not fit") == 1
    assert caplog.text.count("do not fit") == 1


def test_parts_that_are_timed_in_turn_replace_those_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def in_turn(_: Any, calls: Sequence[Any], heat_ms: float) -> list[float]:
        for call in calls:
            call()
        made.append(len(calls))
        return [heat_ms + place for place in range(len(calls))]

    monkeypatch.setattr(templates, "lasting_ms", in_turn)
    template = gpt_program().templates[gpt_program().template_of[1]]
    with torch.no_grad():
        found = TemplateRun(template, _compiled(), MACHINE, CpuMeter(), heat_ms=1000.0).parts()
    assert [cost.ms for cost in found.values()] == [1000.0 + place for place in range(len(found))]
    assert made == [len(found)]


def test_parts_that_have_no_room_together_are_timed_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(templates, "lasting_ms", fail)
    template = gpt_program().templates[gpt_program().template_of[1]]
    with torch.no_grad(), caplog.at_level(logging.INFO, "protrain_compile.profiler"):
        found = TemplateRun(template, _compiled(), MACHINE, CpuMeter(), heat_ms=1000.0).parts()
    assert all(0 < cost.ms < 1000.0 for cost in found.values())
    assert "each is timed alone" in caplog.text


def test_every_node_is_measured_in_graph_order() -> None:
    template = gpt_program().templates[1]
    calls = [node.name for node in template.joint.graph.nodes if node.op == "call_function"]
    found = measure_nodes(template, MACHINE)
    assert [each.name for each in found] == calls
    products = [each for each in found if each.op in ("mm", "addmm")]
    assert products
    assert all(each.ms > 0 and each.inside_bytes > 0 for each in products)


def test_counted_changes_of_nodes_are_those_told_from_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    template = gpt_program().templates[gpt_program().template_of[1]]
    told = measure_nodes(template, MACHINE)
    meter = CountingMeter()
    monkeypatch.setattr(nodes, "make_meter", lambda _: meter)
    monkeypatch.setattr(nodes, "measuring", lambda _: torch.no_grad())  # the meter is a mode
    with meter:
        counted = measure_nodes(template, MACHINE)
    assert [each.change_bytes for each in counted] == [each.change_bytes for each in told]
    assert all(each.inside_bytes >= max(0, each.change_bytes) for each in counted)


def test_the_device_is_that_of_the_values() -> None:
    assert template_device(gpt_program().templates[0]) == torch.device("cpu")


def test_no_mode_watches_what_is_measured() -> None:
    class Watching(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Watching.seen += 1
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.ones(1)
        before = Watching.seen
        with templates.measuring(torch.device("cpu")):
            torch.ones(1)
    assert Watching.seen == before > 0
