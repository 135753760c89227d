"""cut_recompute: what each policy keeps, on real blocks and on hand-made graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from support.capture import Graph, capture
from support.models import GPT, Llama, tokens
from torch import fx, nn

from passes import structure_pipeline
from passes.cut_recompute import finer_policies, kept_values, viewed_whole
from passes.node_facts import is_heavy, op_name
from protrain_compile.program import Parts, fake_value, results_of
from protrain_compile.sizes import size_bytes

aten = torch.ops.aten


def block_parts(model: nn.Module, *, inductor: bool) -> Parts:
    program = capture(model, tokens(length=33))
    structure_pipeline(inductor=inductor, inductor_draws=inductor).run(program)
    parts = program.templates[program.template_of[1]].parts
    assert parts is not None
    assert all(not t.parts.recomputes.keys() - {"recompute"} for t in (program.templates[0],) if t.parts is not None)
    return parts


def kept_bytes(parts: Parts, policy: str) -> int:
    """Return the bytes of saved values that a policy keeps; of ``keep`` all."""
    saved = results_of(parts.forward)[parts.num_outputs :]
    role = parts.recompute_of.get(policy)
    dropped = parts.recomputes[role].results if role is not None else ()
    return size_bytes(fake_value(node) for i, node in enumerate(saved) if i not in dropped)


def heavy(parts: Parts, policy: str) -> list[str]:
    graph = parts.recomputes[parts.recompute_of[policy]].graph.graph
    return [op_name(node) for node in graph.nodes if is_heavy(node)]


@pytest.mark.parametrize("inductor", [False, True])
def test_a_llama_block(inductor: bool) -> None:
    parts = block_parts(Llama(2), inductor=inductor)
    assert list(parts.recomputes) == ["recompute", "recompute_products", "recompute_pointwise"]
    assert heavy(parts, "recompute_pointwise") == []
    assert set(heavy(parts, "recompute_products")) == {"mm"}
    assert len(heavy(parts, "recompute")) == len(heavy(parts, "recompute_products")) + 1, "attention besides"
    sizes = [kept_bytes(parts, each) for each in ("recompute", "recompute_products", "recompute_pointwise", "keep")]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 0
    dropped = [set(again.results) for again in parts.recomputes.values()]
    assert dropped[0] > dropped[1] > dropped[2]


@pytest.mark.parametrize("inductor", [False, True])
def test_a_gpt2_block_with_dropout(inductor: bool) -> None:
    """Attention with dropout is written out here: scores are made again, what they weigh is kept."""
    parts = block_parts(GPT(2, dropout=0.2, tied=False), inductor=inductor)
    assert heavy(parts, "recompute").count("bmm") == 2
    assert heavy(parts, "recompute_products").count("bmm") == 1
    assert not {"addmm", "mm"} & set(heavy(parts, "recompute_pointwise"))
    graph = parts.recomputes["recompute_pointwise"].graph.graph
    draws = {op_name(node) for node in graph.nodes if node.op == "call_function" and "rand" in op_name(node)}
    assert draws == ({"inductor_random"} if inductor else set())
    assert not parts.pinned & set(parts.recomputes["recompute_pointwise"].results)
    assert bool(parts.pinned) != inductor
    saved = results_of(parts.forward)[parts.num_outputs :]
    weights = {i for i, node in enumerate(saved) if fake_value(node).shape[1:] == (4, 32, 32)}
    assert weights
    assert weights <= parts.pinned | set(parts.recomputes["recompute_pointwise"].results)


def kept(graph: Graph, saved: list[fx.Node], policy: Any, given: tuple[fx.Node, ...] = ()) -> list[str]:
    parameters = [node for node in graph.graph.nodes if node.name.startswith("w")]
    found = kept_values(graph.graph, saved, given, finer_policies(parameters)[policy])
    return [node.name for node in saved if node in found]


def test_values_that_products_lead_to() -> None:
    """Behind a kept value everything is cheap again; what nothing keeps stays dear."""
    graph = Graph()
    x, w = graph.input("x", 8, 8), graph.input("w", 8, 8)
    early = graph.call(aten.sin.default, x)
    product = graph.call(aten.mm.default, early, w)
    first, second = graph.call(aten.cos.default, product), graph.call(aten.exp.default, product)
    late = graph.call(aten.sin.default, first)
    saved = [early, first, second, late]
    assert kept(graph, saved, "recompute_pointwise") == [first.name, second.name], "the product itself is not saved"
    assert kept(graph, [*saved, product], "recompute_pointwise") == [product.name]
    assert kept(graph, saved, "recompute_products") == []
    assert kept(graph, saved, "recompute_pointwise", (first,)) == [first.name, second.name]


def test_views_of_kept_values_are_kept() -> None:
    graph = Graph()
    x, w = graph.input("x", 8, 8), graph.input("w", 8, 8)
    product = graph.call(aten.mm.default, x, w)
    turned, copied = graph.call(aten.t.default, product), graph.call(aten.clone.default, product)
    found = kept(graph, [product, turned, copied], "recompute_pointwise")
    assert found == [product.name, turned.name]


def test_scores_are_made_again_and_what_they_weigh_is_kept() -> None:
    graph = Graph()
    q, k, v = (graph.input(name, 2, 64, 4) for name in "qkv")
    scores = graph.call(aten.bmm.default, q, graph.call(aten.transpose.int, k, 1, 2))
    weights = graph.call(aten.softmax.int, scores, -1)
    out = graph.call(aten.bmm.default, weights, v)
    assert kept(graph, [weights, out], "recompute_pointwise") == [out.name]
    assert kept(graph, [weights, out], "recompute_products") == [out.name]


def test_a_product_with_a_parameter_is_kept_however_large() -> None:
    graph = Graph()
    x, w = graph.input("x", 64, 4), graph.input("w", 4, 64)
    wide = graph.call(aten.mm.default, x, w)
    assert kept(graph, [wide], "recompute_pointwise") == [wide.name]


@torch.library.custom_op("protrain_tests::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), x + 1


@pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def test_kernels_of_others_are_not_run_again() -> None:
    graph = Graph()
    x = graph.input("x", 8)
    both = graph.call(torch.ops.protrain_tests.pair.default, x)
    items = [graph.graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for i, item in enumerate(items):
        item.meta["val"] = both.meta["val"][i]
    later = graph.call(aten.sin.default, items[0])
    for policy in ("recompute_products", "recompute_pointwise"):
        assert kept(graph, [*items, later], policy) == [item.name for item in items]


def test_a_view_of_a_whole_value_is_had_from_that_value() -> None:
    graph = Graph()
    x = graph.input("x", 4, 6)
    whole = graph.call(aten.sin.default, x)
    turned = graph.call(aten.view.default, graph.call(aten.t.default, whole), [3, 2, 4])
    part = graph.call(aten.select.int, whole, 0, 1)
    assert viewed_whole(turned) is whole
    assert viewed_whole(whole) is whole
    assert viewed_whole(part) is part
    of_input = graph.call(aten.t.default, x)
    assert viewed_whole(of_input) is of_input
