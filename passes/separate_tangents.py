"""Separate tangents: write gradients that depend on a loss and on its logits as the sum of either's part.

Where a model returns its logits besides a loss, the gradient of the logits is the sum of two tangents' parts, and all
that is computed from it depends on both. As that is linear in both together, it can be written twice instead::

    before   d_logits = g(tangent) + tangent_of_logits;     d_hidden = d_logits @ weight
    after    d_hidden = g(tangent) @ weight + tangent_of_logits @ weight

so that the first summand, which ``slice_loss`` computes slice by slice, knows nothing of the second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import torch
from torch import fx

from passes.linearity import NotZeroError, copy_without, dependent_nodes, first_nonlinear
from passes.wide_region import CannotSliceError, Region, sizes
from protrain_compile.program import fake_value

aten = torch.ops.aten


def separate_tangents(graph: fx.Graph, logits: fx.Node) -> None:
    """Let everything that leaves the region of ``logits`` be a sum: of what wide tangents give, and of the rest.

    Raises:
        CannotSliceError: If the region is not known to be linear in its tangents.
    """
    region = Region.find(logits)
    below = {node: dependent_nodes(graph, node) for node in _tangents(graph)}
    wide = {node for node in below if _is_wide(node, logits) and not below[node].isdisjoint(region.nodes)}
    if not wide:
        return
    of_wide = set[fx.Node]().union(*(below[node] for node in wide))
    of_others = set[fx.Node]().union(*(found for node, found in below.items() if node not in wide))
    mixed = [node for node in region.nodes if node in of_wide]
    sources = {source for node in mixed for source in node.all_input_nodes} - set(mixed)
    if (sources & of_wide) - wide:
        raise CannotSliceError("the gradient of returned logits takes a way around the loss")
    nonlinear = first_nonlinear(mixed, of_wide | of_others)
    if nonlinear is not None:
        raise CannotSliceError(f"{nonlinear.name} is not known to be linear in the tangents")
    try:
        with graph.inserting_before(graph.output_node()):
            rest, own = copy_without(mixed, wide), copy_without(mixed, sources & of_others)
            _replace(mixed, set(region.nodes), rest, own)
    except NotZeroError as reason:
        raise CannotSliceError(str(reason)) from reason
    sort(graph)
    graph.eliminate_dead_code()


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if str(node.target).startswith("tangents")]


def _is_wide(node: fx.Node, logits: fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor) and math.prod(sizes(node)) == math.prod(sizes(logits))


def _replace(
    mixed: Collection[fx.Node],
    inside: set[fx.Node],
    rest: dict[fx.Node, fx.Node | None],
    own: dict[fx.Node, fx.Node | None],
) -> None:
    """Let users outside take the sum of both parts."""
    for node in mixed:
        if inside.issuperset(node.users):
            continue
        parts = [part for part in (rest[node], own[node]) if part is not None]
        total = parts[0]
        if len(parts) > 1:
            total = node.graph.call_function(aten.add.Tensor, tuple(parts))
            total.meta = dict(node.meta)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in inside)


def sort(graph: fx.Graph) -> None:
    """Put every node behind its inputs; nodes stay in order otherwise."""
    done: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            waiting = [source for source in stack[-1].all_input_nodes if source not in done]
            stack.extend(waiting)
            if not waiting:
                done[stack.pop()] = None
    ordered = list(done)
    for before, after in itertools.pairwise(ordered):
        before.append(after)
