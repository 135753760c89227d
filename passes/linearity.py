"""Linearity: which nodes of a joint graph are a number times what they were for a tangent of one.

A gradient is linear in the tangent. Where a scalar tangent enters only through operations that this module knows to be
linear, gradients may be computed with a tangent of one before the real one is there, and multiplied by it afterwards.
Where several tangents do, a gradient is the sum of what it is for each of them alone, the others being zero;
``copy_without`` writes those summands.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping

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
    aten.slice.Tensor,
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


class NotZeroError(Exception):
    """Why a graph needs a tangent of zeros as a tensor; never reaches a user."""


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


def copy_without(nodes: Iterable[fx.Node], zeros: Collection[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """Write ``nodes``, which are in graph order, once more where the graph is written, for ``zeros`` of nothing but 0.

    Returns the copy of each node, or None for one that is zero itself, as those of ``zeros`` are.

    Raises:
        NotZeroError: If a node that takes a zero is not known to be linear in it, or to add it to something.
    """
    copies: dict[fx.Node, fx.Node | None] = dict.fromkeys(zeros)
    for node in nodes:
        missing = {source for source in node.all_input_nodes if copies.get(source, source) is None}
        if not missing:
            copies[node] = node.graph.node_copy(node, lambda each: copies.get(each) or each)
        else:
            copies[node] = None if _is_linear(node, missing) else _other_summand(node, missing, copies)
    return copies


def _other_summand(node: fx.Node, missing: set[fx.Node], copies: Mapping[fx.Node, fx.Node | None]) -> fx.Node:
    """Return the copy of what a sum with zero comes to."""
    others = [each for each in node.args if isinstance(each, fx.Node) and each not in missing]
    if node.target not in SUMS or node.kwargs or len(others) != 1 or not _is_alike(others[0], node):
        raise NotZeroError(f"{node.name} is not known to be nothing, or one of its arguments, where another is zero")
    other = copies.get(others[0]) or others[0]
    if node.target is aten.sub.Tensor and node.args[0] in missing:
        negated = node.graph.call_function(aten.neg.default, (other,))
        negated.meta = dict(node.meta)
        return negated
    return other


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether one can stand for the other: values of one type, one size and one layout."""
    ours, theirs = fake_value(node), fake_value(other)
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


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
    if node.target is aten.constant_pad_nd.default:
        return linear[0] is True and not any((*node.args[2:], *node.kwargs.values()))
    if node.target is aten.cat.default:
        return all(_is_linear_or_zero(each, dependent) for each in node.args[0])  # type: ignore[union-attr]
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
    if node.target in (aten.zeros.default, aten.new_zeros.default):
        return True
    return node.target is aten.full.default and bool(node.args[1] == 0)
