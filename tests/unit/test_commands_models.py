"""What MODEL on the command line stands for."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from support import light
from torch import Tensor, nn

from protrain_compile import OptionError
from protrain_compile.commands.models import resolve
from protrain_compile.commands.trace import Inputs

TINY = "gpt2:n_embd=16,n_layer=3,n_head=2,vocab_size=32,n_positions=16"


def test_architecture_with_sizes() -> None:
    source = resolve(TINY)
    assert source.depth == 3
    model, inputs = source.build(2, 8, None, None)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert len(model.transformer.h) == 3
    assert model.training
    assert inputs.named["input_ids"].shape == inputs.named["labels"].shape == (2, 8)


def test_fewer_blocks_and_another_dtype() -> None:
    source = resolve(TINY)
    model, _ = source.build(2, 8, torch.float32, 2)
    assert len(model.transformer.h) == 2
    assert next(model.parameters()).dtype == torch.float32
    assert len(source.build(2, 8, None, None)[0].transformer.h) == 3, "the configuration was changed"


def test_config_file_and_folder(tmp_path: Path) -> None:
    fields = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        model, _ = resolve(name).build(1, 4, None, None)
        assert type(model).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize("fields", [{"num_layers": 2}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_blocks_that_differ_have_no_depth(fields: dict[str, object], tmp_path: Path) -> None:
    """Encoder-decoders, and models with kinds of layers: a model of fewer blocks may have others."""
    kind = {"num_layers": "t5"}.get(next(iter(fields)), "qwen2")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2, **fields}))
    assert resolve(str(tmp_path)).depth is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing", "'nothing' is no architecture of transformers"),
        ("gpt2:n_layre=3,n_head=2", "gpt2 has no size n_layre"),
        ("gpt2:n_layer=3,n_head", "'n_head' is no size; write gpt2:name=value"),
        ("missing.json", "MODEL missing.json: No such file or directory; give a Hugging Face config.json"),
        ("clip", "clip is no language model; give a `module:function`"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("json:__name__", "not a function"),
        ("platform:system", "returned a str instead of a torch.nn.Module"),
    ],
)
def test_bad_models(model: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(model).build(1, 4, None, None)
    assert message in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in (("{", "not JSON"), ("[]", "no `model_type`"), ('{"a": 1}', "no `model_type`")):
        path.write_text(text)
        with pytest.raises(OptionError, match=message):
            resolve(str(path))


def test_too_long_a_sequence() -> None:
    with pytest.raises(OptionError, match=r"--seq 17: .* has max_position_embeddings=16"):
        resolve(TINY).build(1, 17, None, None)


def build_light() -> nn.Module:
    return light.GPT(2)


def build_with_inputs(batch: int, seq: int) -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 3), torch.zeros(batch, seq, 4)


def test_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_here")
    module.build_light, module.build_with_inputs = build_light, build_with_inputs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    model, inputs = resolve("made_here:build_light").build(3, 5, None, None)
    assert all(p.is_meta for p in model.parameters())
    assert inputs.positional[0].shape == (3, 5)
    model, inputs = resolve("made_here:build_with_inputs").build(3, 5, torch.bfloat16, None)
    assert model.weight.dtype == torch.bfloat16
    assert inputs.positional[0].shape == (3, 5, 4)
    assert not inputs.positional[0].is_meta


def test_inputs() -> None:
    x = torch.zeros(2)
    assert Inputs.of(x).positional == (x,)
    assert Inputs.of((x, 3)).positional[1] == 3
    assert Inputs.of({"x": x}).named["x"] is x


def test_transformers_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match="pip install transformers"):
        resolve("gpt2")


def build_own() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 3), torch.zeros(2, 4)


def test_a_function_with_inputs_of_its_own_decides_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_here")
    for function in (build_light, build_with_inputs, build_own):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "made_here", module)
    for name in ("build_light", "build_with_inputs"):
        assert resolve(f"made_here:{name}").sizes(3, None, (8, 16)) == (3, 16)
    own = resolve("made_here:build_own")
    assert own.own_sizes() == {"batch", "seq"}
    assert own.sizes(None, None, (8, 16)) == (8, 16)
    with pytest.raises(OptionError, match=r"--batch 64: made_here:build_own returns its own inputs; let it take"):
        own.sizes(64, None, (8, 16))
    assert resolve(TINY).own_sizes() == frozenset()
