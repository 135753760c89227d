"""Run one compiled model under several plans and compare losses and gradients with eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan

Step = Callable[[nn.Module], Tensor]
"""Runs one forward of the model it is given and returns the loss."""


@dataclasses.dataclass
class Result:
    """What one step gave: the loss and every parameter's gradient (None where there is none)."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def compile_model(
    model: nn.Module, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any
) -> nn.Module:
    """Compile ``model`` with the backend, running ATen operations one by one and printing nothing unless asked to."""
    options = {"compile": "eager", "schedule": "off", **options}
    return torch.compile(model, backend="protrain", dynamic=dynamic, fullgraph=fullgraph, options=options)  # type: ignore[return-value]


def run_step(model: nn.Module, step: Step, *, seed: int = 0, owner: nn.Module | None = None) -> Result:
    """Run one forward and backward from ``seed``; return and clear the gradients of ``owner`` (default: ``model``)."""
    owner = model if owner is None else owner
    owner.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = step(model)
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in owner.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in owner.named_buffers()}
    owner.zero_grad(set_to_none=True)
    return Result(loss.detach().clone(), gradients, buffers)


def assert_same(actual: Result, expected: Result, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare losses, gradients (also which ones are None) and buffers."""
    assert_close("loss", actual.loss, expected.loss, rtol, atol)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        found = actual.gradients[name]
        assert (found is None) == (gradient is None), f"{name}: {found} against {gradient}"
        if gradient is not None:
            assert found is not None
            assert_close(name, found, gradient, rtol, atol)
    for name, buffer in expected.buffers.items():
        assert_close(name, actual.buffers[name], buffer, rtol, atol)


def assert_close(name: str, actual: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare two tensors; a failure names the value."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def assert_bitwise(actual: Result, expected: Result) -> None:
    """Compare to the last bit."""
    assert_same(actual, expected, rtol=0.0, atol=0.0)


def alternating(blocks: int, first: str = "keep") -> Plan:
    """Return the plan that gives ``first`` to blocks 0, 2, 4, ... and the other policy to the rest."""
    order: tuple[Any, Any] = ("keep", "recompute") if first == "keep" else ("recompute", "keep")
    return Plan(policies=tuple(order[i % 2] for i in range(blocks)))


def turns(blocks: int) -> Plan:
    """Return the plan in which policies that swap, recompute and keep take turns."""
    order: tuple[Any, ...] = ("swap_products", "recompute", "swap", "keep")
    return Plan(policies=tuple(order[i % 4] for i in range(blocks)))


def finer(blocks: int) -> Plan:
    """Return the plan in which all policies that recompute, and keep, take turns."""
    order: tuple[Any, ...] = ("recompute_pointwise", "recompute_products", "recompute", "keep")
    return Plan(policies=tuple(order[i % 4] for i in range(blocks)))


def check_plans(
    model: nn.Module,
    step: Step,
    *,
    blocks: int,
    templates: int = 5,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    eager: Result | None = None,
    compiled: nn.Module | None = None,
    bitwise: bool = True,
    **options: Any,
) -> protrain_compile.ModelSchedule:
    """Check all policies and mixed plans under one compiled entry against eager; return the schedule.

    Plans are compared with keep to the last bit, or (not ``bitwise``: some kernels add in no fixed order) with eager.
    Buffers must come out as in eager after each plan's step, so each step starts from the same buffers.
    """
    start = copy.deepcopy(dict(model.named_buffers()))
    if eager is None:
        eager = run_step(copy.deepcopy(model), step)
    compiled = compile_model(model, **options) if compiled is None else compiled
    keep = run_step(compiled, step, owner=model)
    assert_same(keep, eager, rtol=rtol, atol=atol)
    schedule = protrain_compile.schedule(compiled)
    assert len(schedule.parts) == 1, schedule.render()
    assert plan_blocks(schedule) == blocks, schedule.render()
    assert schedule.parts[0].graph.program.structures <= templates, schedule.render()
    compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    mixed = (alternating(blocks), finer(blocks), turns(blocks))
    for plan in (Plan.uniform("recompute"), *mixed, Plan.uniform("swap"), Plan.uniform("keep")):
        _restore(model, start)
        schedule.use(plan)
        result = run_step(compiled, step, owner=model)
        if bitwise:
            assert_bitwise(result, keep)
        else:
            assert_same(result, eager, rtol=rtol, atol=atol)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles, "a plan caused a compile"
    assert all(len(part.graph.contexts) == 0 for part in schedule.parts)
    return schedule


def plan_blocks(schedule: protrain_compile.ModelSchedule) -> int:
    """How many blocks the first graph's plan has."""
    return len(schedule.parts[0].schedule.plan.policies or ())


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
