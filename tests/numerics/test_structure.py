"""Blocks are recognised from structure: shared blocks, containers of all kinds, hybrids, experts, nothing repeated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.compare import check_plans
from support.models import GPT, VOCABULARY, WIDTH, GPTBlock, tokens
from torch import Tensor, nn


class Frame(nn.Module):
    """Embedding, a body between, head and loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = body
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.body(self.embed(ids[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module) -> Tensor:
    return model(tokens())


class Repeated(nn.Module):
    """ALBERT-like: one block called several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.block, self.times = GPTBlock(), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return x


def test_one_block_called_several_times() -> None:
    schedule = check_plans(Frame(Repeated(4)), step, blocks=4)
    assert set(schedule.parts[0].graph.program.block_names) == {"body.block"}


def test_sequential() -> None:
    check_plans(Frame(nn.Sequential(*[GPTBlock() for _ in range(3)])), step, blocks=3)


def test_model_that_is_a_sequential() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *[GPTBlock() for _ in range(3)], nn.Linear(WIDTH, 1))
    check_plans(model, lambda m: m(tokens()).square().mean(), blocks=3)


class Named(nn.Module):
    """Blocks as attributes, and the order of the calls is not the order of the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = GPTBlock(), GPTBlock(), GPTBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def test_named_attributes() -> None:
    schedule = check_plans(Frame(Named()), step, blocks=3)
    assert schedule.parts[0].graph.program.block_names == ("body.first", "body.middle", "body.last")


def test_module_dict() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: GPTBlock() for name in ("a", "b", "c")})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    check_plans(Frame(Mapped()), step, blocks=3)


class Convolution(nn.Module):
    """A sequence mixer without attention, as in hybrid stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.into(self.norm(x)).chunk(2, dim=-1)
        mixed = self.mix(values.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out(mixed * gates.sigmoid())


def test_hybrid_stack() -> None:
    """Convolution and attention blocks in turn are six blocks of two structures."""
    body = nn.Sequential(*[GPTBlock() if i % 2 else Convolution() for i in range(6)])
    check_plans(Frame(body), step, blocks=6)


class Swish(torch.autograd.Function):
    """A function with a backward of its own, which computes on its saved value before it looks at the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradients[0] * (gate + x * gate * (1 - gate))


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Swish.apply(self.up(x)))  # type: ignore[no-any-return]


def test_functions_with_a_backward_of_their_own() -> None:
    check_plans(Frame(nn.Sequential(*(OwnBackward() for _ in range(4)))), step, blocks=4)


class Experts(nn.Module):
    """A dense mixture: every expert sees every token and the router weighs the results."""

    def __init__(self, width: int = WIDTH, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        top = weights.topk(2, dim=-1)
        weights = torch.zeros_like(weights).scatter(-1, top.indices, top.values)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class ExpertBlock(GPTBlock):
    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.experts(self.ln_2(x))


def test_experts_are_no_blocks() -> None:
    schedule = check_plans(GPT(3, block=ExpertBlock), step, blocks=3)
    assert schedule.parts[0].graph.program.block_names == ("blocks.0", "blocks.1", "blocks.2")


def test_single_layer_of_experts_has_no_blocks() -> None:
    schedule = check_plans(Frame(Experts()), step, blocks=0, templates=1)
    assert "no repeated blocks" in schedule.render()


def test_heads_side_by_side_are_no_blocks() -> None:
    """Siblings that all read the same value do not follow each other."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(GPTBlock() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.heads]).sum(0)

    check_plans(Frame(Heads()), step, blocks=0, templates=1)


def test_blocks_with_different_widths_inside() -> None:
    """A block that is not like its neighbours is still a block, with a template of its own."""
    blocks = [GPTBlock() for _ in range(4)]
    blocks[2].up, blocks[2].down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    check_plans(Frame(nn.Sequential(*blocks)), step, blocks=4)


class Skips(nn.Module):
    """U-shaped: later blocks add what earlier blocks made; a value leaves a block for blocks far behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.blocks):
            if i < 3:
                kept.append(x)
            else:
                x = x + kept.pop()
            x = block(x)
        return x


def test_skips_across_blocks() -> None:
    check_plans(Frame(Skips()), step, blocks=6, templates=8)


class Stages(nn.Module):
    """Swin-like: stages of blocks with a projection between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(GPTBlock(w), GPTBlock(w)) for w in (WIDTH, 2 * WIDTH))
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.stages[1](self.project(self.stages[0](x))))


def test_stages_of_blocks() -> None:
    schedule = check_plans(Frame(Stages()), step, blocks=4)
    assert schedule.parts[0].graph.program.block_names[-1] == "body.stages.1.1"


def test_every_layer_feeds_the_loss() -> None:
    """Deep supervision: each block's output reaches the loss, so tangents and gradients skip blocks."""

    class Supervised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(GPTBlock() for _ in range(4))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            x, loss = self.embed(ids[:, :-1]), torch.zeros(())
            for block in self.blocks:
                x = block(x)
                loss = loss + F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())
            return loss

    check_plans(Supervised(), step, blocks=4, templates=6)


def test_plain_mlp_and_function() -> None:
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    check_plans(mlp, lambda m: m(torch.ones(3, 8)).square().sum(), blocks=0, templates=1)
