"""Flex attention with a block mask, trained (on CPU it has no backward): equal to SDPA under every plan."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import alternating, assert_same, compile_model, run_step
from support.models import GPT, WIDTH, GPTBlock, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import protrain_compile
from protrain_compile import Plan
from protrain_compile.plan import POLICIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 128
SIZE = 16  # of a head; flex attention's kernels want at least this


class FlexBlock(GPTBlock):
    """Attends by flex attention if it has a mask, else by SDPA."""

    mask: BlockMask | None = None

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention.qkv(self.ln_1(x)).view(batch, length, 3, -1, SIZE).permute(2, 0, 3, 1, 4)
        if self.mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = flex_attention(q, k, v, block_mask=self.mask)
        x = x + self.attention.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def step(model: nn.Module) -> Tensor:
    return model(tokens(length=LENGTH + 1).cuda())


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_training_with_a_block_mask(mode: str) -> None:
    model = GPT(3, block=FlexBlock)
    model.positions = nn.Embedding(LENGTH, WIDTH)
    model.cuda()
    expected = run_step(copy.deepcopy(model), step)
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cuda")
    for block in model.blocks:
        block.mask = mask
    compiled = compile_model(model, compile=mode)
    step(compiled)
    for plan in (*map(Plan.uniform, POLICIES), alternating(3)):
        protrain_compile.schedule(compiled).use(plan)
        # fp32 through other kernels, whose products may go through tf32
        assert_same(run_step(compiled, step, owner=model), expected, rtol=1e-2, atol=1e-2)
    assert protrain_compile.schedule(compiled).parts[0].graph.program.structures == 3
