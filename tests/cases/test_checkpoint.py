"""Case 24: the user's own ``torch.utils.checkpoint``: right gradients, and no more saved bytes than in eager."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_bitwise, assert_same, check_plans, compile_model, run_step
from support.models import GPT, WIDTH, GPTBlock, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import protrain_compile
from protrain_compile import Plan
from protrain_compile.schedule import Schedule
from protrain_compile.sizes import size_bytes


class CheckpointedBlock(GPTBlock):
    """Checkpoints its own inside."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class OuterCheckpoint(nn.Module):
    """Calls checkpoint around modules, as models with ``gradient_checkpointing`` do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = GPT(4, dropout=dropout)

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.inner
        x = inner.embed(ids[:, :-1])
        for block in inner.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = inner.head(inner.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class WithoutRegions(OuterCheckpoint):
    def forward(self, ids: Tensor) -> Tensor:
        inner = self.inner
        x = inner.embed(ids[:, :-1])
        for block in inner.blocks:
            x = block(x)
        return nn.functional.cross_entropy(inner.head(inner.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module) -> Tensor:
    return model(tokens())


def test_around_modules() -> None:
    check_plans(OuterCheckpoint(), step, blocks=4)


@pytest.mark.parametrize("every", [1, 2])
def test_inside_modules(every: int) -> None:
    model = GPT(4)
    for i in range(0, 4, every):
        model.blocks[i] = CheckpointedBlock()
    check_plans(model, step, blocks=4, templates=4 if every == 1 else 5)


def eager_saved_bytes(model: nn.Module) -> int:
    """Return the bytes of the distinct storages that eager's autograd keeps, less parameters and buffers."""
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step(model)
    assert loss.requires_grad
    return sum(kept.values())


def kept_bytes(schedule: Schedule) -> int:
    placeholders = schedule.graphs["backward"].graph.find_nodes(op="placeholder")
    return size_bytes(node.meta["val"] for node in placeholders if node.meta.get("kind") == "kept")


def test_saves_no_more_than_eager() -> None:
    """Under keep, the user's regions still drop what is inside them; under recompute nothing is added."""
    model = OuterCheckpoint()
    compiled = compile_model(model)
    run_step(compiled, step, owner=model)
    (part,) = protrain_compile.schedule(compiled).parts
    region_inputs = 4 * 2 * 16 * WIDTH * 4  # eager keeps them outside of the hooks' sight
    kept = kept_bytes(part.schedule)
    assert kept <= eager_saved_bytes(model) + region_inputs
    assert kept_bytes(part.graph.schedule_for(Plan.uniform("recompute"))) <= kept
    plain = WithoutRegions()
    run_step(compile_model(plain), step, owner=plain)
    (without,) = protrain_compile.schedule(plain).parts
    assert kept < 0.5 * kept_bytes(without.schedule)


def test_with_dropout() -> None:
    """Masks drawn in a region are those of its recompute: gradients equal stock AOT's of the model without regions."""
    model, plain = OuterCheckpoint(dropout=0.3), WithoutRegions(dropout=0.3)
    plain.load_state_dict(model.state_dict())
    compiled = compile_model(model)
    keep = run_step(compiled, step, owner=model)
    assert_same(keep, run_step(torch.compile(plain, backend="aot_eager_decomp_partition"), step, owner=plain))
    for policy in ("recompute_pointwise", "recompute_products", "recompute", "swap"):
        protrain_compile.schedule(compiled).use(Plan.uniform(policy))
        assert_bitwise(run_step(compiled, step, owner=model), keep)
