"""Case 8: BatchNorm, a step counter, a cache list: updated once a forward, under every plan."""

from __future__ import annotations

import pytest
import torch
from support.compare import check_plans, compile_model
from support.light import GPT, WIDTH, Block
from support.models import tokens
from torch import Tensor, nn

from protrain_compile import Plan


def step(model: nn.Module) -> Tensor:
    return model(tokens())


def stack(block: type[Block], blocks: int = 3) -> GPT:
    model = GPT(blocks)
    model.blocks = nn.ModuleList(block() for _ in range(blocks))
    return model


class NormBlock(Block):
    """BatchNorm over the channels of a block."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


def test_batch_norm() -> None:
    schedule = check_plans(stack(NormBlock), step, blocks=3)
    mutated = [source.name for source in schedule.parts[0].graph.program.inputs if source.mutated]
    assert sum("running_mean" in name for name in mutated) == 3


class CountingBlock(Block):
    """Counts its calls in a buffer, and scales by the count: the backward needs the value before or after."""

    count: Tensor
    total: Tensor

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = super().forward(x * self.count)
        with torch.no_grad():
            self.total.add_(x.detach().sum((0, 1)))
        return x


def test_counters() -> None:
    check_plans(stack(CountingBlock), step, blocks=3)


def test_counter_advances_once_a_step() -> None:
    model = stack(CountingBlock)
    compiled = compile_model(model, plan=Plan.uniform("recompute"))
    for number in range(3):
        compiled(tokens()).backward()
        assert [block.count.item() for block in model.blocks] == [number + 2.0] * 3


class OldValueBlock(Block):
    """Uses a buffer and then changes it: the backward needs the value from before."""

    scale: Tensor

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.scale.clone())
        self.scale.mul_(1.01)
        return x


def test_backward_gets_the_value_from_before() -> None:
    schedule = check_plans(stack(OldValueBlock), step, blocks=3)
    assert "snapshot" in schedule.render(full=True)


class ReadThenChanged(nn.Module):
    """Eager refuses the backward of this: the product saves the very buffer that is changed after it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        self.scale.mul_(2)
        return x


def test_buffer_read_by_backward_and_mutated() -> None:
    """Tracing differentiates as eager does, so it raises what eager raises, at the first call."""
    x = torch.randn(2, 16, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ReadThenChanged()(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compile_model(ReadThenChanged())(x)


class CachingGPT(GPT):
    """Appends every block's input to a list, as caches do."""

    def __init__(self) -> None:
        super().__init__(3)
        self.cache: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self.remember)

    def remember(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.cache.append(inputs[0])


@pytest.mark.parametrize("policy", ["keep", "recompute", "swap"])
def test_list_appended_in_forward(policy: str) -> None:
    model = CachingGPT()
    eager = CachingGPT()
    eager.load_state_dict(model.state_dict())
    compiled = compile_model(model, plan=Plan.uniform(policy))
    for _ in range(2):
        model.cache.clear()
        eager.cache.clear()
        compiled(tokens()).backward()
        eager(tokens()).backward()
        assert len(model.cache) == 3
        for ours, theirs in zip(model.cache, eager.cache, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_mutated_input() -> None:
    """An argument that the forward changes in place is changed once."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                seen.add_(x.detach().sum())
            return x.sum()

    model = Fills()
    x, ours, theirs = torch.randn(2, 16, WIDTH), torch.zeros(()), torch.zeros(())
    compile_model(model, plan=Plan.uniform("recompute"))(x, ours).backward()
    model(x, theirs)
    torch.testing.assert_close(ours, theirs)
