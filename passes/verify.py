"""The verifier: invariants that hold after every pass. It reads; it never changes a graph.

Program
    * a node runs in its inputs' stage or a later one; a backward node in its inputs' stage or an earlier one
    * random, effectful and routing operations are not recomputed (DESIGN 7, invariant 7)
    * no saved value is a parameter or a view or cast of one
Schedule
    * a packed list feeds exactly one boxed call
    * each segment runs each of its parts at most once per graph
    * a segment is recomputed before its backward if its policy says so, and only then
    * every trainable input has a gradient, frozen ones have none (invariant 5)
    * chunks are where they are used, and their buffers are used by one at a time: see ``verify_chunks``
    * swapped values leave, are released, come back and are waited for: see ``verify_swaps``

That what a search found fits the budgets is checked where it was found (``planner.verify_fit``, invariant 4), that all
ranks issue the same collectives where ranks compile (``runtime.ranks``, invariant 8).
"""

from __future__ import annotations

import collections

from torch import fx

from passes.apply_policies import block_policies
from passes.chunk_views import schedule_operations
from passes.node_facts import is_parameter_cast, is_view, never_recompute
from passes.verify_chunks import verify_chunks
from passes.verify_order import verify_order
from passes.verify_swaps import verify_swaps
from passes.violation import fail_at
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.program import Parts, Program, Template, results_of
from protrain_compile.roles import RECOMPUTES
from protrain_compile.schedule import Schedule, operation_of


def verify_program(program: Program, pass_name: str) -> None:
    """Check the captured graph and what the passes so far have found in it.

    Raises:
        VerifierError: If an invariant does not hold.
    """
    if program.stage_of:
        _check_stages(program, pass_name)
    for template in program.templates:
        if template.parts is not None:
            _check_parts(template, template.parts, pass_name)


def _check_stages(program: Program, pass_name: str) -> None:
    for node in program.calls():
        if node.op == "get_attr":
            continue
        backward = node in program.backward_nodes
        for source in node.all_input_nodes:
            if source.op in ("placeholder", "get_attr") or (source in program.backward_nodes) != backward:
                continue
            here, there = program.stage_of[node], program.stage_of[source]
            if (here > there) if backward else (here < there):
                raise VerifierError(
                    f"after {pass_name}: {node.name} runs in stage {here}, "
                    f"before its input {source.name} in stage {there}"
                )


def _check_parts(template: Template, parts: Parts, pass_name: str) -> None:
    repeated = [node for again in parts.recomputes.values() for node in again.graph.graph.nodes]
    if parts.backward is not None:
        forward = {node.name for node in parts.forward.graph.nodes}
        repeated += [node for node in parts.backward.graph.nodes if node.name in forward]
    for node in repeated:
        if never_recompute(node):
            raise VerifierError(
                f"after {pass_name}: {template.name} recomputes {node.name} ({node.target}), which must run once"
            )
    placeholders = list(parts.forward.graph.find_nodes(op="placeholder"))
    derived = {
        node
        for node, position in zip(placeholders, parts.forward_inputs, strict=True)
        if template.input_roles[position] == "parameter"
    }
    for node in parts.forward.graph.nodes:
        if (
            node.all_input_nodes
            and (is_view(node) or is_parameter_cast(node))
            and derived.issuperset(node.all_input_nodes)
        ):
            derived.add(node)
    for node in results_of(parts.forward)[parts.num_outputs :]:
        if node in derived:
            raise VerifierError(
                f"after {pass_name}: {template.name} saves {node.name}, which is (a view of) a parameter"
            )


def verify_schedule(schedule: Schedule, pass_name: str) -> None:
    """Check the graphs of a schedule.

    Raises:
        VerifierError: If an invariant does not hold.
    """
    where = f"after {pass_name}: "
    for name, module in schedule.graphs.items():
        _check_packs(module, name, where)
        _check_order(module, name, where)
    if schedule.chunks is not None:
        verify_chunks(schedule, where)
    elif schedule.swapped_bytes:
        verify_order(schedule, where, schedule_operations(schedule))
    verify_swaps(schedule, where)
    if "backward" in schedule.graphs:
        _check_recomputes(schedule, where)
        _check_gradients(schedule, where)


def _check_packs(module: fx.GraphModule, graph: str, where: str) -> None:
    for node in module.graph.nodes:
        if node.target is ops.pack and len(node.users) != 1:
            message = f"feeds {len(node.users)} calls; a packed list is emptied by the first"
            fail_at(where, graph, node, message, next(iter(node.users), None))


def _check_order(module: fx.GraphModule, graph: str, where: str) -> None:
    done: dict[tuple[str, int], fx.Node] = {}
    for node in module.graph.nodes:
        operation = operation_of(node)
        if operation is None or operation.segment < 0 or operation.chunk >= 0:
            continue
        key = (operation.op, operation.segment)
        if key in done:
            fail_at(where, graph, node, f"runs {operation.op} of {operation.what} again", done[key])
        if operation.op in RECOMPUTES and ("backward", operation.segment) in done:
            late = done["backward", operation.segment]
            fail_at(where, graph, node, f"recomputes {operation.what} after its backward", late)
        done[key] = node


def _check_recomputes(schedule: Schedule, where: str) -> None:
    wanted: dict[int, str] = {}
    for segment, policy in enumerate(block_policies(schedule)):
        role = schedule.parts_of(segment).recompute_of.get(policy)
        if role is not None:
            wanted[segment] = role
    recomputed = set()
    for node in schedule.graphs["backward"].graph.nodes:
        operation = operation_of(node)
        if operation is None:
            continue
        if operation.op in RECOMPUTES:
            recomputed.add(operation.segment)
            asked = wanted.get(operation.segment)
            if asked != operation.op:
                policy = "which its policy keeps" if asked is None else f"whose policy asks for {asked}"
                fail_at(where, "backward", node, f"recomputes {operation.what}, {policy}")
        elif operation.op == "backward" and operation.segment in wanted.keys() - recomputed:
            fail_at(where, "backward", node, f"runs {operation.what} without the recompute that its policy asks for")


def _check_gradients(schedule: Schedule, where: str) -> None:
    """Every trainable input's gradient leaves once: to autograd, or (of a managed one) to its chunk."""
    output = schedule.graphs["backward"].graph.output_node()
    gradients, inputs = results_of(schedule.graphs["backward"]), schedule.program.inputs
    if len(gradients) != len(inputs):
        fail_at(where, "backward", output, f"returns {len(gradients)} gradients for {len(inputs)} inputs")
    collected = _collected(schedule)
    for position, (source, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        leaves = (gradient is not None) + collected[position]
        if source.trainable and leaves == 0:
            fail_at(where, "backward", output, f"{source.name} is trainable but gets no gradient")
        if not source.trainable and leaves:
            fail_at(where, "backward", output, f"{source.name} is frozen but gets the gradient {gradient}")
        if leaves > 1:
            fail_at(where, "backward", output, f"the gradient of {source.name} is reduced {leaves} times")


def _collected(schedule: Schedule) -> collections.Counter[int]:
    """Count, for every input by position, the collects of its gradient."""
    found: collections.Counter[int] = collections.Counter()
    if schedule.chunks is None:
        return found
    position_of = {place: position for position, place in schedule.chunks.place_of.items()}
    for node in schedule.graphs["backward"].graph.nodes:
        if node.target is ops.collect:
            found.update(position_of[node.kwargs["chunk"], slot] for slot in node.kwargs["slots"])
    return found
