"""The kernels that a graph becomes when Inductor compiles it, or when it runs node by node: a simple model.

Node by node, every node that is no view is one kernel, which reads its inputs and writes its result.

Fused, matrix products, attention and a few others (``is_opaque``) stay kernels of their own; the rest is computed where
it is needed, and only three kinds of results are written to memory: what such a kernel reads, what the graph returns,
and reductions. The *level* of a node is the number of kernels of their own on the longest way to it. Results of one
level that share something they read are one kernel, which reads each of its sources once::

    x ─┬─ mean ─ rsqrt ─┐                      one kernel: reads x, writes the mean and the normalised value
       └────────── mul ─┴─ convert ── mm       level 1 begins after mm

A sum over any but the last dimension (the gradient of a norm's weight) is a kernel of its own.

A row loop is one kernel here, with those of a slice as its ``parts``, which run ``repeats`` times.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterable

import networkx as nx
import torch
from torch import fx
from torch._ops import HigherOrderOperator

from passes.node_facts import is_view, op_name
from protrain_compile.profiler.flops import is_attention, node_flops
from protrain_compile.program import fake_value, results_of
from protrain_compile.row_loop import RowLoop, Window, loop_of
from protrain_compile.sizes import hint

REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "prod", "any", "all", "argmax"})
GATHERS = frozenset({"embedding", "index", "index_select", "gather", "select_scatter"})
"""They read as much of their first argument as they return."""

UNSAFE_VIEWS = frozenset({"_unsafe_view", "reshape", "alias", "detach"})
OPAQUE_PARTS = ("scatter", "index_put", "sort", "topk", "cumsum", "cumprod", "nonzero", "unique", "embedding_dense")
"""Parts of the names of operations that are not fused with their neighbours."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        nodes: The nodes whose results it writes.
        flops: Operations of its matrix products; 0 for what only moves memory.
        dtype: The type of the products' factors.
        attention: Whether it is a fused attention.
        reads: Bytes that it reads of each source: a placeholder or a node of another kernel.
        writes: Bytes that it writes for each of ``nodes``.
        parts: The kernels of one slice of a row loop.
        repeats: How often they run.
    """

    nodes: tuple[fx.Node, ...]
    flops: int
    dtype: torch.dtype
    attention: bool
    reads: dict[fx.Node, int]
    writes: dict[fx.Node, int]
    parts: tuple[Kernel, ...] = ()
    repeats: int = 1

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


def kernels_of(module: fx.GraphModule, *, fused: bool) -> list[Kernel]:
    """Return the kernels of ``module`` in an order in which they can run."""
    nodes = list(module.graph.nodes)
    if not fused:
        return [_single(node, fused=False) for node in nodes if _computes(node)]
    return _Fusion(nodes).kernels()


def launches_of(kernels: Iterable[Kernel]) -> int:
    """Return how many kernels are launched, those inside row loops for every slice."""
    return sum(kernel.repeats * max(1, len(kernel.parts)) for kernel in kernels)


def value_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's elements, of all tensors if it has several; 0 for numbers."""
    value = fake_value(node)
    values = value if isinstance(value, list | tuple) else (value,)
    return sum(hint(each.numel()) * each.dtype.itemsize for each in values if isinstance(each, torch.Tensor))


