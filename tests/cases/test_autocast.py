"""Case 7: bf16 autocast with an fp32 island, and a loss times 16384."""

from __future__ import annotations

import copy

import pytest
import torch
from support.compare import Result, alternating, assert_bitwise, check_plans, compile_model, run_step
from support.models import GPT, Llama, tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan

# bf16 has 8 bits of mantissa: eager rounds after every operation; decompositions (gelu, layer norm, softmax) round
# after fewer. Gradients are sums of terms that differ by up to 2**-8 of the largest.
BF16 = {"rtol": 2e-2, "atol": 2e-2}


class Island(nn.Module):
    """A norm that computes in fp32 whatever the autocast state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x.float()
            return y + self.inner(y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def build() -> nn.Module:
    model = GPT(4)
    for block in model.blocks:
        block.ln_1 = nn.Sequential(block.ln_1, Island(32))
    return model


def outside(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(tokens()).float()


def test_autocast_around_the_call() -> None:
    schedule = check_plans(build(), outside, blocks=4, **BF16)
    kept = [n.meta["val"] for n in schedule.graphs["backward"].graph.find_nodes(op="placeholder")]
    assert any(value.dtype == torch.bfloat16 for value in kept if isinstance(value, Tensor))


def test_autocast_inside_forward() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(ids).float()

    check_plans(Inside(), lambda m: m(tokens()), blocks=4, **BF16)


def test_scaled_loss() -> None:
    """Gradients of the loss times 16384 are finite and 16384 times the others to the last bit (a power of two)."""
    model = build()
    compiled = compile_model(model)
    plain = run_step(compiled, outside, owner=model)
    for plan in (Plan.uniform(), Plan.uniform("recompute"), alternating(4)):
        protrain_compile.schedule(compiled).use(plan)
        scaled = run_step(compiled, lambda m: outside(m) * 16384, owner=model)
        expected = {name: None if g is None else g * 16384 for name, g in plain.gradients.items()}
        assert_bitwise(scaled, Result(plain.loss * 16384, expected, plain.buffers))
        assert all(g is None or g.isfinite().all() for g in scaled.gradients.values())


def test_backward_outside_autocast_recomputes_inside() -> None:
    """The backward, and with it the recompute, is called with autocast off or with another type: same bits."""
    model = build()
    compiled = compile_model(model, plan=Plan.uniform("recompute"))
    results = []
    for around in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.float16)):
        model.zero_grad()
        loss = outside(compiled)
        with around:
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    protrain_compile.schedule(compiled).use(Plan.uniform())
    keep = run_step(compiled, outside, owner=model)
    for one, other in zip(results[0], keep.gradients.values(), strict=True):
        assert torch.equal(one, other)


def test_no_gradient_for_unused_casts() -> None:
    """Autocast on and off are two compiled entries; both are right."""
    model = build()
    compiled = compile_model(model)
    run_step(compiled, outside, owner=model)
    plain = run_step(compiled, lambda m: m(tokens()), owner=model)
    eager = run_step(copy.deepcopy(model), lambda m: m(tokens()))
    torch.testing.assert_close(plain.loss, eager.loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whole_model_in_another_type(dtype: torch.dtype) -> None:
    model = Llama(3).to(dtype)
    # fp64 shows that nothing is rounded to fp32 on the way.
    tolerance = BF16 if dtype == torch.bfloat16 else {"rtol": 1e-10, "atol": 1e-10}
    check_plans(model, lambda m: m(tokens()).float(), blocks=3, **tolerance)
