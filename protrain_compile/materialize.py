"""Allocate the parameters and buffers of a model on ``meta``, on the host, and fill them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_compile.errors import OptionError


def materialize(model: nn.Module, init: Callable[[nn.Module], None] | str | os.PathLike[str] | None) -> None:
    """Fill what is on ``meta`` by ``init``; see ``prepare``.

    Raises:
        OptionError: If something is on ``meta`` without ``init``, or a file lacks a tensor or has one of another shape.
    """
    modules = [module for module in model.modules() if _on_meta(module)]
    if not modules:
        return
    if init is None:
        name = next(name for name, tensor in _named_tensors(model) if tensor.is_meta)
        raise OptionError(f"init: {name} is on the meta device: pass init=FUNCTION or init=PATH of a safetensors file")
    if callable(init):
        for module in modules:
            _allocate(module)
            with torch.no_grad():
                init(module)
        return
    _load(model, modules, Path(init))


def _on_meta(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _allocate(module: nn.Module) -> None:
    """Give a module's own tensors on ``meta`` host memory; Parameters stay the objects that the optimizer holds."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            made = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _load(model: nn.Module, modules: list[nn.Module], path: Path) -> None:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise OptionError("init: loading a file needs the package safetensors: pip install safetensors") from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise OptionError(f"init={str(path)!r}: no safetensors file there")
    names = {id(module): name for name, module in model.named_modules()}
    open_files = [safe_open(str(file), framework="pt") for file in files]
    where = {key: file for file in open_files for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
    for module in modules:
        prefix = names[id(module)]
        _allocate(module)
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for local, tensor in own:
            _fill(tensor, f"{prefix}.{local}" if prefix else local, where, local in module._non_persistent_buffers_set)


def _fill(tensor: torch.Tensor, name: str, where: dict[str, Any], optional: bool) -> None:
    if name not in where:
        if optional:
            raise OptionError(f"init: buffer {name} is not saved in files; make it on the CPU before prepare")
        raise OptionError(f"init: the file has no tensor {name}")
    value = where[name].get_tensor(name)
    if value.shape != tensor.shape:
        raise OptionError(f"init: {name} is {tuple(value.shape)} in the file and {tuple(tensor.shape)} in the model")
    with torch.no_grad():
        tensor.copy_(value)
