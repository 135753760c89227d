"""What is linear in a tangent, and what is not."""

from __future__ import annotations

import pytest
import torch
from support.capture import Graph
from torch import fx

from passes.linearity import dependent_nodes, first_nonlinear

aten = torch.ops.aten


def scaled(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.mul.Tensor, x, t)


def divided(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.div.Tensor, t, x)


def masked(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    zero = g.call(aten.scalar_tensor.default, 0.0)
    return g.call(aten.where.self, g.call(aten.gt.Scalar, x, 0), t, zero)


def both(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.sub.Tensor, scaled(g, t, x), divided(g, t, x))


def shaped(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.sum.dim_IntList, g.call(aten.neg.default, scaled(g, t, x)), [0], True)


def multiplied(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.mm.default, scaled(g, t, x), x)


def squared(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    y = scaled(g, t, x)
    return g.call(aten.mul.Tensor, y, y)


def exponential(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.exp.default, t)


def divisor(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.div.Tensor, x, t)


def shifted(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.add.Tensor, t, x)


def offset(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    one = g.call(aten.scalar_tensor.default, 1.0)
    return g.call(aten.where.self, g.call(aten.gt.Scalar, x, 0), t, one)


def chosen_by(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.where.self, g.call(aten.gt.Scalar, t, 0), x, x)


def rounded(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten._to_copy.default, t, dtype=torch.int64)


@pytest.mark.parametrize("make", [scaled, divided, masked, both, shaped, multiplied], ids=lambda make: make.__name__)
def test_linear(make) -> None:
    assert judged(make) is None


@pytest.mark.parametrize(
    "make",
    [squared, exponential, divisor, shifted, offset, chosen_by, rounded],
    ids=lambda make: make.__name__,
)
def test_not_linear(make) -> None:
    assert judged(make) is not None


def judged(make) -> fx.Node | None:
    g = Graph()
    t, x = g.input("t"), g.input("x", 4, 4)
    module = g.module(make(g, t, x))
    return first_nonlinear(module.graph.nodes, dependent_nodes(module.graph, t))


def test_dependent_nodes() -> None:
    g = Graph()
    t, x = g.input("t"), g.input("x", 4)
    apart = g.call(aten.neg.default, x)
    below = g.call(aten.neg.default, scaled(g, t, apart))
    g.module(below, apart)
    found = dependent_nodes(g.graph, t)
    assert {t, below} <= found
    assert found.isdisjoint({x, apart})
