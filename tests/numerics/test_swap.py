"""Swap is keep, to the last bit, whatever a block saves."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_bitwise, assert_same, check_plans, compile_model, run_step, turns
from support.models import GPT, WIDTH, GPTBlock, tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan, swap_layout


class Odd(nn.Module):
    """Saves transposes, slices and expands of each other, booleans, integers, zero-size and non-contiguous values."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.square, self.gate = nn.Parameter(torch.randn(width, width) / 3), nn.Parameter(torch.randn(width))
        self.mix = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        wide = torch.tanh(x @ self.square)
        turned = wide.transpose(0, 1)
        sliced = torch.sin(wide[1:, ::2]) * turned[::2, 1:].t()
        column = torch.sigmoid(wide[:, :1] * self.gate[:1]).expand(-1, wide.shape[1])
        chosen = torch.where(wide > 0, wide * column, wide * self.gate)
        order = wide.argsort(dim=1)
        gathered = chosen.gather(1, order) * shared
        empty = torch.exp(wide[:0] * self.gate).sum()
        mixed = self.mix(torch.cat([turned.t(), gathered, chosen.flip(1)], dim=1))
        return x + mixed + F.pad(sliced, (0, x.shape[1] - sliced.shape[1], 1, 0)) + empty


class OddStack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList(Odd() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.tanh(self.stem(x))  # saved by every block
        for block in self.blocks:
            x = block(x, shared)
        return x.square().mean()


def odd_step(model: nn.Module) -> Tensor:
    return model(torch.randn(9, 8, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["every piece alone", "one bundle"])
def test_odd_values(small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_layout, "SMALL_BYTES", small_bytes)
    check_plans(OddStack(), odd_step, blocks=3)


def step(model: nn.Module) -> Tensor:
    return model(tokens())


class Body(nn.Module):
    """Blocks without an embedding, whose gradient Inductor adds up in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GPTBlock(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def body_step(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3)))


def test_compiled_by_inductor() -> None:
    model = Body()
    compiled = compile_model(model, compile="inductor")
    keep = run_step(compiled, body_step, owner=model)
    schedule = protrain_compile.schedule(compiled)
    artefacts = schedule.parts[0].graph.compiled_artefacts
    schedule.use(Plan.uniform("swap"))
    assert schedule.parts[0].graph.compiled_artefacts == artefacts, "swap runs what keep runs"
    assert_bitwise(run_step(compiled, body_step, owner=model), keep)
    schedule.use(turns(3))
    assert_bitwise(run_step(compiled, body_step, owner=model), keep)


def test_memory_on_the_host_is_steady() -> None:
    """From the second step on nothing is allocated; an abandoned forward and an exception give their slabs back."""
    model = GPT(3)
    compiled = compile_model(model, plan=Plan.uniform("swap"))
    run_step(compiled, step, owner=model)
    (part,) = protrain_compile.schedule(compiled).parts
    space = part.graph._swap
    assert space is not None
    assert space.host_bytes == sum(part.schedule.swapped_bytes)
    for _ in range(3):
        run_step(compiled, step, owner=model)
        loss = step(compiled)
        del loss
        gc.collect()
        assert space.slabs == space.free_slabs == 3


def test_two_forwards_in_flight_and_retained_graphs() -> None:
    model = GPT(3)
    eager = copy.deepcopy(model)
    compiled = compile_model(model, plan=Plan.uniform("swap"))
    losses = []
    for each in (eager, compiled):
        first, second = each(tokens(seed=1)), each(tokens(seed=2))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        losses.append((first + second).detach())
    torch.testing.assert_close(losses[1], losses[0])
    for actual, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-6)
    (part,) = protrain_compile.schedule(compiled).parts
    assert part.graph._swap is not None
    del first, second
    gc.collect()
    assert part.graph._swap.slabs == part.graph._swap.free_slabs == 6


def test_lengths_that_grow() -> None:
    """Slabs that have become too small are replaced, so there are no more of them than one forward uses."""
    model = GPT(3)
    compiled = compile_model(model, dynamic=True, plan=Plan.uniform("swap"))
    for length in (9, 17, 33, 5):
        batch = tokens(length=length)
        assert_same(run_step(compiled, lambda m, b=batch: m(b), owner=model), run_step(model, lambda m, b=batch: m(b)))
    for part in protrain_compile.schedule(compiled).parts:
        assert part.graph._swap is not None
        assert part.graph._swap.slabs == 3
