"""Memory that a graph needs while it runs, told from its values' sizes alone."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

from torch import fx

from protrain_compile.profiler.kernels import Kernel, source_of, value_bytes
from protrain_compile.program import results_of


def workspace_bytes(module: fx.GraphModule, kernels: list[Kernel], dying: Collection[fx.Node] = ()) -> int:
    """Return the most allocated while ``kernels`` run, beyond what was there before and what the graph returns.

    Args:
        module: The graph.
        kernels: Its kernels, in order.
        dying: The placeholders that nobody else holds: they are freed after the last kernel that reads them. With some,
            the result may be negative: the memory of what dies first serves what is made later.

    A kernel that only moves memory writes over a value that dies in it, if that one is of the same size and no input.
    """
    returned = {source_of(node) for node in results_of(module) if isinstance(node, fx.Node)}
    last = {source: kernel for kernel in kernels for source in kernel.reads}
    dies: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for source, kernel in last.items():
        if source not in returned and (source.op != "placeholder" or source in dying):
            dies[id(kernel)].append(source)
    live = peak = 0
    for kernel in kernels:
        dead = [value_bytes(source) for source in dies[id(kernel)]]
        free = [] if kernel.flops else [value_bytes(s) for s in dies[id(kernel)] if s.op != "placeholder"]
        live += _allocated(kernel.writes.values(), free)
        peak = max(peak, live)
        live -= sum(dead) - _reused(kernel.writes.values(), free)
        live -= sum(size for node, size in kernel.writes.items() if node not in last and node not in returned)
    made = sum(value_bytes(node) for node in returned if node.op != "placeholder")
    return peak - made


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
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    last: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        last.update((source_of(each), node) for each in node.all_input_nodes)
    found = []
    for node in calls:
        made = value_bytes(node) if source_of(node) is node else 0
        used = {source_of(each) for each in [*node.all_input_nodes, node]}
        freed = sum(value_bytes(each) for each in used if each.op != "placeholder" and last.get(each, node) is node)
        found.append((node, made - freed, made))
    return found
