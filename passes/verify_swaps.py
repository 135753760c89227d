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
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.liveness import kept_sources
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
            if policies[segment] != "swap":
                raise VerifierError(f"{where}{name} graph: {nodes[0].name} swaps a segment whose policy is keep")
            if len(nodes) < len(ORDER[name]):
                missing = ORDER[name][len(nodes)].__name__
                raise VerifierError(f"{where}{name} graph: {nodes[-1].name} is not followed by {missing}")
    if found.get("forward", {}).keys() != found.get("backward", {}).keys():
        raise VerifierError(f"{where}forward and backward swap different segments")
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
            before = f" after {nodes[-1].name}" if nodes else ""
            raise VerifierError(f"{where}{name} graph: {node.name} comes out of turn{before}")
        if nodes and node.args[1] is not nodes[-1]:
            raise VerifierError(f"{where}{name} graph: {node.name} is not for the values of {nodes[-1].name}")
        nodes.append(node)
    return found


def _check_handles(schedule: Schedule, where: str) -> None:
    sources = kept_sources(schedule)
    for node in schedule.graphs["backward"].graph.find_nodes(op="call_function", target=ops.reload):
        source = sources.get(node.args[1])
        if source is None or source.target is not ops.swap_out or segment_of(source) != segment_of(node):
            raise VerifierError(f"{where}backward graph: {node.name} reloads what the forward did not swap for it")
        items = [user.args[1] for wait in node.users for user in wait.users if user.target is operator.getitem]
        layouts = [source.meta["layout"], node.meta["layout"], *(wait.meta["layout"] for wait in node.users)]
        if any(layout != layouts[0] for layout in layouts) or max(items, default=-1) >= len(layouts[0].values):
            raise VerifierError(f"{where}backward graph: {node.name} reloads values otherwise than they were swapped")


def _check_released(module: fx.GraphModule, where: str) -> None:
    released: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            if source in released and node.op == "output":
                raise VerifierError(
                    f"{where}forward graph: {source.name} leaves the graph, although {released[source].name} frees it"
                )
        if node.target is ops.release_swapped:
            packed = node.args[1].args[1]
            released |= dict.fromkeys(packed.all_input_nodes, node)
