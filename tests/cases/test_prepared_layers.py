"""Layers that reach parameters through torch.nn.functional stay in one graph when their parameters are managed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import protrain_compile as protrain
from protrain_compile.backend import protrain as backend

WIDTH = 16


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Scale(nn.Module):
    """Operators, methods and stacks of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stacked = torch.stack(list(self.parts))
        return x * self.parts[0].sigmoid() + stacked.mean(0) - self.parts[1][:1] / (1 + self.parts[2].square().sum())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(5, 5),
    "prelu": nn.PReLU,
    "bilinear": lambda: Twice(nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "conv1d": lambda: nn.Conv1d(5, 5, 3, padding=1),
    "batch_norm": lambda: nn.BatchNorm1d(5),
    "attention": SelfAttention,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
    "scale": Scale,
}


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.layer(self.up(x))))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(Block(make) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_with_its_blocks_and_equal_to_eager(name: str) -> None:
    model = Model(LAYERS[name])
    reference = copy.deepcopy(model)
    plan = dataclasses.replace(protrain.Plan.uniform("recompute", "offloaded"), chunk_bytes=2048, buffers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = protrain.prepare(model, optimizer, plan=plan, device="cpu")
    options = {"compile": "eager", "schedule": "off"}
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
    for _ in range(3):
        tokens = torch.randint(0, 11, (4, 5))
        for function, stepped in ((compiled, optimizer), (reference, expected)):
            function(tokens).backward()
            stepped.step()
            stepped.zero_grad()
    (part,) = protrain.schedule(compiled).parts
    assert len(part.graph.program.block_names) == 3
    values = model.state_dict()
    for key, value in reference.state_dict().items():
        # Three AdamW steps of 1e-2 from gradients that sum in another order.
        torch.testing.assert_close(values[key], value, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.eval(), reference.eval()
        torch.testing.assert_close(compiled(tokens), reference(tokens), rtol=1e-4, atol=1e-5)
    assert len(protrain.schedule(compiled).parts) == 2
    assert all(len(each.graph.program.block_names) == 3 for each in protrain.schedule(compiled).parts)