def is_opaque(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own: a product, attention, or one that is not fused with its neighbours."""
    if node.op != "call_function" or moves_nothing(node):
        return False
    name = op_name(node)
    if isinstance(node.target, HigherOrderOperator | RowLoop):
        return True
    return node_flops(node) > 0 or any(part in name for part in OPAQUE_PARTS)


def source_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` shows: itself, or what it is a view of."""
    while moves_nothing(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def moves_nothing(node: fx.Node) -> bool:
    """Whether running the node moves nothing: a view, or an item of a result."""
    return is_view(node) or node.target is operator.getitem or op_name(node) in UNSAFE_VIEWS


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not moves_nothing(node) and value_bytes(node) > 0


def _single(node: fx.Node, *, fused: bool) -> Kernel:
    reads = dict.fromkeys(map(source_of, node.all_input_nodes), 0)
    for entry in dict.fromkeys(node.all_input_nodes):
        source = source_of(entry)
        size = value_bytes(node) if _is_table(entry, node) else value_bytes(entry)
        reads[source] = min(value_bytes(source), reads[source] + size)
    kernel = Kernel((node,), node_flops(node), _dtype(node), is_attention(node), reads, {node: value_bytes(node)})
    return _with_slices(kernel, loop_of(node), fused=fused) if isinstance(node.target, RowLoop) else kernel


def _with_slices(kernel: Kernel, loop: RowLoop, *, fused: bool) -> Kernel:
    """Return the kernel of a row loop."""
    parts = kernels_of(loop.slice_graph, fused=fused)
    results = iter(loop.slice_graph.graph.output_node().args[0])  # type: ignore[arg-type]
    for i, output in enumerate(loop.outputs):
        if loop.direct is not None and loop.direct.output == i:
            parts.append(_direct(kernel, loop))
            continue
        if loop.window is not None and i in loop.window.operands:
            parts.append(_of_window(kernel, loop, loop.window, i))
            continue
        part = next(results)
        if output.kind == "product":
            parts.append(_product(kernel, part, next(results), output.size_bytes))
        elif output.kind == "rows":
            parts.append(_copy(kernel, part))
    return dataclasses.replace(kernel, parts=tuple(parts), repeats=loop.slices)


def _product(kernel: Kernel, left: fx.Node, right: fx.Node, size_bytes: int) -> Kernel:
    """Return the product that a row loop adds to one of its results, which it reads and writes."""
    rows, columns = fake_value(left).shape[0], fake_value(right).shape[1]
    flops = 2 * rows * hint(fake_value(right).shape[0]) * columns
    (node,) = kernel.nodes
    reads = {left: value_bytes(left), right: value_bytes(right), node: size_bytes}
    return Kernel((node,), flops, fake_value(left).dtype, False, reads, {node: size_bytes})


def _of_window(kernel: Kernel, loop: RowLoop, window: Window, number: int) -> Kernel:
    """Return a slice's share of a product that a row loop makes once for every window."""
    placeholders = list(loop.slice_graph.graph.find_nodes(op="placeholder"))
    left, right, output = results_of(loop.slice_graph)[-1], placeholders[window.operands[number]], loop.outputs[number]
    flops = 2 * hint(fake_value(left).numel()) * hint(fake_value(right).shape[1])
    (node,) = kernel.nodes
    reads = {left: value_bytes(left), right: value_bytes(right)}
    if output.kind == "rows":
        written = output.size_bytes * loop.rows // loop.total
    else:
        written = reads[node] = output.size_bytes * loop.rows // window.rows
    return Kernel((node,), flops, fake_value(left).dtype, False, reads, {node: written})


def _direct(kernel: Kernel, loop: RowLoop) -> Kernel:
    """Return the product of a slice's rows that a row loop computes into one of its results."""
    assert loop.direct is not None
    placeholders = list(loop.slice_graph.graph.find_nodes(op="placeholder"))
    left, right, made = placeholders[loop.direct.left], placeholders[loop.direct.right], placeholders[-1]
    flops = 2 * hint(fake_value(left).numel()) * hint(fake_value(right).shape[1])
    (node,) = kernel.nodes
    reads = {each: value_bytes(each) for each in (left, right)}
    return Kernel((node,), flops, fake_value(left).dtype, False, reads, {node: value_bytes(made)})


def _copy(kernel: Kernel, part: fx.Node) -> Kernel:
    """Return the copy of a slice's rows to their place in one of a row loop's results."""
    (node,) = kernel.nodes
    return dataclasses.replace(kernel, reads={part: value_bytes(part)}, writes={node: value_bytes(part)})


def _is_table(entry: fx.Node, user: fx.Node) -> bool:
    return op_name(user) in GATHERS and entry is user.args[0]


def _dtype(node: fx.Node) -> torch.dtype:
    values = map(fake_value, node.all_input_nodes)
    return next((value.dtype for value in values if isinstance(value, torch.Tensor)), torch.float32)


def _is_outer_reduction(node: fx.Node) -> bool:
    """Whether the node reduces, but not over the last dimension of what it reads."""
    if op_name(node) not in REDUCTIONS or len(node.args) < 2 or not isinstance(node.args[1], list | tuple):
        return False
    source = fake_value(node.all_input_nodes[0])
    dims = {int(dim) % source.dim() for dim in node.args[1]}  # type: ignore[arg-type]
    return bool(dims) and source.dim() - 1 not in dims


class _Fusion:
    """Finds the fused kernels of one graph; see the module docstring."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.position = {node: i for i, node in enumerate(nodes)}
        self.opaque = {node for node in nodes if is_opaque(node)}
        self.level: dict[fx.Node, int] = {}
        for node in nodes:
            sources = {source_of(each) for each in node.all_input_nodes}
            self.level[node] = max((self.level[each] + self._ends_level(each) for each in sources), default=0)
        fusible = [node for node in nodes if _computes(node) and node not in self.opaque]
        self.written = {node for node in fusible if self._is_written(node)}
        self.fusible = set(fusible)

    def kernels(self) -> list[Kernel]:
        """Return all kernels."""
        groups = nx.Graph()
        reads = {root: self._cone(root) for root in self.written}
        for root, entries in reads.items():
            groups.add_node(root)
            if not _is_outer_reduction(root):
                groups.add_edges_from((root, self._meeting(root, source)) for source, _ in entries)
        found = [_single(node, fused=True) for node in self.opaque if value_bytes(node)]
        for group in nx.connected_components(groups):
            roots = sorted((each for each in group if isinstance(each, fx.Node)), key=self.position.__getitem__)
            found.append(self._group(roots, reads))
        return sorted(found, key=functools.partial(self._place, self._first_uses(found)))

    def _meeting(self, root: fx.Node, source: fx.Node) -> object:
        """Return what joins results into one kernel: a source read on one level, or a result of the same level."""
        inside = source in self.written and self.level[source] == self.level[root] and not _is_outer_reduction(source)
        return source if inside else (self.level[root], source)

    def _ends_level(self, node: fx.Node) -> bool:
        return node in self.opaque or _is_outer_reduction(node)

    def _is_written(self, node: fx.Node) -> bool:
        return op_name(node) in REDUCTIONS or any(
            user.op == "output" or user in self.opaque for user in _users_through_views(node)
        )

    def _cone(self, root: fx.Node) -> dict[tuple[fx.Node, fx.Node], int]:
        """Return what computing ``root`` reads: bytes by source and by the value through which it is read."""
        found: dict[tuple[fx.Node, fx.Node], int] = {}
        stack, seen = [root], {root}
        while stack:
            node = stack.pop()
            for entry in node.all_input_nodes:
                source = source_of(entry)
                if source in self.fusible and source not in self.written and not _is_table(entry, node):
                    stack += [] if source in seen else [source]
                    seen.add(source)
                    continue
                size = value_bytes(node) if _is_table(entry, node) else value_bytes(entry)
                found[source, entry] = min(size, value_bytes(source))
        return found

    def _group(self, roots: list[fx.Node], cones: dict[fx.Node, dict[tuple[fx.Node, fx.Node], int]]) -> Kernel:
        entries: dict[tuple[fx.Node, fx.Node], int] = {}
        for root in roots:
            entries.update(cones[root])
        reads: dict[fx.Node, int] = collections.Counter()
        for (source, _), size in entries.items():
            if source not in roots:
                reads[source] = min(value_bytes(source), reads[source] + size)
        return Kernel(
            tuple(roots), 0, _dtype(roots[0]), False, dict(reads), {node: value_bytes(node) for node in roots}
        )

    def _first_uses(self, kernels: Iterable[Kernel]) -> dict[fx.Node, int]:
        """Return the position of the first kernel of its own that reads each value."""
        first: dict[fx.Node, int] = {}
        for kernel in kernels:
            for source in kernel.reads:
                if kernel.nodes[0] in self.opaque:
                    position = self.position[kernel.nodes[0]]
                    first[source] = min(position, first.get(source, position))
        return first

    def _place(self, first: dict[fx.Node, int], kernel: Kernel) -> float:
        """Return where a kernel runs: after its last node, but before the first that reads any of its results."""
        last = max(self.position[node] for node in kernel.nodes)
        return min([last, *(first[node] - 0.5 for node in kernel.nodes if node in first)])


def _users_through_views(node: fx.Node) -> Iterable[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and moves_nothing(user):
            yield from _users_through_views(user)
        else:
            yield user
