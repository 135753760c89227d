"""A repeated block against a trace of the whole model: planning sees the same step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from protrain_compile.chunks import ParameterSpec
from protrain_compile.commands.deepen import SHALLOW, NotRepeatableError, deepen
from protrain_compile.commands.models import ModelSource, resolve
from protrain_compile.commands.trace import TracedModel, adamw_book, trace_model
from protrain_compile.packing import Preparation, lay_out, training_of
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.shape_reader import step_shape
from protrain_compile.step_shape import StepShape

PREPARATION = Preparation(torch.device("cpu"), None, HostBudget(), 1, None, None)
DEPTH = SHALLOW + 2
SIZES = {
    "llama": "hidden_size=64,num_attention_heads=4,num_key_value_heads=2,intermediate_size=96,vocab_size=256",
    "gpt2": "n_embd=64,n_head=4,vocab_size=256,n_positions=64,attn_pdrop=0,embd_pdrop=0,resid_pdrop=0",
}


def traced(source: ModelSource, blocks: int | None = None) -> TracedModel:
    torch._dynamo.reset()
    return trace_model(*source.build(2, 32, torch.float32, blocks), PREPARATION)


def shape_of(found: TracedModel) -> StepShape:
    layout = lay_out(found.specs, found.first_uses, found.read_as, 100_000)
    return step_shape(found.program, training_of(layout, found.places, found.specs, PREPARATION, found.book))


@pytest.mark.parametrize("architecture", SIZES)
def test_equals_the_whole_trace(architecture: str) -> None:
    """Llama: blocks share rotary tables; GPT-2: the head is tied to the embedding."""
    source = resolve(f"{architecture}:{SIZES[architecture]},num_hidden_layers={DEPTH}")
    whole = traced(source)
    model, _ = source.build(2, 32, torch.float32, None)
    specs = [ParameterSpec(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    deep = deepen(traced(source, SHALLOW), specs, adamw_book(model), DEPTH)
    assert deep.program.inputs == whole.program.inputs
    assert deep.program.block_names == whole.program.block_names
    assert deep.program.template_of == whole.program.template_of
    assert deep.specs == whole.specs
    assert deep.places == whole.places
    assert deep.first_uses == whole.first_uses
    assert shape_of(deep) == shape_of(whole)


def test_blocks_that_take_values_of_their_own_are_not_repeated() -> None:
    """With dropout, the prologue makes a seed for every block."""
    sizes = SIZES["gpt2"].replace("resid_pdrop=0", "resid_pdrop=0.1")
    source = resolve(f"gpt2:{sizes},num_hidden_layers={DEPTH}")
    shallow = traced(source, SHALLOW)
    with pytest.raises(NotRepeatableError):
        deepen(shallow, shallow.specs, shallow.book, DEPTH)
    other = dataclasses.replace(shallow, program=dataclasses.replace(shallow.program, segments=()))
    with pytest.raises(NotRepeatableError):
        deepen(other, shallow.specs, shallow.book, DEPTH)
