"""Models on ``meta``: filled by a function or from safetensors files, through ``prepare``."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support.models import GPT, tokens
from support.prepared import Stack, adamw, assert_same_values
from torch import nn

import protrain_compile
from protrain_compile import OptionError

safetensors = pytest.importorskip("safetensors.torch")


class Saved(Stack):
    """Has a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(3.0))


def on_meta(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("meta")


def test_from_a_function() -> None:
    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.5)
        for b in module.buffers(recurse=False):
            b.fill_(2)

    model = on_meta(Saved())
    parameters = list(model.parameters())
    model, _ = protrain_compile.prepare(model, adamw(model), init=init)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(bool((value == 0.5).all()) for name, value in model.state_dict().items() if name != "shift")
    assert bool((model.shift == 2).all())


@pytest.mark.parametrize("files", [1, 3])
def test_from_files(tmp_path: Path, files: int) -> None:
    source = Saved()
    values = list(source.state_dict().items())
    for number in range(files):
        safetensors.save_file(dict(values[number::files]), tmp_path / f"part{number}.safetensors")
    model = on_meta(source)
    path = tmp_path if files > 1 else tmp_path / "part0.safetensors"
    model, _ = protrain_compile.prepare(model, adamw(model), init=path)
    assert_same_values(model, source, rtol=0)


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tied_weights_are_saved_once(tmp_path: Path, kept: str) -> None:
    source = GPT(2)
    values = {n: v for n, v in source.state_dict().items() if n not in ("embed.weight", "head.weight") or n == kept}
    safetensors.save_file(values, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = GPT(2)
    model, _ = protrain_compile.prepare(model, adamw(model), init=tmp_path / "model.safetensors")
    assert model.head.weight is model.embed.weight
    assert_same_values(model, source, rtol=0)
    with torch.no_grad():
        assert torch.equal(model(tokens()), source(tokens()))


def test_only_what_is_on_meta_is_filled(tmp_path: Path) -> None:
    source, model = Stack(), Stack()
    model.blocks[1].to("meta")
    own = model.stem.weight.detach().clone()
    values = {name: value for name, value in source.state_dict().items() if name.startswith("blocks.1")}
    safetensors.save_file(values, tmp_path / "model.safetensors")
    model, _ = protrain_compile.prepare(model, adamw(model), init=tmp_path / "model.safetensors")
    assert torch.equal(model.state_dict()["stem.weight"], own)
    assert_same_values(model.blocks[1], source.blocks[1], rtol=0)


@pytest.mark.parametrize("wrong", ["missing", "shape", "no file", "none"])
def test_refused_files_leave_the_model_alone(tmp_path: Path, wrong: str) -> None:
    values = dict(Stack().state_dict())
    if wrong == "missing":
        del values["head.bias"]
    if wrong == "shape":
        values["head.bias"] = torch.zeros(4)
    safetensors.save_file(values, tmp_path / "model.safetensors")
    model = on_meta(Stack())
    optimizer = adamw(model)
    init = {"no file": tmp_path / "other", "none": None}.get(wrong, tmp_path / "model.safetensors")
    with pytest.raises(OptionError, match="init"):
        protrain_compile.prepare(model, optimizer, init=init)
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    assert type(optimizer) is torch.optim.AdamW
