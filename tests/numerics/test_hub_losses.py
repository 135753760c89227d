"""Losses of ``transformers`` models, which return their logits too: which are sliced, and that they equal eager."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support import hub
from support.capture import capture
from support.compare import compile_model
from torch import Tensor, nn

import protrain_compile
from passes import structure_pipeline
from protrain_compile import Plan

transformers = pytest.importorskip("transformers")

IGNORED = -100
SLICED = Plan.uniform("keep", loss="sliced")


def gemma2(t: Any) -> nn.Module:
    """Its logits are softcapped, and returned so."""
    config = {**hub.DECODER, "head_dim": 8, "attn_implementation": "eager"}
    return t.Gemma2ForCausalLM(t.Gemma2Config(**config))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (4, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:9] = IGNORED
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("make", "found"),
    [(hub.llama, 1), (hub.mistral, 1), (hub.qwen3, 1), (hub.gemma, 1), (hub.gpt2, 1), (hub.opt, 1), (gemma2, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_which_are_sliced(make: Callable[[Any], nn.Module], found: int) -> None:
    """Shifted labels, heads of their own and tied ones; softcapped logits are left alone."""
    model = make(transformers)
    source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    if make is hub.opt and "if self.training and self.layerdrop" not in source:
        pytest.skip("this OPT draws for dropping layers that it does not drop, which breaks its graph")
    program = capture(model, **batch())
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    assert len(program.sliced) == found
    assert len(program.absent_tangents) == 1  # that of the logits


def test_padded_products_need_no_tangent() -> None:
    """Inductor pads a vocabulary that is not aligned, on GPUs; the tangent of the logits is padded with it."""
    from torch._inductor.fx_passes import pad_mm

    config = hub.gpt2(transformers).config
    config.vocab_size = 61
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    model.loss_type = "ForCausalLM"
    program = capture(model, **{name: value.clamp(max=60) for name, value in batch().items()})
    with (
        mock.patch.object(pad_mm, "should_pad", return_value=True),
        mock.patch.object(pad_mm, "check_device", return_value=True),
    ):
        structure_pipeline(inductor=True, inductor_draws=False).run(program)
    assert len(program.sliced) == 1
    assert len(program.absent_tangents) == 1


OWN_LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "loss": lambda out: out.loss,
    "both": lambda out: out.loss + 1e-2 * out.logits.float().logsumexp(-1).square().mean(),
    "logits": lambda out: out.logits.square().mean(),
}


@pytest.mark.parametrize("make", [hub.llama, hub.gpt2], ids=["own_head", "tied_head"])
def test_equals_eager(make: Callable[[Any], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make(transformers)
    compiled = compile_model(model, plan=SLICED)
    for loss in OWN_LOSSES.values():
        check(model, compiled, loss, batch())
    (part,) = protrain_compile.schedule(compiled).parts
    assert part.schedule.loss_slices > 1


def test_mean_over_the_items_of_several_batches() -> None:
    """As transformers' Trainer asks for it with gradient accumulation."""
    torch.manual_seed(0)
    model = hub.llama(transformers)
    compiled = compile_model(model, plan=SLICED)
    inputs = {**batch(), "num_items_in_batch": torch.tensor(150)}
    check(model, compiled, OWN_LOSSES["loss"], inputs)
    assert protrain_compile.schedule(compiled).parts[0].schedule.loss_slices > 1


def check(model: nn.Module, compiled: nn.Module, loss: Callable[[Any], Tensor], inputs: dict[str, Tensor]) -> None:
    """Compare loss, logits and gradients, each as one vector."""
    found, expected = (results(each, model, loss, inputs) for each in (compiled, model))
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) <= 1e-6 * float(theirs.norm())


def results(
    each: nn.Module, owner: nn.Module, loss: Callable[[Any], Tensor], inputs: dict[str, Tensor]
) -> list[Tensor]:
    owner.zero_grad()
    out = each(**inputs)
    value = loss(out)
    value.backward()
    gradients = torch.cat([p.grad.flatten() for p in owner.parameters() if p.grad is not None])
    return [value.detach(), out.logits.detach(), gradients.clone()]
