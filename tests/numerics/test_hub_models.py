"""Tiny random ``transformers`` models: blocks, few templates, and keep, recompute and mixed plans against eager."""

from __future__ import annotations

import pytest
import torch
from support import hub
from support.compare import Step, check_plans

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
