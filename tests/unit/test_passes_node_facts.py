"""Facts about single nodes: heavy, random, effectful, view, cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.capture import Graph
from torch import fx

from passes import node_facts as facts

aten = torch.ops.aten


def call(target: Any, *shapes: tuple[int, ...], args: tuple[Any, ...] = (), **kwargs: Any) -> fx.Node:
    """Return a call of ``target`` on inputs of ``shapes`` followed by ``args``; nothing is run."""
    graph = Graph()
    inputs = [graph.input(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    return graph.graph.call_function(target, (*inputs, *args), kwargs)


@pytest.mark.parametrize(
    ("node", "heavy"),
    [
        (call(aten.mm.default, (2, 3), (3, 4)), True),
        (call(aten.addmm.default, (4,), (2, 3), (3, 4)), True),
        (call(aten.bmm.default, (1, 2, 3), (1, 3, 4)), True),
        (call(aten.convolution.default, (1, 1, 4, 4)), True),
        (call(aten._scaled_dot_product_flash_attention_for_cpu.default, (1, 1, 4, 4)), True),
        (call(aten._scaled_dot_product_efficient_attention.default, (1, 1, 4, 4)), True),
        (call(torch.ops.higher_order.flex_attention, (1, 1, 4, 4)), True),
        (call(aten.add.Tensor, (2,), (2,)), False),
        (call(aten.gelu.default, (2,)), False),
        (call(aten.embedding.default, (2, 2)), False),
    ],
    ids=str,
)
def test_heavy(node: fx.Node, heavy: bool) -> None:
    assert facts.is_heavy(node) is heavy


def test_placeholders_are_nothing_special() -> None:
    node = Graph().input("mm", 2)
    assert not facts.is_heavy(node)
    assert not facts.never_recompute(node)
    assert not facts.is_view(node)
    assert not facts.is_parameter_cast(node)


@pytest.mark.parametrize(
    ("node", "random"),
    [
        (call(aten.rand.default, args=([2],)), True),
        (call(aten.bernoulli.p, (2,), args=(0.5,)), True),
        (call(aten.native_dropout.default, (2,), args=(0.5, True)), True),
        (call(aten.multinomial.default, (2, 2), args=(1,)), True),
        (call(aten.relu.default, (2,)), False),
        (call(torch.ops.prims.inductor_random.default, args=([2], None, "rand")), False),
        (call(aten._scaled_dot_product_flash_attention_for_cpu.default, (1, 1, 2, 2)), False),
        (call(aten._scaled_dot_product_flash_attention_for_cpu.default, (1, 1, 2, 2), args=(None, None, 0.0)), False),
        (call(aten._scaled_dot_product_flash_attention.default, (1,), (1,), (1,)), False),
        (call(aten._scaled_dot_product_flash_attention.default, (1,), (1,), (1,), args=(0.1,)), True),
        (call(aten._scaled_dot_product_flash_attention.default, (1,), (1,), (1,), dropout_p=0.1), True),
    ],
    ids=str,
)
def test_randomness(node: fx.Node, random: bool) -> None:
    assert facts.draws_randomness(node) is random
    assert facts.never_recompute(node) is random


@pytest.mark.parametrize(
    "node",
    [
        call(aten.add_.Tensor, (2,), (2,)),
        call(aten.copy_.default, (2,), (2,)),
        call(torch.ops.higher_order.with_effects, args=(None,)),
    ],
    ids=str,
)
def test_effects_run_once(node: fx.Node) -> None:
    assert facts.is_effectful(node)
    assert facts.never_recompute(node)


def conditional(*operations: Any) -> fx.Node:
    """Return a ``cond`` whose branches run ``operations`` on its argument."""
    branch = Graph()
    value = branch.input("x", 2)
    for operation in operations:
        value = branch.graph.call_function(operation, (value,))
    graph = Graph()
    x = graph.input("x", 2)
    node = graph.graph.call_function(torch.ops.higher_order.cond, (True, graph.graph.get_attr("branch"), None, [x]))
    graph.graph.output(node)
    fx.GraphModule({"branch": branch.module(value)}, graph.graph)
    return node


def test_what_runs_once_inside_a_higher_order_operator() -> None:
    assert facts.never_recompute(conditional(aten.sin.default, aten.bernoulli.default))
    assert facts.never_recompute(conditional(aten.topk.default))
    assert not facts.never_recompute(conditional(aten.sin.default))
    functional = torch.ops.higher_order.auto_functionalized
    assert facts.never_recompute(call(functional, args=(aten.bernoulli_.float,)))
    assert not facts.never_recompute(call(functional, args=(aten.relu_.default,)))


@pytest.mark.parametrize("target", sorted(facts.ROUTING_OPS, key=str), ids=str)
def test_routing_runs_once(target: Any) -> None:
    node = call(target, (2,))
    assert facts.never_recompute(node)
    assert not facts.is_effectful(node)


@pytest.mark.parametrize(
    ("node", "view"),
    [
        (call(aten.view.default, (2, 2), args=([4],)), True),
        (call(aten.permute.default, (2, 2), args=([1, 0],)), True),
        (call(aten.t.default, (2, 2)), True),
        (call(aten.slice.Tensor, (2, 2)), True),
        (call(aten.clone.default, (2, 2)), False),
        (call(aten._to_copy.default, (2, 2)), False),
    ],
    ids=str,
)
def test_views(node: fx.Node, view: bool) -> None:
    assert facts.is_view(node) is view


@pytest.mark.parametrize("target", sorted(facts.PARAMETER_CASTS, key=str), ids=str)
@pytest.mark.parametrize(
    ("source", "result", "cast"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, True),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
    ],
)
def test_casts(target: Any, source: torch.dtype, result: torch.dtype, cast: bool) -> None:
    graph = Graph()
    x = graph.input("x", 2, dtype=source)
    node = graph.graph.call_function(target, (x,))
    node.meta["val"] = graph.tensor(2, dtype=result)
    assert facts.is_parameter_cast(node) is cast


def test_tracing_tags_backward_nodes() -> None:
    node = call(aten.relu.default, (2,))
    assert not facts.is_backward_tagged(node)
    node.meta["partitioner_tag"] = "is_backward"
    assert facts.is_backward_tagged(node)
    other = call(aten.relu.default, (2,))
    other.meta["fwd_nn_module_stack"] = {}
    assert facts.is_backward_tagged(other)


def test_op_names() -> None:
    assert facts.op_name(call(aten.addmm.default, (2,))) == "addmm"
    assert facts.op_name(call(torch.ops.higher_order.flex_attention, (2,))) == "flex_attention"
