"""The verifier's part about swapped values: one walk over forward and backward, by segment.

* a segment's values leave once and are released once after that, both in the forward; they are reloaded once and waited
  for once after that, both in the backward, which reads them from there
* only segments that the plan swaps do
* what the backward reloads is what the forward swapped for the same segment, laid out as it was
* what was released nothing reads any more, nor does it leave the forward (it would not be free)
"""

from __future__ import annotations

import operator

from torch import fx

from passes.apply_policies import block_policies
from passes.schedule_graph import segment_of
from passes.violation import fail_at
from protrain_compile import ops
from protrain_compile.liveness import kept_sources
from protrain_compile.roles import SWAPS
from protrain_compile.schedule import Schedule

ORDER = {
    "forward": (ops.swap_out, ops.release_swapped),
    "backward": (ops.reload, ops.wait_reload),
}
"""What happens to every swapped segment in each graph, in this order."""


def verify_swaps(schedule: Schedule, where: str) -> None:
    """Check the operations on swapped values.

    Raises:
        VerifierError: If an invariant does not hold.
    """
    policies = block_policies(schedule)
    found = {name: _stages(schedule, name, where) for name in schedule.graphs}
    for name, segments in found.items():
        for segment, nodes in segments.items():
            if policies[segment] not in SWAPS:
                fail_at(where, name, nodes[0], f"swaps a segment whose policy is {policies[segment]}")
            if len(nodes) < len(ORDER[name]):
                missing = ORDER[name][len(nodes)].__name__
                fail_at(where, name, nodes[-1], f"is not followed by {missing}")
    for name, other in (("forward", "backward"), ("backward", "forward")):
        for segment in found.get(name, {}).keys() - found.get(other, {}).keys():
            fail_at(where, name, found[name][segment][0], f"swaps values that the {other} does not")
    if found.get("forward"):
        _check_handles(schedule, where)
        _check_released(schedule.graphs["forward"], where)


def _stages(schedule: Schedule, name: str, where: str) -> dict[int, list[fx.Node]]:
    """Return the operations on swapped values of a graph, by segment, each checked to be the next one in order."""
    found: dict[int, list[fx.Node]] = {}
    order = ORDER.get(name, ())
    for node in schedule.graphs[name].graph.nodes:
        if node.op != "call_function" or node.target not in (*ORDER["forward"], *ORDER["backward"]):
            continue
        nodes = found.setdefault(segment_of(node), [])
        if len(nodes) >= len(order) or node.target is not order[len(nodes)]:
            fail_at(where, name, node, "comes out of turn", nodes[-1] if nodes else None)
        if nodes and node.args[1] is not nodes[-1]:
            fail_at(where, name, node, f"is not for the values of {nodes[-1].name}", nodes[-1])
        nodes.append(node)
    return found


def _check_handles(schedule: Schedule, where: str) -> None:
    sources = kept_sources(schedule)
    for node in schedule.graphs["backward"].graph.find_nodes(op="call_function", target=ops.reload):
        source = sources.get(node.args[1])
        if source is None or source.target is not ops.swap_out or segment_of(source) != segment_of(node):
            fail_at(where, "backward", node, "reloads what the forward did not swap for it", source)
        items = [user.args[1] for wait in node.users for user in wait.users if user.target is operator.getitem]
        layouts = [source.meta["layout"], node.meta["layout"], *(wait.meta["layout"] for wait in node.users)]
        if any(layout != layouts[0] for layout in layouts) or max(items, default=-1) >= len(layouts[0].values):
            fail_at(where, "backward", node, "reloads values otherwise than they were swapped", source)


def _check_released(module: fx.GraphModule, where: str) -> None:
    released: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            if source in released and node.op == "output":
                fail_at(where, "forward", source, f"leaves the graph, although {released[source].name} frees it")
        if node.target is ops.release_swapped:
            packed = node.args[1].args[1]
            released |= dict.fromkeys(packed.all_input_nodes, node)
