"""Losses in slices on a CUDA device: those of eager, in less memory than a whole loss takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.backend import protrain as backend

pytestmark = pytest.mark.gpu
WIDTH = 64


class Speaker(nn.Module):
    """An embedding, a norm and a projection; returns the logits as well if asked to."""

    def __init__(self, words: int, *, tied: bool, returning: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.returning = returning
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        logits = self.head(self.norm(self.embed(tokens)))
        labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return (loss, logits) if self.returning else loss


def make(words: int, dtype: torch.dtype, **arguments: bool) -> Speaker:
    torch.manual_seed(0)
    return Speaker(words, **arguments).to("cuda", dtype)


def compiled(model: nn.Module, loss: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    plan = Plan.uniform("keep", loss=loss)
    return torch.compile(model, backend=backend, options={"plan": plan, "schedule": "off"})


def batch(words: int, seed: int = 0, rows: int = 8) -> Tensor:
    """Tokens that no slice divides."""
    return torch.randint(words, (rows, 133), generator=torch.Generator().manual_seed(seed)).cuda()


def run(model: nn.Module, function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = function()
    loss.backward()
    return loss.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]


def distances(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True)]


@pytest.mark.parametrize("words", [5120, 5003], ids=["aligned", "padded"])
@pytest.mark.parametrize("tied", [False, True], ids=["free", "tied"])
@pytest.mark.parametrize("returning", [False, True], ids=["loss", "logits too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_eager(words: int, tied: bool, returning: bool, dtype: torch.dtype) -> None:
    """In bf16 at most twice as far from exact gradients as eager's are: a sum is rounded once for each slice."""
    model = make(words, dtype, tied=tied, returning=returning)
    tokens = batch(words)
    function = compiled(model, "sliced")
    take: Callable[[Any], Tensor] = (lambda made: made[0]) if returning else (lambda made: made)
    loss, found = run(model, lambda: take(function(tokens)))
    wanted, eager = run(model, lambda: take(model(tokens)))
    assert protrain_compile.schedule(function).parts[0].schedule.loss_slices > 1
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)  # an fp32 loss of the same logits
    exact = copy.deepcopy(model).double()
    truth = run(exact, lambda: take(exact(tokens)))[1]
    for mine, theirs in zip(distances(found, truth), distances(eager, truth), strict=True):
        assert mine <= (1e-5 if dtype == torch.float32 else 2 * theirs)


def test_two_forwards_before_their_backwards() -> None:
    model = make(5120, torch.float32, tied=True)
    function = compiled(model, "sliced")
    tokens = [batch(5120, seed) for seed in (1, 2)]
    loss, found = run(model, lambda: function(tokens[0]) + 2 * function(tokens[1]))
    wanted, eager = run(model, lambda: model(tokens[0]) + 2 * model(tokens[1]))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)  # fp32 losses, added up in another order
    assert max(distances(found, eager)) < 1e-5  # fp32 sums in another order


def peak(loss: str) -> int:
    """Return the most bytes that a step takes beyond what was there."""
    model = make(32000, torch.bfloat16, tied=False)
    tokens = batch(32000, rows=64)
    function = compiled(model, loss)
    run(model, lambda: function(tokens))
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(tokens).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_slices_take_less_than_the_whole() -> None:
    """8,512 tokens and 32,000 words are 545 MB of logits, of which slices and window have 5/16 at once."""
    assert peak("sliced") < 0.5 * peak("whole")
