"""Which saved values a policy keeps, and the graphs that compute the others again.

A template has one forward, which returns all saved values. Under a policy some of them, K, are kept for the backward;
the others die behind the forward, and just before the backward a recompute makes them again from inputs and K::

    policy                 K: values that could not be had without running      so the recompute runs
    keep                   anything                                             nothing
    recompute_pointwise    products with parameters, attention                  pointwise operations and reductions
    recompute_products     attention                                            products, too
    recompute              what must run once: draws, effects, routing          everything

K is found in one walk over the forward, in topological order: a saved value belongs to it if a way to it, from inputs
and from the values already in K, leads through an *expensive* operation. What must run once is in every K. A saved
value that shares its memory with one in K joins K, as keeping it costs nothing.

Attention that is written out (products of activations alone, softmax between) has no kernel to recognise it by. Its
scores are larger than both of their factors, and fused kernels make them again in their backward as well; so that
product is never expensive, while the one that reduces scores to values stands for attention.

Operations that are not PyTorch's own are expensive under both of the finer policies: a kernel is written by hand where
it takes time. ``recompute_products`` keeps fewer values than ``recompute_pointwise``, and never others.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from passes.node_facts import HEAVY_NAMES, is_heavy, is_view, never_recompute, op_name, reach
from protrain_compile.program import fake_value, is_symbol
from protrain_compile.roles import RecomputeRole
from protrain_compile.sizes import hint, storage_key

OWN_NAMESPACES = frozenset({"aten", "prims"})

Expensive = Callable[[fx.Node], bool]


def unrepeatable_results(graph: fx.Graph) -> set[fx.Node]:
    """Return tensors that come straight out of operations that must run once (of a tuple: its items)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if never_recompute(node):
            items = [user for user in node.users if user.target is operator.getitem]
            found.update(items or [node])
    return found


def viewed_whole(node: fx.Node) -> fx.Node:
    """Return the computed value that ``node`` is a view of, all its elements in some order; itself if it is none."""
    while is_view(node) and len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        if source.op != "call_function" or _elements(source) != _elements(node):
            break
        node = source
    return node


def finer_policies(from_parameters: Collection[fx.Node]) -> dict[RecomputeRole, Expensive]:
    """Return, for each policy between keep and recompute, what is expensive; the one that keeps least first.

    Args:
        from_parameters: The nodes of the forward that are parameters, or views or casts of them.
    """
    parameters = frozenset(from_parameters)

    def pointwise(node: fx.Node) -> bool:
        makes_scores = not parameters.intersection(node.all_input_nodes) and _makes_scores(node)
        return _is_foreign(node) or (is_heavy(node) and not makes_scores)

    def products(node: fx.Node) -> bool:
        ends_attention = _multiplies(node) and not parameters.intersection(node.all_input_nodes)
        return _is_foreign(node) or "attention" in op_name(node) or (ends_attention and not _makes_scores(node))

    return {"recompute_products": products, "recompute_pointwise": pointwise}


def kept_values(
    graph: fx.Graph, saved: Collection[fx.Node], given: Collection[fx.Node], expensive: Expensive
) -> set[fx.Node]:
    """Return the members of ``saved`` that a policy keeps.

    Args:
        graph: The forward.
        saved: The values that the backward needs.
        given: Results that must not be computed again; they are there for the recompute.
        expensive: Says of a call whether the policy avoids to run it again.
    """
    kept: set[fx.Node] = set()
    dear: set[fx.Node] = set()
    for node in graph.nodes:
        if node in given:
            kept |= {node} & set(saved)
        elif node.op == "call_function" and (expensive(node) or not dear.isdisjoint(node.all_input_nodes)):
            (kept if node in saved else dear).add(node)
    storages = {storage_key(value) for node in kept if isinstance(value := fake_value(node), torch.Tensor)}
    return kept | {node for node in saved if is_symbol(node) or _shares(node, storages)}


def extract(module: fx.GraphModule, wanted: Sequence[fx.Node], given: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a graph that computes ``wanted`` from the placeholders of ``module`` and the ``given`` values."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*module.graph.find_nodes(op="placeholder"), *given]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = copy.copy(node.meta)
    inside = reach(wanted, set(given))
    for node in module.graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output(tuple(copies[node] for node in wanted))
    return fx.GraphModule(module, graph)


def reached(wanted: Iterable[fx.Node], cut: Collection[fx.Node]) -> list[fx.Node]:
    """Return the members of ``cut`` that the computation of ``wanted`` reaches first, in graph order."""
    stack, seen = list(wanted), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in cut:
                stack.extend(node.all_input_nodes)
    graph_order = next(iter(seen)).graph.nodes if seen else ()
    return [node for node in graph_order if node in seen and node in cut]


def _is_foreign(node: fx.Node) -> bool:
    """Whether a call runs somebody's own kernel, or a graph of its own."""
    if isinstance(node.target, OpOverload):
        return node.target.namespace not in OWN_NAMESPACES
    return isinstance(node.target, HigherOrderOperator)


def _multiplies(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node) in HEAVY_NAMES


def _makes_scores(node: fx.Node) -> bool:
    """Whether a node is a product that is larger than its factors together."""
    return _multiplies(node) and _elements(node) > sum(map(_elements, node.all_input_nodes))


def _elements(node: fx.Node) -> int:
    value = fake_value(node)
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0


def _shares(node: fx.Node, storages: Collection[int]) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and storage_key(value) in storages
