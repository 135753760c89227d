"""The wide region: the part of a joint graph that is as wide as the logits.

A *wide* value has one number for each token (row) and word. The *region* is every wide value, what lies between two of
them, and what takes one in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from protrain_compile.program import fake_value

aten = torch.ops.aten
prims = torch.ops.prims

PRODUCTS = (aten.mm.default, aten.addmm.default)
SAME_SIZES = (
    prims.convert_element_type.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
WIDE_MAKERS = (aten.full.default, aten.expand.default, aten.scatter.value, *SAME_SIZES, *RESHAPES)
"""Operations that may begin a wide value without a wide argument."""


class CannotSliceError(Exception):
    """Why a region is left alone; never reaches a user."""


def sizes(node: fx.Node) -> tuple[int, ...]:
    """Return the sizes of a node's value.

    Raises:
        CannotSliceError: If it is no tensor or its sizes are symbolic.
    """
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        raise CannotSliceError(f"{node.name} has no fixed sizes")
    return tuple(value.shape)


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node computes each number of its result from the numbers at the same place."""
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


@dataclasses.dataclass(frozen=True)
class Region:
    """The nodes of a region, in graph order.

    Attributes:
        logits: The product that makes the first wide value; its sizes are (rows, width).
        nodes: All its nodes.
    """

    logits: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def find(cls, logits: fx.Node) -> Region:
        """Return the region of ``logits``."""
        graph = logits.graph
        wide = _wide_nodes(logits)
        below = _closure(graph.nodes, wide, lambda node: node.all_input_nodes)
        above = _closure(reversed(graph.nodes), wide, lambda node: list(node.users))
        taken = {user for node in wide for user in node.users if user.op == "call_function"}
        inside = wide | (below & above) | taken
        return cls(logits, tuple(node for node in graph.nodes if node in inside))

    @property
    def rows(self) -> int:
        """How many tokens there are."""
        return sizes(self.logits)[0]


def _wide_nodes(logits: fx.Node) -> set[fx.Node]:
    count = math.prod(sizes(logits))

    def is_wide(node: fx.Node) -> bool:
        value = fake_value(node)
        return isinstance(value, torch.Tensor) and value.numel() == count and node.target not in PRODUCTS

    wide = {logits}
    for node in logits.graph.nodes:
        if node.op == "call_function" and is_wide(node) and any(source in wide for source in node.all_input_nodes):
            wide.add(node)
    for node in reversed(logits.graph.nodes):
        makes = node.target in WIDE_MAKERS or is_pointwise(node)
        if makes and is_wide(node) and any(user in wide for user in node.users):
            wide.add(node)
    return wide


def _closure(
    nodes: Iterable[fx.Node], start: set[fx.Node], sources_of: Callable[[fx.Node], Sequence[fx.Node]]
) -> set[fx.Node]:
    found = set(start)
    for node in nodes:
        if node.op == "call_function" and any(source in found for source in sources_of(node)):
            found.add(node)
    return found
