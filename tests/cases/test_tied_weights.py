"""Case 4: one tensor used in several places: its gradient is the sum of all uses."""

from __future__ import annotations

import torch
from support.compare import check_plans
from support.models import GPT, VOCABULARY, Llama, tokens
from torch import Tensor, nn


def step(model: nn.Module) -> Tensor:
    return model(tokens())


def test_head_and_embedding() -> None:
    model = GPT(4, tied=True)
    schedule = check_plans(model, step, blocks=4)
    assert model.head.weight is model.embed.weight
    names = [source.name for source in schedule.parts[0].graph.program.inputs if source.trainable]
    assert len(names) == len(list(model.parameters()))


def test_weight_shared_by_two_blocks() -> None:
    model = Llama(4)
    model.layers[3].up.weight = model.layers[0].up.weight
    check_plans(model, step, blocks=4, templates=6)


def test_every_block_shares_one_module() -> None:
    model = GPT(4)
    for block in model.blocks:
        block.up = model.blocks[0].up
    check_plans(model, step, blocks=4, templates=6)


def test_buffer_shared_by_blocks() -> None:
    """A mask held as a buffer by every block arrives as one graph input."""

    class Masked(GPT):
        def __init__(self) -> None:
            super().__init__(3)
            self.register_buffer("shift", torch.linspace(0, 1, 16)[:, None])
            for block in self.blocks:
                block.register_buffer("shift", self.shift)
                block.register_forward_hook(lambda module, _, y: y + module.shift)

    check_plans(Masked(), step, blocks=3)


def test_one_storage_under_two_parameters() -> None:
    """Two Parameters that view one tensor are two inputs; each gets the gradient of its own use."""
    flat = torch.randn(2 * VOCABULARY * 32) * 0.1
    model = GPT(3, tied=False)
    model.embed.weight = nn.Parameter(flat[: VOCABULARY * 32].view(VOCABULARY, 32))
    model.head.weight = nn.Parameter(flat[VOCABULARY * 32 :].view(VOCABULARY, 32))
    check_plans(model, step, blocks=3)
