"""Pass offload_activations: the saved values of swapped blocks leave for the host, and are back for their backward.

For a block with policy *swap* (``#`` names the stream)::

    forward    t1_forward(inputs) -> outputs, saved values
               s = swap_out(swap, pack(saved values), segment=3)     # d2h: behind its forward
               ...                                                   the forward of its partner
               release_swapped(swap, s, segment=3)                   # compute: they have left; their memory is free
    backward   r = reload(swap, s, segment=3)                        # h2d: before the backward of its partner
               ...
               v = wait_reload(swap, r, segment=3)                   # compute
               t1_backward(pack(inputs, v[0], v[1], tangents)) -> gradients

``s`` leaves the forward in place of the values, so that it lives as long as the forward's context. Partners are decided
by ``swap_order``.

With *swap_products* a recompute stands between wait and backward. What that makes again does not leave the forward, so
the rest is what is swapped.

Swapped is every value that leaves the forward for this block's backward alone: what the block saves, and its input. Not
swapped, as that would free nothing or move a value twice: what another segment's backward reads too (it is kept on the
device, once), what shares memory with such a value, with an output or with an argument, and what has no bytes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from passes.apply_policies import block_policies
from passes.schedule_graph import artefact_calls, packed_arguments, segment_of
from protrain_compile import ops
from protrain_compile.liveness import Storage, StoragesOf, kept_sources, storages_of
from protrain_compile.program import fake_value, results_of
from protrain_compile.roles import SWAPS
from protrain_compile.schedule import BackwardInputs, Operation, Schedule
from protrain_compile.swap_layout import SwapLayout, lay_out
from protrain_compile.swap_order import partners

NOWHERE = -1
"""Reader of a value that must stay: none of the segments."""


@dataclasses.dataclass
class Group:
    """The values that one segment swaps: their placeholders in the backward, and what they are in the forward."""

    segment: int
    placeholders: list[fx.Node]
    sources: list[fx.Node]
    layout: SwapLayout


class OffloadActivations:
    """Insert swap_out, release, reload and wait for the blocks that are swapped."""

    name: ClassVar[str] = "offload_activations"
    requires: ClassVar[frozenset[str]] = frozenset({"graphs"})
    provides: ClassVar[frozenset[str]] = frozenset({"swaps"})

    def run(self, schedule: Schedule) -> bool:
        """Rewrite forward and backward; does nothing where no block is swapped."""
        if "backward" not in schedule.graphs:
            return False
        policies = block_policies(schedule)
        groups = find_groups(schedule, policies)
        if not groups:
            return False
        partner_of = partners([policy if i in groups else "keep" for i, policy in enumerate(policies)])
        schedule.backward_inputs = _kept_inputs(schedule, groups)
        schedule.swapped_bytes = tuple(group.layout.slab_bytes for group in groups.values())
        handles = _write_forward(schedule, groups, partner_of)
        _write_backward(schedule, groups, partner_of, handles)
        for module in (schedule.graphs["forward"], schedule.graphs["backward"]):
            module.recompile()
        return True


def find_groups(schedule: Schedule, policies: tuple[str, ...]) -> dict[int, Group]:
    """Return what every swapped segment swaps, by segment, in order; segments without such values are left out."""
    forward = list(schedule.graphs["forward"].graph.nodes)
    made = storages_of(forward, {})
    sources = kept_sources(schedule)
    readers = _readers_of_storages(schedule, made, sources)
    swapped = [index for index, policy in enumerate(policies) if policy in SWAPS]
    found: dict[int, Group] = {}
    for segment in swapped:
        placeholders = [
            node
            for node, source in sources.items()
            if made.get(source) and all(size > 0 and readers[key] == {segment} for key, size in made[source])
        ]
        if placeholders:
            values = [sources[node] for node in placeholders]
            layout = lay_out([fake_value(node) for node in values], [made[node][0][0] for node in values])
            found[segment] = Group(segment, placeholders, values, layout)
    return found


def _readers_of_storages(
    schedule: Schedule, made: StoragesOf, sources: dict[fx.Node, fx.Node]
) -> dict[Storage, set[int]]:
    """Return the segments whose backward reads each storage; NOWHERE among them says that it must stay."""
    module = schedule.graphs["forward"]
    followers = _followers(module)
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    results = results_of(module)
    outputs = results[: len(results) - schedule.backward_inputs.num_kept]
    arguments = [node for node in order if node.op in ("placeholder", "get_attr")]
    readers: dict[Storage, set[int]] = {
        key: {NOWHERE} for node in [*arguments, *outputs] for key, _ in made.get(node, ())
    }
    for placeholder, source in sources.items():
        segments = {_reader(user) for user in placeholder.users}
        late = any(s in followers and order[source] > order[followers[s]] for s in segments)
        if late or not _is_movable(fake_value(source), schedule):
            segments = {NOWHERE}
        for key, _ in made.get(source, ()):
            readers.setdefault(key, set()).update(segments)
    return readers


def _reader(user: fx.Node) -> int:
    if user.target is not ops.pack:
        return NOWHERE
    (call,) = user.users
    return segment_of(call)


def _is_movable(value: Any, schedule: Schedule) -> bool:
    """Whether a value is plain memory on the device that computes."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
        and value.device == schedule.program.device
    )


