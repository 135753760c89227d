"""CompiledGraph: bindings, schedules and contexts of one compiled graph."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support.capture import compiled, mixed
from support.light import GPT
from support.models import tokens
from torch import nn

import protrain_compile
from protrain_compile import ContextError, Plan, PlanError
from protrain_compile.runtime.compiled_graph import CompiledGraph


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(2)


def graph_of(function: nn.Module) -> CompiledGraph:
    return protrain_compile.schedule(function).parts[0].graph


def gradients(model: nn.Module) -> dict[str, Any]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_schedules_are_made_once_per_plan(model: nn.Module) -> None:
    function, _ = compiled(model, tokens())
    graph = graph_of(function)
    assert graph.schedule_for(Plan.uniform("keep")) is graph.default
    assert graph.schedule_for(mixed("kk")) is graph.default
    other = graph.schedule_for(mixed("kr"))
    assert other is not graph.default
    assert graph.schedule_for(mixed("kr")) is other


def test_a_plan_that_does_not_fit(model: nn.Module) -> None:
    function, schedule = compiled(model, tokens())
    with pytest.raises(PlanError, match="3 block policies, but this graph has 2 blocks"):
        graph_of(function).schedule_for(mixed("kkk"))
    with pytest.raises(PlanError):
        schedule.use(mixed("kkk"))
    assert schedule.plan.policies == ("keep", "keep")


def test_artefacts_are_shared_by_schedules(model: nn.Module) -> None:
    function, schedule = compiled(model, tokens())
    graph = graph_of(function)
    assert graph.compiled_artefacts == 6
    schedule.use('{"uniform_policy": "recompute"}')
    assert graph.compiled_artefacts == 7, "one recompute more"


def test_a_context_per_forward(model: nn.Module) -> None:
    function, _ = compiled(model, tokens())
    graph = graph_of(function)
    gc.collect()
    assert len(graph.contexts) == 0
    first, second = function(tokens()), function(tokens(seed=1))
    assert len(graph.contexts) == 2
    first.backward()
    del first
    gc.collect()
    assert len(graph.contexts) == 1
    del second
    gc.collect()
    assert len(graph.contexts) == 0


def test_two_forwards_before_their_backwards(model: nn.Module) -> None:
    reference = copy.deepcopy(model)
    function, _ = compiled(model, tokens())
    losses = [function(tokens(seed=i)) for i in range(3)]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    for i in range(3):
        reference(tokens(seed=i)).backward()
    assert_equal(gradients(model), gradients(reference))


def test_a_context_keeps_the_schedule_of_its_forward(model: nn.Module) -> None:
    reference = copy.deepcopy(model)
    function, schedule = compiled(model, tokens(), plan="keep")
    loss = function(tokens())
    schedule.use(Plan.uniform("recompute"))
    later = function(tokens(seed=1))
    loss.backward()
    later.backward()
    reference(tokens()).backward()
    reference(tokens(seed=1)).backward()
    assert_equal(gradients(model), gradients(reference))


def test_retain_graph(model: nn.Module) -> None:
    function, _ = compiled(model, tokens())
    loss = function(tokens())
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    assert_equal(gradients(model), first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_weights_changed_between_forward_and_backward(model: nn.Module) -> None:
    function, _ = compiled(model, tokens())
    loss = function(tokens())
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)  # type: ignore[union-attr, index, operator]
    with pytest.raises(ContextError, match=r"blocks\.0\.up\.weight .*modified by an inplace operation"):
        loss.backward()


def test_an_exception_in_the_backward_leaves_no_context(model: nn.Module) -> None:
    function, _ = compiled(model, tokens())
    loss = function(tokens())

    def fail(_: Any) -> None:
        raise ZeroDivisionError("hook")

    handle = model.norm.weight.register_hook(fail)  # type: ignore[union-attr, operator]
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    gc.collect()
    assert len(graph_of(function).contexts) == 0


def test_two_models_share_a_compiled_graph_and_no_weights() -> None:
    torch.manual_seed(0)
    first, second = GPT(2), GPT(2)
    references = [copy.deepcopy(each) for each in (first, second)]
    torch._dynamo.reset()
    options: Any = {"compile": "eager", "schedule": "off"}
    functions: Any = [torch.compile(each, backend="protrain", options=options) for each in (first, second)]
    for function, model, reference in zip(functions, (first, second), references, strict=True):
        function(tokens()).backward()
        reference(tokens()).backward()
        assert_equal(gradients(model), gradients(reference))
    graphs = [graph_of(function) for function in functions]
    if graphs[0] is graphs[1]:
        bindings = [graphs[0].bindings_of(model.parameters()) for model in (first, second)]
        assert [len(each) for each in bindings] == [1, 1]
        assert bindings[0][0] is not bindings[1][0]


def test_plans_are_per_model() -> None:
    first, second = GPT(2), GPT(2)
    torch._dynamo.reset()
    options: Any = {"compile": "eager", "schedule": "off"}
    functions: Any = [torch.compile(each, backend="protrain", options=options) for each in (first, second)]
    for function in functions:
        function(tokens())
    protrain_compile.schedule(first).use(Plan.uniform("recompute"))
    assert protrain_compile.schedule(first).plan.policies == ("recompute", "recompute")
    assert protrain_compile.schedule(second).plan.policies == ("keep", "keep")


def test_a_binding_dies_with_its_model() -> None:
    torch._dynamo.reset()
    first, second = GPT(2), GPT(2)
    options: Any = {"compile": "eager", "schedule": "off"}
    keep: Any = torch.compile(first, backend="protrain", options=options)
    other: Any = torch.compile(second, backend="protrain", options=options)
    keep(tokens())
    other(tokens())
    graph = graph_of(second)
    reference = weakref.ref(second.norm.weight)
    other = second = None
    gc.collect()
    if reference() is not None:
        pytest.skip("this PyTorch keeps compiled models alive")
    assert all(ref() is not None for binding in graph._bindings.values() for ref in binding.parameters)


def test_no_parameter_is_kept_alive(model: nn.Module) -> None:
    """Bindings hold parameters weakly."""
    function, _ = compiled(model, tokens())
    (binding,) = graph_of(function).bindings_of(model.parameters())
    assert all(isinstance(each, weakref.ref) for each in binding.parameters)
    assert {id(each()) for each in binding.parameters} == {id(p) for p in model.parameters()}


def test_inference_runs_by_the_newest_weights(model: nn.Module) -> None:
    function, _ = compiled(model, tokens())
    with torch.no_grad():
        before = function(tokens())
        model.norm.weight.mul_(1.5)  # type: ignore[union-attr, operator]
        after = function(tokens())
        assert_equal(after, model(tokens()))
    assert not torch.equal(before, after)


def test_a_parameter_frozen_at_capture_may_not_ask_for_a_gradient(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
    function, _ = compiled(model, tokens())
    graph = graph_of(function)
    arguments = [None] * len(graph.program.inputs)
    for position in graph._frozen_positions:
        name = graph.program.inputs[position].name
        arguments[position] = model.get_parameter(name)  # type: ignore[call-overload]
    graph._check_frozen(arguments)
    model.blocks[0].requires_grad_(True)  # type: ignore[index, union-attr]
    with pytest.raises(protrain_compile.ProtrainError, match="was frozen when the model was compiled"):
        graph._check_frozen(arguments)
