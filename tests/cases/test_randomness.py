"""Case 3: dropout, attention dropout and noise: what the backward uses is what the forward drew."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import (
    Result,
    alternating,
    assert_bitwise,
    assert_same,
    check_plans,
    compile_model,
    run_step,
    turns,
)
from support.models import GPT, WIDTH, GPTBlock, tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan


class NoisyBlock(GPTBlock):
    """Dropout, attention dropout and randn noise in one block."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.3) -> None:
        super().__init__(width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + 0.1 * torch.randn_like(x) * x + 0.1 * torch.rand(x.shape[-1])


def step(model: nn.Module) -> Tensor:
    return model(tokens())


@pytest.mark.parametrize("block", [GPTBlock, NoisyBlock])
def test_draws_are_those_of_the_traced_graph(block: type[GPTBlock]) -> None:
    """Run op by op, the draws come in trace order: losses and gradients equal those of stock AOT's same operations.

    (Eager itself fills a dropout mask by another operation than the decomposition does, so it draws other numbers.)
    """
    model = GPT(4, dropout=0.3, block=block)
    stock = copy.deepcopy(model)
    expected = run_step(torch.compile(stock, backend="aot_eager_decomp_partition"), step, owner=stock)
    torch._dynamo.reset()
    check_plans(model, step, blocks=4, eager=expected)


def test_two_steps_differ() -> None:
    model = compile_model(GPT(3, dropout=0.3), plan=Plan.uniform("recompute"))
    torch.manual_seed(0)
    assert model(tokens()) != model(tokens())


class MaskBlock(nn.Module):
    """A block in which each mask can be read off a forward value and, independently, off a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.eye(8)), nn.Parameter(torch.eye(8))
        self.dropped, self.noisy = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
        self.value = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, direction: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        dropped = F.dropout(self.dropped, 0.5)
        noise = self.noisy * torch.randn(8, 8)
        q = torch.zeros(1, 1, 8, 8)
        attended = F.scaled_dot_product_attention(q, q, self.value[None, None], dropout_p=0.5)[0, 0]
        total = dropped.sum() + noise.sum() + (attended * direction).sum()
        return (x @ self.weight) @ self.other + total, (dropped, noise, attended)


class Masks(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MaskBlock() for _ in range(blocks))

    def forward(self, x: Tensor, direction: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        seen = []
        for block in self.blocks:
            x, values = block(x, direction)
            seen.append(values)
        return x, seen


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_mask_of_the_backward_is_the_mask_of_the_forward(mode: str) -> None:
    model, direction = Masks(), torch.randn(8, 8)
    compiled = compile_model(model, compile=mode)
    for policy in ("keep", "recompute_pointwise", "recompute_products", "recompute", "swap"):
        if policy != "keep":
            protrain_compile.schedule(compiled).use(Plan.uniform(policy))
        model.zero_grad()
        out, seen = compiled(torch.zeros(8, 8), direction)
        assert protrain_compile.schedule(compiled).plan.policies == (policy,) * 3
        out.mean().backward()
        for block, (dropped, noise, attended) in zip(model.blocks, seen, strict=True):
            assert 0 < (dropped == 0).sum() < 64
            assert 0 < (attended == 0).sum() < 64
            torch.testing.assert_close(block.dropped.grad, dropped.detach())
            torch.testing.assert_close(block.noisy.grad, noise.detach())
            # v is the identity, so the output is the dropped attention matrix.
            torch.testing.assert_close(block.value.grad, attended.detach().T @ direction)
        assert not torch.equal(seen[0][0], seen[1][0]), "two blocks drew the same mask"


class BranchBlock(nn.Module):
    """Draws in a branch of a ``cond`` and in an operator of its own that writes its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = torch.cond(x.sum() < 1e9, lambda h: F.dropout(h, 0.5).sin(), lambda h: h.sin(), (hidden,))
        mask = torch.empty_like(hidden)
        torch.ops.protrain_tests.draw(mask)
        return x + self.down((hidden * mask).sin())  # type: ignore[no-any-return]


@torch.library.custom_op("protrain_tests::draw", mutates_args={"out"}, tags=[torch.Tag.nondeterministic_seeded])
def draw(out: Tensor) -> None:
    out.copy_(torch.rand_like(out))


def test_draws_inside_higher_order_operators() -> None:
    model = nn.Sequential(*(BranchBlock() for _ in range(3)))
    compiled = compile_model(model)

    def run(module: nn.Module) -> Tensor:
        return module(torch.ones(2, 8)).square().mean()  # type: ignore[no-any-return]

    keep = run_step(compiled, run, owner=model)
    for policy in ("recompute", "swap_products"):
        protrain_compile.schedule(compiled).use(Plan.uniform(policy))
        assert_bitwise(run_step(compiled, run, owner=model), keep)


def test_inductor_plans_agree() -> None:
    """Inductor draws from seeds; all plans draw the same, and with dropout off the model is eager's."""
    model = GPT(3, dropout=0.3)
    compiled = compile_model(model, compile="inductor")
    results: list[Result] = []
    for plan in (Plan.uniform(), Plan.uniform("recompute"), alternating(3), Plan.uniform("swap"), turns(3)):
        if results:
            protrain_compile.schedule(compiled).use(plan)
        results.append(run_step(compiled, step, owner=model))
    for other in results[1:]:
        assert_bitwise(other, results[0])
    again = run_step(compiled, step, owner=model, seed=1)
    assert again.loss != results[0].loss
    schedule = protrain_compile.schedule(compiled)
    assert schedule.parts[0].graph.program.structures <= 4
    model.eval()
    assert_same(run_step(compiled, step, owner=model), run_step(model, step))
