"""Linearity: which nodes of a joint graph are a number times what they were for a tangent of one.

A gradient is linear in the tangent. Where a scalar tangent enters only through operations that this module knows to be
linear, gradients may be computed with a tangent of one before the real one is there, and multiplied by it afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from protrain_compile.program import fake_value

aten = torch.ops.aten
prims = torch.ops.prims

OF_ONE = (
    aten.neg.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mul.Scalar,
    aten.div.Scalar,
    prims.convert_element_type.default,
    aten._to_copy.default,
    operator.getitem,
)
"""Linear in their first argument; their others are no tensors."""

PRODUCTS = (aten.mul.Tensor, aten.mm.default, aten.bmm.default)
"""Linear in either argument."""

SUMS = (aten.add.Tensor, aten.sub.Tensor)
"""Linear if both arguments are."""


def dependent_nodes(graph: fx.Graph, tangent: fx.Node) -> set[fx.Node]:
    """Return the nodes that depend on ``tangent``, itself included."""
    found = {tangent}
    for node in graph.nodes:
        if node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def first_nonlinear(nodes: Iterable[fx.Node], dependent: set[fx.Node]) -> fx.Node | None:
    """Return the first of ``nodes`` that is not known to be linear in the tangent that ``dependent`` depend on."""
    return next((node for node in nodes if not _is_linear(node, dependent)), None)


def _is_linear(node: fx.Node, dependent: set[fx.Node]) -> bool:
    if node.op != "call_function" or not any(source in dependent for source in node.all_input_nodes):
        return True
    if any(isinstance(value, fx.Node) and value in dependent for value in node.kwargs.values()):
        return False
    if not _is_floating(node):
        return False
    linear = [argument in dependent if isinstance(argument, fx.Node) else None for argument in node.args]
    if node.target in OF_ONE:
        return linear[0] is True and not any(linear[1:])
    if node.target in PRODUCTS:
        return linear[:2].count(True) == 1 and not any(linear[2:])
    if node.target is aten.div.Tensor:
        return linear[0] is True and not linear[1]
    if node.target in SUMS:
        return all(_is_linear_or_zero(each, dependent) for each in node.args[:2])
    if node.target is aten.where.self:
        return not linear[0] and all(_is_linear_or_zero(each, dependent) for each in node.args[1:])
    return False


def _is_floating(node: fx.Node) -> bool:
    value = fake_value(node)
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _is_linear_or_zero(argument: object, dependent: set[fx.Node]) -> bool:
    if not isinstance(argument, fx.Node):
        return argument == 0
    return argument in dependent or _is_zero(argument)


def _is_zero(node: fx.Node) -> bool:
    if node.target is aten.scalar_tensor.default:
        return bool(node.args[0] == 0)
    return node.target is aten.full.default and bool(node.args[1] == 0)