def _kept_inputs(schedule: Schedule, groups: dict[int, Group]) -> BackwardInputs:
    """Return the backward's inputs with one handle per group in place of its values, after the other kept ones."""
    inputs = schedule.backward_inputs
    gone = {node for group in groups.values() for node in group.placeholders}
    stay = [i for i, node in enumerate(kept_sources(schedule)) if node not in gone]
    nothing = (None,) * len(groups)
    return dataclasses.replace(
        inputs,
        num_kept=len(stay) + len(groups),
        kept_outputs=(*(inputs.kept_outputs[i] for i in stay), *nothing),
        kept_arguments=(*(inputs.kept_arguments[i] for i in stay), *nothing),
    )


def _followers(module: fx.GraphModule) -> dict[int, fx.Node]:
    """Return the node that follows every segment's call and its items."""
    found: dict[int, fx.Node] = {}
    for call in artefact_calls(module):
        follower = call.next
        while follower.target is operator.getitem and follower.args[0] is call:
            follower = follower.next
        found[segment_of(call)] = follower
    return found


@dataclasses.dataclass
class _Writer:
    """Writes operations on swapped values into one graph."""

    schedule: Schedule
    module: fx.GraphModule

    def __post_init__(self) -> None:
        first = next(iter(self.module.graph.nodes))
        with self.module.graph.inserting_before(first):
            self.swap = self.module.graph.placeholder("swap")
        self.swap.meta["swap"] = True

    def call(
        self, target: Callable[..., Any], op: str, group: Group, argument: fx.Node, stream: str, *, moves: bool = False
    ) -> fx.Node:
        """Write a call at the graph's insertion point."""
        segment = group.segment
        node = self.module.graph.call_function(target, (self.swap, argument), {"segment": segment, "stream": stream})
        moved = group.layout.moved_bytes if moves else 0
        what = self.schedule.program.segments[segment].stage.name
        node.meta["operation"] = Operation(op, what, stream, segment, moved_bytes=moved)
        node.meta["layout"] = group.layout
        return node

    def release(self, group: Group, handle: fx.Node) -> None:
        """Write the release of what a group has swapped."""
        self.call(ops.release_swapped, "release", group, handle, "compute")


def _write_forward(schedule: Schedule, groups: dict[int, Group], partner_of: dict[int, int]) -> dict[int, fx.Node]:
    """Insert swap_out and release; return the handles, which leave the graph in place of the values."""
    module = schedule.graphs["forward"]
    graph, followers = module.graph, _followers(module)
    _take_from_results(module, groups)
    writer = _Writer(schedule, module)
    handles: dict[int, fx.Node] = {}
    for segment in range(len(schedule.program.segments)):
        ran = max((s for s in followers if s <= segment), default=min(followers))
        with graph.inserting_before(followers[ran]):
            for earlier in [s for s in handles if partner_of[s] == segment]:
                writer.release(groups[earlier], handles[earlier])
            if segment in groups:
                packed = graph.call_function(ops.pack, tuple(groups[segment].sources))
                handles[segment] = writer.call(ops.swap_out, "offload", groups[segment], packed, "d2h", moves=True)
                if partner_of[segment] == segment:
                    writer.release(groups[segment], handles[segment])
    output = graph.output_node()
    output.args = ((*output.args[0], *handles.values()),)  # type: ignore[misc]
    return handles


def _take_from_results(module: fx.GraphModule, groups: dict[int, Group]) -> None:
    """Take the swapped values out of what the forward returns for the backward."""
    gone = {node for group in groups.values() for node in group.sources}
    output = module.graph.output_node()
    results: tuple[Any, ...] = output.args[0]  # type: ignore[assignment]
    output.args = (tuple(each for each in results if each not in gone),)


def _write_backward(
    schedule: Schedule, groups: dict[int, Group], partner_of: dict[int, int], handles: dict[int, fx.Node]
) -> None:
    """Insert reload and wait, and feed the backward of each group from them."""
    module = schedule.graphs["backward"]
    calls = list(artefact_calls(module))
    writer = _Writer(schedule, module)
    placeholders = _handle_placeholders(module, groups, handles)
    for segment in reversed(groups):
        group = groups[segment]
        first = next(call for call in calls if segment_of(call) <= partner_of[segment])
        reader = next(call for call in calls if segment_of(call) == segment)
        with module.graph.inserting_before(packed_arguments(first)):
            reloaded = writer.call(ops.reload, "reload", group, placeholders[segment], "h2d", moves=True)
        with module.graph.inserting_before(packed_arguments(reader)):
            arrived = writer.call(ops.wait_reload, "wait", group, reloaded, "compute")
            for number, placeholder in enumerate(group.placeholders):
                item = module.graph.call_function(operator.getitem, (arrived, number))
                item.meta["val"] = placeholder.meta["val"]
                placeholder.replace_all_uses_with(item)
                module.graph.erase_node(placeholder)


def _handle_placeholders(
    module: fx.GraphModule, groups: dict[int, Group], handles: dict[int, fx.Node]
) -> dict[int, fx.Node]:
    """Add one placeholder per handle behind the other kept values, in the order in which the forward returns them."""
    found: dict[int, fx.Node] = {}
    nodes: list[fx.Node] = list(module.graph.find_nodes(op="placeholder"))
    anchor = [node for node in nodes if node.meta.get("kind") != "tangents"][-1]
    for segment in handles:
        with module.graph.inserting_after(anchor):
            anchor = module.graph.placeholder(f"swapped_{segment}")
        anchor.meta["kind"] = "kept"
        found[segment] = anchor
    assert list(found) == list(groups)
    return found
