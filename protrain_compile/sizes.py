"""Bytes of fake values, counting storage shared by several tensors once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def hint(value: Any) -> int:
    """Return a size as a plain number: of a symbol, the value that it was traced with."""
    if isinstance(value, torch.SymInt):
        found = value.node.hint
        return int(found) if found is not None else 0
    return int(value)


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
