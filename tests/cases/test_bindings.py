"""One compiled entry, several owners: two instances, replaced parameters, dead models; bad options and versions."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from support.compare import alternating, assert_same, compile_model, run_step
from support.light import GPT, WIDTH, Block
from support.models import tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import OptionError, Plan, PlanError, ProtrainError, VersionError, compat


def step(model: nn.Module) -> Tensor:
    return model(tokens())


def compiles() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_two_instances_share_one_entry() -> None:
    """Each instance uses its own weights and follows its own plan."""
    models = [GPT(3), GPT(3)]
    expected = [run_step(copy.deepcopy(model), step) for model in models]
    compiled = [compile_model(model) for model in models]
    for each, model, result in zip(compiled, models, expected, strict=True):
        assert_same(run_step(each, step, owner=model), result)
    assert compiles() == 1
    schedules = [protrain_compile.schedule(each) for each in compiled]
    schedules[0].use(Plan.uniform("recompute"))
    schedules[1].use(alternating(3))
    assert protrain_compile.schedule(compiled[0]).plan.policies == ("recompute",) * 3
    assert protrain_compile.schedule(compiled[1]).plan.policies == ("keep", "recompute", "keep")
    losses = [step(each) for each in compiled]
    for i in (1, 0):
        losses[i].backward()
        for name, p in models[i].named_parameters():
            torch.testing.assert_close(p.grad, expected[i].gradients[name], rtol=1e-5, atol=1e-6)
    assert compiles() == 1


def test_two_instances_with_different_options_do_not_share() -> None:
    models = [GPT(3), GPT(3)]
    compiled = [compile_model(models[0]), compile_model(models[1], plan=Plan.uniform("recompute"))]
    for each in compiled:
        step(each).backward()
    assert [protrain_compile.schedule(each).plan.policies for each in compiled] == [("keep",) * 3, ("recompute",) * 3]


def test_parameters_replaced_between_calls() -> None:
    model = GPT(3, tied=False)
    compiled = compile_model(model)
    run_step(compiled, step, owner=model)
    protrain_compile.schedule(compiled).use(Plan.uniform("recompute"))
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    model.blocks[1] = Block()
    expected = run_step(copy.deepcopy(model), step)
    assert_same(run_step(compiled, step, owner=model), expected)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    expected = run_step(copy.deepcopy(model), step)
    assert_same(run_step(compiled, step, owner=model), expected)


def test_parameters_changed_in_place_between_calls() -> None:
    model = GPT(3)
    compiled = compile_model(model, plan=Plan.uniform("recompute"))
    run_step(compiled, step, owner=model)
    for change in (
        lambda p: p.data.mul_(0.5),
        lambda p: setattr(p, "data", torch.randn_like(p) * 0.02),
    ):
        for p in model.parameters():
            change(p)
        expected = run_step(copy.deepcopy(model), step)
        assert_same(run_step(compiled, step, owner=model), expected)


def test_a_dead_model_leaves_nothing() -> None:
    model = GPT(3)
    compiled = compile_model(model)
    step(compiled).backward()
    (part,) = protrain_compile.schedule(compiled).parts
    graph = part.graph
    assert len(graph._bindings) == 1
    del model, compiled, part
    gc.collect()
    assert len(graph._bindings) == 0


def test_compiled_graph_is_freed_with_the_compiler() -> None:
    import weakref

    model = GPT(3)
    compiled = compile_model(model)
    step(compiled).backward()
    graph = weakref.ref(protrain_compile.schedule(compiled).parts[0].graph)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"polcy": 1}, ["polcy", "plan", "schedule", "compile"]),
        ({"compile": "fast"}, ["fast", "inductor", "eager"]),
        ({"schedule": 3}, ["schedule=3", "off"]),
        ({"plan": "not json"}, ["plan", "JSON"]),
        ({"plan": {"uniform_policy": "wap"}}, ["wap", "keep", "recompute"]),
        ({"plan": Plan(policies=("keep",) * 5)}, ["5 block policies", "3 blocks"]),
    ],
)
def test_bad_options(options: dict[str, Any], words: list[str]) -> None:
    """The error reaches the user through torch.compile with its message."""
    with pytest.raises((OptionError, PlanError)) as caught:
        compile_model(GPT(3), **options)(tokens())
    assert all(word in str(caught.value) for word in words)


def test_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="mode"):
        torch.compile(GPT(2), backend="protrain", mode="max-autotune")(tokens())


def test_plan_that_does_not_fit_changes_nothing() -> None:
    model = GPT(3)
    compiled = compile_model(model)
    step(compiled)
    schedule = protrain_compile.schedule(compiled)
    with pytest.raises(PlanError, match="4 block policies"):
        schedule.use(alternating(4))
    assert schedule.plan.policies == ("keep",) * 3


def test_plan_through_json() -> None:
    model = GPT(3)
    compiled = compile_model(model, plan=alternating(3).to_json())
    step(compiled)
    schedule = protrain_compile.schedule(compiled)
    assert schedule.plan.policies == ("keep", "recompute", "keep")
    other = GPT(3)
    again = compile_model(other, plan=schedule.plan.to_json())
    step(again)
    assert protrain_compile.schedule(again).plan == schedule.plan


def test_schedule_of_a_model_that_never_ran() -> None:
    with pytest.raises(ProtrainError, match="run one forward"):
        protrain_compile.schedule(compile_model(GPT(3)))
    with pytest.raises(TypeError, match="Module"):
        protrain_compile.schedule(torch.relu)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["2.10.0", "2.4.1+cu121", "1.13.1"])
def test_old_torch_is_refused(version: str) -> None:
    with pytest.raises(VersionError, match=r"2\.11 or newer") as caught:
        compat.check_torch_version(version)
    assert version in str(caught.value)


@pytest.mark.parametrize(
    ("version", "warns"), [("2.11.0", False), ("2.14.1+cu130", False), ("2.31.0", True), ("3.0", True)]
)
def test_new_torch_is_mentioned(version: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="protrain_compile.compat"):
        compat.check_torch_version(version)
    assert bool(caplog.records) == warns


def test_compile_in_place_and_functions() -> None:
    """``module.compile(...)`` and a compiled function take the same road."""
    model = GPT(3)
    expected = run_step(copy.deepcopy(model), step)
    model.compile(backend="protrain", options={"compile": "eager", "schedule": "off"})
    assert_same(run_step(model, step), expected)
    other = copy.deepcopy(model)

    @torch.compile(backend="protrain", options={"compile": "eager", "schedule": "off"})
    def called(ids: Tensor) -> Tensor:
        return GPT.forward(other, ids) * 2

    torch._dynamo.reset()
    called(tokens()).backward()
    for (name, p), gradient in zip(other.named_parameters(), expected.gradients.values(), strict=True):
        torch.testing.assert_close(
            p.grad, gradient * 2, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert protrain_compile.schedule(other).plan.policies == ("keep",) * 3


def test_buffers_only() -> None:
    """A call without parameters has one binding for all."""
    block = torch.compile(
        lambda x: torch.tanh(x).sum(), backend="protrain", options={"compile": "eager", "schedule": "off"}
    )
    x = torch.randn(3, WIDTH, requires_grad=True)
    block(x).backward()
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()) ** 2)
