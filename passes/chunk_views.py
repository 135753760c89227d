"""What the operations of a schedule's graphs refer to: views of chunks, and results of other operations.

``effects`` says what an operation does, given its arguments; here the arguments of every node are looked up, through
``pack``, ``getitem`` and results that only view an argument. A value that the forward keeps for the backward is the
same value in both graphs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from passes import effects
from passes.effects import Access, Call, Effect, effect_of
from passes.rank_effects import table_of
from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.liveness import kept_sources
from protrain_compile.schedule import Schedule
from protrain_compile.sizes import storage_key

Accesses = tuple[Access, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A node that issues something: its row of the table, and what it is called with."""

    graph: str
    node: fx.Node
    effect: Effect
    call: Call


def schedule_operations(schedule: Schedule) -> dict[str, list[Operation]]:
    """Return the operations of every graph, in order.

    Results that only ever meet the compute stream are left out: there, program order is all that orders them.
    """
    reader = _Reader(table_of(schedule.chunks))
    found: dict[str, list[Operation]] = {}
    for name in ("inference", "forward", "backward"):
        if name in schedule.graphs:
            if name == "backward" and "forward" in schedule.graphs:
                reader.keep(kept_sources(schedule))
            found[name] = list(reader.operations(name, schedule.graphs[name]))
    shared = _shared_values(each for operations in found.values() for each in operations)
    return {name: [_without_private(each, shared) for each in operations] for name, operations in found.items()}


class _Reader:
    """Reads graphs; remembers what their nodes refer to."""

    def __init__(self, table: Mapping[Callable[..., Any], Effect]) -> None:
        self._table = table
        self._made: dict[fx.Node, Accesses] = {}
        self._argument_of: dict[Artefact, dict[int, int]] = {}

    def keep(self, sources: dict[fx.Node, fx.Node]) -> None:
        """Let placeholders stand for nodes of another graph."""
        self._made |= {here: self._made.get(there, ()) for here, there in sources.items()}

    def operations(self, graph: str, module: fx.GraphModule) -> Iterator[Operation]:
        """Yield the operations of a graph."""
        for node in module.graph.nodes:
            effect = effect_of(node, self._table)
            if effect is None:
                self._made.setdefault(node, self._passed_on(node))
                continue
            result = effects.value(f"{graph}.{node.name}") if node.users else None
            call = Call(node.kwargs, self._inputs(node), result)
            if node.target in (ops.bind, ops.wait):
                self._made[node] = (effects.view(node.target, call),)
                call = dataclasses.replace(call, result=None)
            elif node.target is ops.wait_reload:
                self._made[node] = call.inputs
            elif result is not None:
                self._made[node] = (result,)
            yield Operation(graph, node, effect, call)

    def _inputs(self, node: fx.Node) -> Accesses:
        """Return what a node is given; of the release of swapped values, these."""
        if node.target is ops.release_swapped:
            node = node.args[1].args[1]  # type: ignore[union-attr, assignment]
        return tuple(dict.fromkeys(a for source in node.all_input_nodes for a in self._made.get(source, ())))

    def _passed_on(self, node: fx.Node) -> Accesses:
        """Return what a node without a row refers to: all of a pack; of an item also the argument that it views."""
        if node.op != "call_function":
            return ()
        passed = self._inputs(node)
        call = node.args[0] if node.target is operator.getitem else None
        if isinstance(call, fx.Node) and isinstance(call.target, Artefact):
            viewed = self._viewed_argument(call, call.target, node)
            passed += self._made.get(viewed, ()) if viewed is not None else ()
        return passed

    def _viewed_argument(self, call: fx.Node, artefact: Artefact, item: fx.Node) -> fx.Node | None:
        """Return the argument of an artefact's call whose memory the result ``item`` shares, if any."""
        value, packed = item.meta.get("val"), call.args[0]
        if not isinstance(value, torch.Tensor) or not isinstance(packed, fx.Node):
            return None
        if artefact not in self._argument_of:
            given = [node.meta.get("val") for node in artefact.graph.graph.find_nodes(op="placeholder")]
            tensors = {storage_key(each): i for i, each in enumerate(given) if isinstance(each, torch.Tensor)}
            self._argument_of[artefact] = tensors
        position = self._argument_of[artefact].get(storage_key(value))
        argument = None if position is None else packed.args[position]
        return argument if isinstance(argument, fx.Node) else None


def _shared_values(operations: Iterable[Operation]) -> set[Access]:
    """Return the results that an operation on another stream than compute reads or makes."""
    return {
        access
        for each in operations
        if each.node.kwargs.get("stream") != "compute"
        for access in (*each.call.inputs, each.call.result)
        if access is not None and access.resource.kind == "value"
    }


def _without_private(operation: Operation, shared: set[Access]) -> Operation:
    call = operation.call
    inputs = tuple(each for each in call.inputs if each.resource.kind != "value" or each in shared)
    result = call.result if call.result in shared else None
    if inputs == call.inputs and result == call.result:
        return operation
    return dataclasses.replace(operation, call=Call(call.arguments, inputs, result))
