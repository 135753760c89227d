"""Allocate the parameters and buffers of a model on ``meta``, on the host, and fill them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_compile.errors import OptionError


def materialize(model: nn.Module, init: Callable[[nn.Module], None] | str | os.PathLike[str] | None) -> None:
    """Fill what is on ``meta`` by ``init``; see ``prepare``.

    If ``init`` raises, what was on ``meta`` is there again.

    Raises:
        OptionError: If something is on ``meta`` without ``init``, or a file lacks a tensor or has one of another shape.
    """
    modules = [module for module in model.modules() if _on_meta(module)]
    if not modules:
        return
    if init is None:
        name = next(name for name, tensor in _named_tensors(model) if tensor.is_meta)
        raise OptionError(f"init: {name} is on the meta device: pass init=FUNCTION or init=PATH of a safetensors file")
    with contextlib.ExitStack() as undo:
        if callable(init):
            for module in modules:
                _allocate(module, undo)
                with torch.no_grad():
                    init(module)
        else:
            _load(model, modules, Path(init), undo)
        undo.pop_all()


def _on_meta(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def _named_tensors(model: nn.Module, *, every_name: bool = False) -> list[tuple[str, torch.Tensor]]:
    once = not every_name
    return [*model.named_parameters(remove_duplicate=once), *model.named_buffers(remove_duplicate=once)]


def _allocate(module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Give a module's own tensors on ``meta`` host memory; Parameters stay the objects that the optimizer holds."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            _move(parameter, "cpu")
            undo.callback(_move, parameter, "meta")
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
            undo.callback(module._buffers.__setitem__, name, buffer)


def _move(parameter: nn.Parameter, device: str) -> None:
    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]


def _load(model: nn.Module, modules: list[nn.Module], path: Path, undo: contextlib.ExitStack) -> None:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise OptionError("init: loading a file needs the package safetensors: pip install safetensors") from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise OptionError(f"init={str(path)!r}: no safetensors file there")
    open_files = [safe_open(str(file), framework="pt") for file in files]
    where: dict[str, Any] = {key: file for file in open_files for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
    found = _find(model, where)
    for module in modules:
        _allocate(module, undo)
    tensors = dict(_named_tensors(model))
    with torch.no_grad():
        for name, key in found.items():
            tensors[name].copy_(where[key].get_tensor(key))


def _find(model: nn.Module, where: dict[str, Any]) -> dict[str, str]:
    """Return the key in the files of every tensor on ``meta``; a tied one is saved under any of its names."""
    names: dict[int, list[str]] = {}
    tensors = _named_tensors(model, every_name=True)
    for name, tensor in tensors:
        if tensor.is_meta:
            names.setdefault(id(tensor), []).append(name)
    found = {}
    for name, tensor in tensors:
        if not tensor.is_meta or names[id(tensor)][0] != name:
            continue
        key = next((each for each in names[id(tensor)] if each in where), None)
        if key is None:
            kind = "" if isinstance(tensor, nn.Parameter) else "; a buffer that is not saved must be on the CPU before"
            raise OptionError(f"init: the file has no tensor {name}{kind}")
        shape = tuple(where[key].get_slice(key).get_shape())
        if shape != tuple(tensor.shape):
            raise OptionError(f"init: {key} is {shape} in the file and {tuple(tensor.shape)} in the model")
        found[name] = key
    return found
