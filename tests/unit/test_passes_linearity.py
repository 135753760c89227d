"""What is linear in a tangent, and what is not."""

from __future__ import annotations

import pytest
import torch
from support.capture import Graph
from torch import fx

from passes.linearity import NotZeroError, copy_without, dependent_nodes, first_nonlinear

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


def padded(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.slice.Tensor, g.call(aten.constant_pad_nd.default, scaled(g, t, x), [0, 3, 0, 0]), 1, 0, 2)


def joined_with_zeros(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.cat.default, [scaled(g, t, x), g.call(aten.new_zeros.default, x, [4, 3])], 1)


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


@pytest.mark.parametrize(
    "make",
    [scaled, divided, masked, both, shaped, multiplied, padded, joined_with_zeros],
    ids=lambda make: make.__name__,
)
def test_linear(make) -> None:
    assert judged(make) is None


def padded_with_ones(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.constant_pad_nd.default, scaled(g, t, x), [0, 3, 0, 0], 1.0)


def padded_with_a_named_value(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.constant_pad_nd.default, scaled(g, t, x), [0, 3, 0, 0], value=1.0)


def joined(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.cat.default, [scaled(g, t, x), x], 1)


@pytest.mark.parametrize(
    "make",
    [
        padded_with_ones,
        padded_with_a_named_value,
        joined,
        squared,
        exponential,
        divisor,
        shifted,
        offset,
        chosen_by,
        rounded,
    ],
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


def without(make) -> tuple[Graph, fx.Node | None]:
    """Return a graph whose result was made for a tangent ``t`` of zeros, and that result."""
    g = Graph()
    t, x = g.input("t", 4, 4), g.input("x", 4, 4)
    make(g, t, x)
    copies = copy_without([node for node in g.graph.nodes if node in dependent_nodes(g.graph, t) - {t}], {t})
    return g, list(copies.values())[-1]


def added(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.mm.default, g.call(aten.add.Tensor, g.call(aten.neg.default, t), x), x)


def subtracted(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.sub.Tensor, t, x)


def taken_off(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.sub.Tensor, x, g.call(aten.mm.default, t, x))


@pytest.mark.parametrize(
    "make",
    [scaled, divided, masked, both, shaped, multiplied, padded, joined_with_zeros],
    ids=lambda make: make.__name__,
)
def test_of_nothing_but_zero_comes_nothing(make) -> None:
    assert without(make)[1] is None


@pytest.mark.parametrize("make", [added, subtracted, taken_off], ids=lambda make: make.__name__)
def test_of_a_sum_with_zero_the_rest_is_left(make) -> None:
    g, result = without(make)
    module = g.module(result)
    zeros, x = torch.zeros(4, 4), torch.randn(4, 4)
    whole = Graph()
    expected = whole.module(make(whole, whole.input("t", 4, 4), whole.input("x", 4, 4)))
    torch.testing.assert_close(module(zeros, x), expected(zeros, x))
    module.graph.eliminate_dead_code()
    assert not next(iter(module.graph.nodes)).users


def grown(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    """The sum is larger than what is left of it."""
    return g.call(aten.add.Tensor, t, g.call(aten.sum.dim_IntList, x, [0], True))


def scaled_sum(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.add.Tensor, x, t, alpha=2)


def widened(g: Graph, t: fx.Node, x: fx.Node) -> fx.Node:
    return g.call(aten.add.Tensor, t, g.call(aten._to_copy.default, x, dtype=torch.bfloat16))


@pytest.mark.parametrize("make", [exponential, squared, grown, scaled_sum, widened], ids=lambda make: make.__name__)
def test_what_needs_zeros_as_a_tensor(make) -> None:
    with pytest.raises(NotZeroError):
        without(make)
