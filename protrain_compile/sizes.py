"""Bytes of fake values, counting storage shared by several tensors once."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

SymbolValues = Mapping[Any, int]
"""A number for each symbol of symbolic sizes."""

_at: contextvars.ContextVar[SymbolValues] = contextvars.ContextVar("protrain_sizes_at", default=MappingProxyType({}))


@contextlib.contextmanager
def sizes_at(values: SymbolValues) -> Iterator[None]:
    """Let sizes be those for ``values`` of their symbols, instead of those that they were traced with."""
    token = _at.set(values)
    try:
        yield
    finally:
        _at.reset(token)


def hint(value: Any) -> int:
    """Return a size as a plain number: of a symbol, the value that ``sizes_at`` gives, or that it was traced with."""
    if isinstance(value, torch.SymInt):
        if values := _at.get():
            expression = value.node.expr.xreplace(values)
            if not getattr(expression, "free_symbols", None):  # a plain number where it was but a symbol
                return int(expression)
        found = value.node.hint
        return int(found) if found is not None else 0
    return int(value)


def make_zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of the type, layout and device of a fake value, symbolic sizes as ``hint`` tells them."""
    shape, strides = ([hint(size) for size in each] for each in (like.shape, like.stride()))
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device).zero_()


def storage_key(value: torch.Tensor) -> int:
    """Return a number that views of one storage share."""
    return int(value.untyped_storage()._cdata)


def storage_bytes(value: torch.Tensor) -> int:
    """Return the bytes of the storage behind ``value``."""
    return hint(value.untyped_storage().nbytes())


def size_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the distinct storages behind ``values``; symbols and None take none."""
    found = {storage_key(value): storage_bytes(value) for value in values if isinstance(value, torch.Tensor)}
    return sum(found.values())


def dtype_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element."""
    return dtype.itemsize
