"""A small byte-level GPT.

Nothing here knows of protrain: the blocks are found from the model's structure.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
"""Tokens are bytes."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer block: attention, then a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the perceptron make of the stream to it."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only transformer over bytes with learned positions and tied embeddings."""

    def __init__(self, *, blocks: int, width: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's scheme: small normal weights, smaller where a block writes to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            writes_to_stream = name.endswith(("attention.out.weight", "mlp.2.weight"))
            scale = (2 * len(self.blocks)) ** -0.5 if writes_to_stream else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte at every position of `tokens` (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a byte, of `targets` given `tokens`."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())
