"""Memory that a graph needs while it runs, told from its values' sizes alone."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Collection, Iterable

from torch import fx

from protrain_compile.profiler.kernels import kernels_of, moves_nothing, source_of, value_bytes
from protrain_compile.program import results_of
from protrain_compile.row_loop import RowLoop, loop_of


def workspace_bytes(module: fx.GraphModule, *, fused: bool, dying: Collection[fx.Node] = ()) -> int:
    """Return the most allocated while ``module`` runs, beyond what was there before and what the graph returns.

    Args:
        module: The graph.
        fused: Whether Inductor compiles it; else it runs node by node.
        dying: The placeholders that nobody else holds: they are freed after the last kernel that reads them. With some,
            the result may be negative: the memory of what dies first serves what is made later.

    A fused kernel writes over a value that dies in it, if that one is of the same size and no input.
    """
    kernels = kernels_of(module, fused=fused)
    returned = {source_of(node) for node in results_of(module) if isinstance(node, fx.Node)}
    last = {source: kernel for kernel in kernels for source in kernel.reads}
    dies: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for source, kernel in last.items():
        if source not in returned and (source.op != "placeholder" or source in dying):
            dies[id(kernel)].append(source)
    live = peak = 0
    for kernel in kernels:
        dead = [value_bytes(source) for source in dies[id(kernel)]]
        free = [] if kernel.flops or not fused else [value_bytes(s) for s in dies[id(kernel)] if s.op != "placeholder"]
        live += _allocated(kernel.writes.values(), free)
        peak = max(peak, live + _loop_bytes(kernel.nodes[0], fused=fused))
        live -= sum(dead) - _reused(kernel.writes.values(), free)
        live -= sum(size for node, size in kernel.writes.items() if node not in last and node not in returned)
    made = sum(value_bytes(node) for node in returned if node.op != "placeholder")
    return peak - made


def _loop_bytes(node: fx.Node, *, fused: bool) -> int:
    """Return what a row loop allocates for one slice, its window, and its sums; 0 for any other node."""
    if not isinstance(node.target, RowLoop):
        return 0
    loop = loop_of(node)
    module = loop.slice_graph
    made = {source_of(each) for each in results_of(module)}
    # Rows of the window count among what a slice makes: Inductor writes them elsewhere, but then not over the logits.
    window = loop.window_value.dtype.itemsize * math.prod(loop.window_shape) if loop.window is not None else 0
    sums = sum(output.summing_bytes for output in loop.outputs)
    return workspace_bytes(module, fused=fused) + sum(map(value_bytes, made)) + window + sums


def _reused(sizes: Iterable[int], free: Iterable[int]) -> int:
    wanted, found = collections.Counter(sizes), collections.Counter(free)
    return sum(size * count for size, count in (wanted & found).items())


def _allocated(sizes: Iterable[int], free: Iterable[int]) -> int:
    sizes = list(sizes)
    return sum(sizes) - _reused(sizes, free)


def node_changes(module: fx.GraphModule) -> list[tuple[fx.Node, int, int]]:
    """Return, for every call in ``module`` run node by node, the change of allocated memory and the peak inside.

    Placeholders are held by the caller; other values are freed after their last use. An operation's own scratch memory
    is not known.
    """
    last = {owner_of(each): node for node in module.graph.nodes for each in node.all_input_nodes}
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        made = 0 if moves_nothing(node) else value_bytes(node)
        used = {owner_of(each) for each in [*node.all_input_nodes, node]}
        freed = sum(owned_bytes(each) for each in used if last.get(each, node) is node)
        found.append((node, made - freed, made + _loop_bytes(node, fused=False)))
    return found


def owner_of(node: fx.Node) -> fx.Node:
    """Return the node with which the memory of ``node`` dies: what it is a view of, or an item of several results."""
    while moves_nothing(node) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not moves_nothing(source):
            return node
        node = source
    return node


def owned_bytes(node: fx.Node) -> int:
    """Return the bytes that die with ``node``: none of an input, and of several results those that are no items."""
    if node.op == "placeholder":
        return 0
    items = {user.args[1]: value_bytes(user) for user in node.users if owner_of(user) is user and moves_nothing(user)}
    return value_bytes(node) - sum(items.values())
