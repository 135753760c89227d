from __future__ import annotations

from typing import Any

import pytest
import torch
from support.capture import Graph

from protrain_compile.profiler.inputs import index_limit, make_inputs, make_value

aten = torch.ops.aten
INDEX: dict[str, Any] = {"dtype": torch.int64}


def test_shape_stride_and_type_are_kept() -> None:
    g = Graph()
    node = g.input("x", 4, 6)
    node.meta["val"] = g.tensor(4, 6, dtype=torch.bfloat16).t()
    value = make_value(node)
    assert (value.shape, value.stride(), value.dtype) == ((6, 4), (1, 6), torch.bfloat16)
    assert value.float().std() > 0


def test_an_expanded_value_is_as_small_as_it_was() -> None:
    g = Graph()
    node = g.input("x", 1, 6)
    node.meta["val"] = g.tensor(1, 6).expand(1000, 6)
    value = make_value(node)
    assert (value.shape, value.stride()) == ((1000, 6), (0, 1))
    assert value.untyped_storage().nbytes() == 6 * 4


def test_an_empty_value() -> None:
    assert make_value(Graph().input("x", 0, 3)).shape == (0, 3)


def test_the_same_seed_gives_the_same_values_and_leaves_the_global_state() -> None:
    g = Graph()
    nodes = [g.input("a", 8), g.input("b", 8)]
    torch.manual_seed(7)
    first, state = make_inputs(nodes), torch.get_rng_state()
    second = make_inputs(nodes)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_masks_are_true() -> None:
    assert bool(make_value(Graph().input("mask", 3, 3, dtype=torch.bool)).all())


def test_an_index_stays_below_what_it_indexes() -> None:
    g = Graph()
    tokens, table = g.input("tokens", 50, 50, **INDEX), g.input("table", 10, 4)
    g.call(aten.embedding.default, table, tokens)
    assert index_limit(tokens) == 10
    assert make_value(tokens).unique().tolist() == list(range(10))


def test_the_smallest_of_several_limits_counts_through_views_and_masks() -> None:
    g = Graph()
    labels, logits, table = g.input("labels", 5, 1, **INDEX), g.input("logits", 5, 7), g.input("table", 9, 4)
    zero = g.input("zero", 1, **INDEX)
    valid = g.call(aten.where.self, g.call(aten.ne.Scalar, labels, -100), labels, zero)
    g.call(aten.gather.default, logits, 1, valid)
    assert index_limit(labels) == 7
    g.call(aten.index.Tensor, table, [g.call(aten.squeeze.dim, labels, 1)])
    g.call(aten.index.Tensor, g.input("other", 3, 6), [None, g.call(aten.squeeze.dim, labels, 1)])
    assert index_limit(labels) == 6


@pytest.mark.parametrize("use", ["none", "arithmetic"])
def test_what_is_not_understood_is_zero(use: str) -> None:
    g = Graph()
    tokens, table = g.input("tokens", 5, **INDEX), g.input("table", 10, 4)
    if use == "arithmetic":
        g.call(aten.embedding.default, table, tokens)
        g.call(aten.embedding.default, table, g.call(aten.add.Scalar, tokens, 3))
    assert index_limit(tokens) == 0
    assert not make_value(tokens).any()
