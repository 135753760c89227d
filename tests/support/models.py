"""Small transformers that the tests share; shapes are as small as the structure allows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64
WIDTH = 32
HEADS = 4


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.ln_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class GPT(nn.Module):
    """GPT-2-like: learned positions, LayerNorm, head tied to the embedding on request; returns logits and the loss."""

    def __init__(
        self,
        blocks: int = 4,
        *,
        width: int = WIDTH,
        dropout: float = 0.0,
        tied: bool = True,
        block: type[nn.Module] = GPTBlock,
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(128, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([block(width, dropout=dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = rotate(self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, width))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.attention = LlamaAttention(width, heads, kv_heads)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama-like: RMSNorm, rotary positions, SwiGLU, grouped keys and values, no biases."""

    cos: Tensor
    sin: Tensor

    def __init__(self, blocks: int = 4, *, width: int = WIDTH, heads: int = HEADS, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([LlamaBlock(width, heads, kv_heads) for _ in range(blocks)])
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(128.0), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs)
        cos, sin = self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tokens(batch: int = 2, length: int = 17, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)
