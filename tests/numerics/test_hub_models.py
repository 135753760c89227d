"""Tiny random ``transformers`` models: blocks, few templates, and keep, recompute and mixed plans against eager."""

from __future__ import annotations

import copy

import pytest
import torch
from support import hub
from support.compare import Step, assert_same, check_plans, compile_model, run_step

import protrain_compile
from protrain_compile import Plan

transformers = pytest.importorskip("transformers")

CAUSAL = ["llama", "gpt2", "opt", "mistral", "qwen3", "gemma", "mixtral"]
OTHERS: dict[str, Step] = {"bert": hub.causal_step, "vit": hub.vision_step}


@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_one_run_of_blocks(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(hub, name)(transformers)
    step = OTHERS.get(name, hub.causal_step)
    schedule = check_plans(model, step, blocks=hub.LAYERS, templates=3)
    assert len(set(schedule.parts[0].graph.program.block_names)) == hub.LAYERS
    assert schedule.render().startswith(f"protrain schedule: {type(model).__name__},")


def test_encoder_and_decoder() -> None:
    """The first and the last block of each stack differ (position bias; sums of gradients): 2 * 3 + 3 templates."""
    torch.manual_seed(0)
    schedule = check_plans(hub.t5(transformers), hub.encoder_decoder_step, blocks=7, templates=9)
    program = schedule.parts[0].graph.program
    assert [name.rpartition(".block.")[0] for name in program.block_names] == ["encoder"] * 4 + ["decoder"] * 3
    assert [stage.kind for stage in program.stages] == [
        "prologue",
        *["block"] * 4,
        "between",
        *["block"] * 3,
        "epilogue",
    ]


def test_experts_without_breaks() -> None:
    """Experts as one batched product: no list of experts that could be taken for blocks."""
    torch.manual_seed(0)
    model = hub.mixtral(transformers, "batched_mm")
    # Its backward accumulates with index_put, which adds in no fixed order on several threads.
    check_plans(model, hub.causal_step, blocks=hub.LAYERS, templates=3, bitwise=False)


def test_experts_that_break_the_graph() -> None:
    """A loop over the experts that were hit reads sizes back: graph breaks in every layer, right all the same."""
    torch.manual_seed(0)
    model = hub.mixtral(transformers, "eager")
    eager = run_step(copy.deepcopy(model), hub.causal_step)
    compiled = compile_model(model)
    for plan in (Plan.uniform(), Plan.uniform("recompute")):
        assert_same(run_step(compiled, hub.causal_step, owner=model), eager)
        protrain_compile.schedule(compiled).use(plan)
    schedule = protrain_compile.schedule(compiled)
    assert 1 < len(schedule.parts) <= 6
    assert "graph break" in schedule.render()
