"""Floating-point operations of single nodes, by the formulas of ``torch.utils.flop_counter`` and a few of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import flop_counter

from passes.node_facts import op_name
from protrain_compile.program import fake_value
from protrain_compile.sizes import hint

Formula = Callable[..., Any]
_sdpa: Formula = flop_counter.sdpa_flop_count
_sdpa_backward: Formula = flop_counter.sdpa_backward_flop_count


def node_flops(node: fx.Node) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention; 0 for anything else.

    A causal attention computes half of what its formula counts.
    """
    formula = _formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), fake_value)
    flops = hint(formula(*args, **kwargs, out_val=fake_value(node)))
    return flops // 2 if is_attention(node) and _is_causal(node) else flops


def is_attention(node: fx.Node) -> bool:
    """Whether the node is a fused attention kernel, or the derivative of one."""
    return "attention" in op_name(node)


def _formula(node: fx.Node) -> Formula | None:
    if node.op != "call_function":
        return None
    own = _OWN.get(op_name(node))
    if own is not None:
        return own
    target: Any = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    found: Formula | None = flop_counter.flop_registry.get(target)
    return found


def _is_causal(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "is_causal":
            given = node.args[index] if index < len(node.args) else argument.default_value
            return bool(node.kwargs.get("is_causal", given))
    return False


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _sdpa(query.shape, _per_head(query, key), _per_head(query, value))


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    return _sdpa_backward(gradient.shape, query.shape, _per_head(query, key), _per_head(query, value))


def _per_head(query: torch.Tensor, shared: torch.Tensor) -> torch.Size:
    """Return the shape of keys or values that several heads of ``query`` share, were each head to have its own."""
    batch, _, *rest = shared.shape
    return torch.Size((batch, query.shape[1], *rest))


def _grouped_product(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Count a product of groups of rows: ``(rows, k)`` by ``(groups, k, n)``, or ``(m, rows)`` by ``(rows, n)``."""
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OWN: dict[str, Formula] = {
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS},
    "_grouped_mm": _grouped_product,
}
"""Operations that ``flop_counter`` has no formula for, or none for keys that several heads share."""
