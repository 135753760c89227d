"""Two hundred steps of a prepared bf16 model against the same graphs with a reference AdamW on fp32 masters."""

from __future__ import annotations

import copy

import pytest
import torch
from support.compare import compile_model
from support.prepared import EPS, Stack, adamw, assert_close, batch, forced, prepared
from torch import Tensor, nn

STEPS = 200


def data(seed: int) -> Tensor:
    return batch(seed % 11, rows=8).bfloat16()


def reference(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Train a copy through the same backend, not prepared; return the losses and the masters."""
    own, masters = copy.deepcopy(model), copy.deepcopy(model).float()
    compiled, optimizer = compile_model(own), torch.optim.AdamW(masters.parameters(), lr=1e-3, eps=EPS)
    losses = []
    for seed in range(STEPS):
        loss = compiled(data(seed))
        loss.backward()
        losses.append(loss.detach())
        for p, master in zip(own.parameters(), masters.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(own.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    return torch.stack(losses), list(masters.parameters())


@pytest.mark.timeout(900)
def test_two_hundred_steps() -> None:
    model = Stack(blocks=2).bfloat16()
    losses, masters = reference(model)
    trainee = prepared(model, forced(chunk_bytes=1_000), lambda m: adamw(m, lr=1e-3), data)
    found = trainee.steps(*range(STEPS))
    assert trainee.managed.packed.mode == "in_backward"
    assert_close("losses", found, losses, rtol=1e-3)
    states = trainee.optimizer.state_dict()["state"]
    for number, master in enumerate(masters):
        assert_close("master", states[number]["protrain_master"], master.detach(), rtol=1e-3)
    assert float(found[-1]) < float(found[0])
