"""Text from a trained model."""

from __future__ import annotations

import torch

from protrain_compile.demo.model import GPT

TEMPERATURE = 0.6
"""Below 1, unlikely bytes become rarer still: steadier text from a model that has seen little."""


@torch.no_grad()
def generate(model: GPT, prompt: bytes, *, count: int, seed: int) -> bytes:
    """Return `prompt` and `count` bytes that `model` continues it with.

    Every byte is drawn from a full forward: at the demo's size that is quicker than keeping a cache would be long.
    """
    device = model.token_embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window = torch.tensor([text[-model.max_length :]], device=device)
        scores = model.logits(window)[0, -1].float().cpu() / TEMPERATURE
        text.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
    return bytes(text)
