"""Blocks from torch and from other fields: encoders, diffusion transformers, convolutions, custom operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support import light
from support.compare import check_plans
from support.models import tokens
from torch import Tensor, nn

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    check_plans(model, lambda m: m(X).square().mean(), blocks=3)


def test_encoder_and_decoder() -> None:
    model = nn.Transformer(16, 4, 3, 3, 32, dropout=0.0, batch_first=True)
    check_plans(model, lambda m: m(X, X).square().mean(), blocks=6, templates=9)


class ConditionedBlock(light.Block):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(16, 48)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, -1)
        return x + gate * super().forward(x * (1 + scale) + shift)


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.out = nn.Linear(4, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(4))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        condition = F.silu(self.time(time))
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x).square().mean()


def test_diffusion_transformer() -> None:
    """Every block adds to the gradient of the condition: the first and last differ from those between."""
    time = torch.randn(2, 4)
    check_plans(DiffusionTransformer(), lambda m: m(X, time), blocks=4)


class ResidualConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.norm(self.first(x))))


def test_convolutions_in_channels_last() -> None:
    model = nn.Sequential(*[ResidualConvolution() for _ in range(4)]).to(memory_format=torch.channels_last)
    image = IMAGE.contiguous(memory_format=torch.channels_last)
    check_plans(model, lambda m: m(image).square().mean(), blocks=4)


@torch.library.custom_op("protrain_tests::count", mutates_args=("calls",))
def count(x: Tensor, calls: Tensor) -> Tensor:
    calls.add_(1)
    return x * 2


@count.register_fake
def _(x: Tensor, calls: Tensor) -> Tensor:
    return torch.empty_like(x)


class CountedBlock(light.Block):
    """Calls an operation of the user's that changes a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * count(x.detach(), self.calls).sigmoid()


def test_custom_operation_with_an_effect() -> None:
    model = light.GPT(3)
    model.blocks = nn.ModuleList(CountedBlock() for _ in range(3))
    check_plans(model, lambda m: m(tokens()), blocks=3)


def test_weight_norm() -> None:
    """The weight is computed from two parameters at each use."""
    model = light.GPT(3)
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
    check_plans(model, lambda m: m(tokens()), blocks=3)
