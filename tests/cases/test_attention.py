"""Case 25: attention kinds: SDPA causal (every other test), with float mask, with dropout; flex attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import check_plans, compile_model
from support.models import GPT, WIDTH, GPTBlock, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import protrain_compile


def step(model: nn.Module) -> Tensor:
    return model(tokens())


class AttentionBlock(GPTBlock):
    """Replaces the attention kernel by ``attend``."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention.qkv(self.ln_1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.attention.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class FloatMask(AttentionBlock):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
        mask = torch.where(distance < 0, -torch.inf, -0.1 * distance)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class BoolMask(AttentionBlock):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class LearnedBias(AttentionBlock):
    """A mask that needs a gradient takes SDPA's composite road."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)
        self.bias = nn.Parameter(torch.randn(4, 16, 16))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


class ByHand(AttentionBlock):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("block", [FloatMask, BoolMask, LearnedBias, ByHand])
def test_kinds(block: type[nn.Module]) -> None:
    check_plans(GPT(3, block=block), step, blocks=3)


@pytest.mark.parametrize("kernels", [["MATH"], ["FLASH_ATTENTION"]])
def test_kernel_choice(kernels: list[str]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def chosen(model: nn.Module) -> Tensor:
        with sdpa_kernel([getattr(SDPBackend, name) for name in kernels]):
            return model(tokens())

    check_plans(GPT(3), chosen, blocks=3)


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


class Flex(AttentionBlock):
    mask: Any = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=self.mask)


class FlexScore(AttentionBlock):
    """A score function that reads a tensor: the higher-order operation captures it."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, 4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = self.slopes

        def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return value - slopes[head] * (query - key)

        return flex_attention(q, k, v, score_mod=score)


@pytest.mark.parametrize("block", [Flex, FlexScore])
def test_flex_attention_inference(block: type[nn.Module]) -> None:
    """On CPU flex attention has no backward, in eager or compiled; tests/gpu has the training test."""
    model = GPT(3, block=block)
    for each in model.blocks:
        each.mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    with torch.no_grad():
        expected = model(tokens())
        compiled = compile_model(model)
        torch.testing.assert_close(compiled(tokens()), expected, rtol=1e-5, atol=1e-6)
    (part,) = protrain_compile.schedule(compiled).parts
    assert part.schedule.plan.policies == ("keep",) * 3
    assert part.graph.program.structures == 3
    targets = [str(n.target) for t in part.graph.program.templates for n in t.joint.graph.nodes]
    assert any("flex_attention" in target for target in targets)


def test_flex_attention_training_is_refused_as_in_eager() -> None:
    model = GPT(3, block=FlexScore)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        model(tokens())
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        compile_model(model)(tokens())
