"""Policies between keep and recompute give what keep gives, to the last bit, and need memory in between."""

from __future__ import annotations

import copy

import pytest
import torch
from numerics.test_swap import Body, OddStack, body_step, odd_step
from support.compare import assert_bitwise, assert_same, compile_model, finer, run_step
from support.models import GPT, Llama, tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.liveness import saved_bytes, schedule_liveness
from protrain_compile.roles import RECOMPUTES


def step(model: nn.Module) -> Tensor:
    return model(tokens())


MODELS = {
    "gpt": (lambda: GPT(3), step),
    "llama": (lambda: Llama(3), step),
    "dropout": (lambda: GPT(3, dropout=0.2), step),
    "odd values": (OddStack, odd_step),
}


@pytest.mark.parametrize("name", MODELS)
def test_alone_and_mixed(name: str) -> None:
    """Shared and tied values, views of each other, masks: with every policy for all, and in turns."""
    make, run = MODELS[name]
    torch.manual_seed(0)
    model = make()
    eager = run_step(copy.deepcopy(model), run)
    compiled = compile_model(model)
    keep = run_step(compiled, run, owner=model)
    if name != "dropout":  # the prologue draws for all blocks, in another order than eager
        assert_same(keep, eager)
    schedule = protrain_compile.schedule(compiled)
    turn = finer(3)
    swapping = Plan(policies=("recompute_pointwise", "swap", "recompute_products"))
    products = (Plan.uniform("swap_products"), Plan(policies=("swap_products", "recompute_pointwise", "swap_products")))
    for plan in (*(Plan.uniform(each) for each in RECOMPUTES), turn, swapping, *products):
        schedule.use(plan)
        assert_bitwise(run_step(compiled, run, owner=model), keep)


def test_compiled_by_inductor() -> None:
    torch.manual_seed(0)
    model = Body()
    compiled = compile_model(model, compile="inductor", plan=finer(3))
    found = run_step(compiled, body_step, owner=model)
    assert_same(found, run_step(copy.deepcopy(model), body_step))
    (part,) = protrain_compile.schedule(compiled).parts
    called = {str(node.target) for node in part.schedule.graphs["backward"].graph.nodes}
    assert {role for role in RECOMPUTES for name in called if name.endswith(f"_{role}")} == set(RECOMPUTES)


def test_memory_lies_between() -> None:
    """Bytes saved, and the peak, by policy: less and less from keep to recompute."""
    torch.manual_seed(0)
    compiled = compile_model(Llama(6))
    step(compiled)
    schedule = protrain_compile.schedule(compiled)
    saved, peaks = [], []
    for policy in ("keep", *reversed(RECOMPUTES)):
        schedule.use(Plan.uniform(policy))
        (part,) = schedule.parts
        saved.append(sum(saved_bytes(part.schedule).values()))
        peaks.append(max(each.peak_bytes for each in schedule_liveness(part.schedule).values()))
    assert saved == sorted(set(saved), reverse=True)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[1] > peaks[3]
