"""Hand-made GPT-2-like and Llama-like models: keep, recompute and mixed plans against eager."""

from __future__ import annotations

import pytest
from support.compare import check_plans
from support.models import GPT, Llama, tokens

MODELS = {
    "gpt_tied": lambda: GPT(4),
    "gpt": lambda: GPT(4, tied=False),
    "two_blocks": lambda: GPT(2),
    "llama": lambda: Llama(4),
}


@pytest.mark.parametrize("name", MODELS)
def test_plans_equal_eager(name: str) -> None:
    check_plans(MODELS[name](), lambda m: m(tokens()), blocks=2 if name == "two_blocks" else 4, templates=4)


def test_one_block_is_one_segment() -> None:
    schedule = check_plans(GPT(1), lambda m: m(tokens()), blocks=0, templates=1)
    assert "note      no repeated blocks" in schedule.render()


def test_depth_does_not_add_templates() -> None:
    shallow = check_plans(Llama(3), lambda m: m(tokens()), blocks=3)
    deep = check_plans(Llama(7), lambda m: m(tokens()), blocks=7)
    assert deep.parts[0].graph.program.structures == shallow.parts[0].graph.program.structures
    assert deep.parts[0].graph.compiled_artefacts == shallow.parts[0].graph.compiled_artefacts
