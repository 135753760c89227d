"""Named operations of a schedule that are not artefacts. Plain functions: a call costs well under a microsecond."""

from __future__ import annotations

from typing import Any

import torch


def pack(*values: Any) -> list[Any]:
    """Hand ``values`` over to the boxed call that follows, which lets each die at its last use.

    Generated code drops its own names for values that are not used again right after this line.
    """
    return list(values)


def snapshot(value: torch.Tensor, *, stream: str) -> torch.Tensor:
    """Copy a graph input that the forward gives a new value, for a backward that needs the old one."""
    return value.clone()
