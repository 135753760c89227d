"""Case 23: a graph break inside a block: still right, shared, and the report says where and why."""

from __future__ import annotations

import copy

import pytest
import torch
from support.compare import assert_same, compile_model, run_step
from support.light import GPT, Block
from support.models import tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan


def step(model: nn.Module) -> Tensor:
    return model(tokens())


class BreakingBlock(Block):
    """Breaks the graph in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(y))


class ItemBlock(Block):
    """Reads a number back, and branches on it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if y.abs().max().item() > 1e6:
            y = y * 0
        return x + self.down(torch.relu(y))


def stack(block: type[Block], blocks: int) -> GPT:
    model = GPT(blocks)
    model.blocks = nn.ModuleList(block() for _ in range(blocks))
    return model


@pytest.mark.parametrize("block", [BreakingBlock, ItemBlock])
@pytest.mark.parametrize("policy", ["keep", "recompute", "swap"])
def test_break_in_every_block(block: type[Block], policy: str) -> None:
    model = stack(block, 6)
    eager = run_step(copy.deepcopy(model), step)
    compiled = compile_model(model, plan=Plan.uniform(policy))
    for _ in range(2):
        assert_same(run_step(compiled, step, owner=model), eager)
    schedule = protrain_compile.schedule(compiled)
    bound = sum(len(part.bindings) for part in schedule.parts)
    assert len(schedule.parts) < 6 < bound, "the pieces of a block are not shared by all blocks"
    text = schedule.render()
    assert f"{len(schedule.parts)} graphs" in text
    assert "test_graph_breaks.py:" in text
    assert all(len(part.graph.contexts) == 0 for part in schedule.parts)


def test_report_names_the_reason() -> None:
    model = stack(BreakingBlock, 3)
    compiled = compile_model(model)
    compiled(tokens())
    reasons = [
        part.graph.origin for part in protrain_compile.schedule(compiled).parts if part.graph.origin.break_reason
    ]
    assert reasons
    assert all("graph_break" in origin.break_reason for origin in reasons)


def test_break_in_one_block() -> None:
    model = GPT(4)
    model.blocks[1] = BreakingBlock()
    eager = run_step(copy.deepcopy(model), step)
    compiled = compile_model(model)
    assert_same(run_step(compiled, step, owner=model), eager)
    protrain_compile.schedule(compiled).use(Plan.uniform("recompute"))
    assert_same(run_step(compiled, step, owner=model), eager)


def test_two_forwards_of_shared_pieces() -> None:
    """Twelve contexts of one compiled block are alive at once, in two forwards; backwards in either order."""
    model = stack(BreakingBlock, 6)
    eager = copy.deepcopy(model)
    expected = [run_step(eager, lambda m, i=i: m(tokens(seed=i))) for i in range(2)]
    compiled = compile_model(model)
    for order in ((0, 1), (1, 0)):
        losses = [compiled(tokens(seed=i)) for i in range(2)]
        for i in order:
            model.zero_grad()
            losses[i].backward()
            for (name, p), q in zip(model.named_parameters(), expected[i].gradients.values(), strict=True):
                torch.testing.assert_close(
                    p.grad, q, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )


def test_print_between_blocks() -> None:
    class Talks(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            loss = super().forward(ids)
            print("loss", loss.item())
            return loss * 2

    model = Talks(3)
    eager = run_step(copy.deepcopy(model), step)
    assert_same(run_step(compile_model(model), step, owner=model), eager)
