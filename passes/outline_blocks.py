"""Pass outline_blocks: cut the captured graph into one joint subgraph per stage.

For the stage s with forward nodes F and backward nodes B (``->`` is data flow)::

    primals    values that F uses and others made (graph inputs, outputs of earlier stages),
               then forward values that only B uses ("foreign": the stage that makes them saves them)
    tangents   gradients that B uses and later stages (or autograd) made; also values of a later stage's
               forward, which this stage's forward cannot have
    outputs    values of F that other stages' forwards or backwards, or the user, need
    gradients  values of B that other stages' backwards, or autograd, need

A forward value that only this stage's own backward needs is no output: partitioning the template decides
whether it is saved. Symbols that occur in the sizes are passed as inputs of their own, and so are the constant tensors
that tracing found (``torch.tensor(0.5)`` in a forward): blocks that differ in them alone stay equal.

Views and casts of parameters belong to no stage: every segment that uses one makes it from the parameter itself. A view
handed from one segment to another would outlive its chunk's stay in a buffer. Nor do numbers computed from symbols:
functorch's partitioner saves integers only, so that a segment has to compute a fraction itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import fx

from passes.node_facts import free_symbols, is_parameter_cast, is_view
from protrain_compile.program import InputKind, Program, Segment, fake_value, is_symbol


class OutlineBlocks:
    """Make the segments."""

    name: ClassVar[str] = "outline_blocks"
    requires: ClassVar[frozenset[str]] = frozenset({"stages", "hoisted", "seeded"})
    provides: ClassVar[frozenset[str]] = frozenset({"segments"})

    def run(self, program: Program) -> bool:
        """Set ``segments``; the captured graph stays as it is."""
        cut = _Cut(program)
        segments = [cut.segment(stage) for stage in range(len(program.stages))]
        program.segments = tuple(segment for segment in segments if segment is not None)
        return False


@dataclasses.dataclass
class _StageNodes:
    forward: list[fx.Node] = dataclasses.field(default_factory=list)
    backward: list[fx.Node] = dataclasses.field(default_factory=list)


class _Cut:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.primals = dict.fromkeys(program.primals)
        self.tangents = set(program.tangents)
        self.stages = [_StageNodes() for _ in program.stages]
        self.symbol_nodes = _symbol_nodes(program)
        numbers = _made_from_symbols(program) - set(self.symbol_nodes.values())
        self.remade = _made_from_parameters(program) | numbers
        for node in program.calls():
            if node.op == "get_attr" or node in self.remade:
                continue
            nodes = self.stages[program.stage_of[node]]
            (nodes.backward if node in program.backward_nodes else nodes.forward).append(node)
        self.returned = {node for node in program.results if isinstance(node, fx.Node)}
        self.roles = _input_roles(program)

    def segment(self, index: int) -> Segment | None:
        """Return the segment of stage ``index``, or None if the stage is empty."""
        nodes = self.stages[index]
        if not nodes.forward and not nodes.backward:
            return None
        forward, backward = set(nodes.forward), set(nodes.backward)
        inputs: dict[fx.Node, None] = {}
        tangents: dict[fx.Node, None] = {}
        for node in nodes.forward:
            inputs.update((each, None) for each in self._operands(node) if each not in forward)
        for node in nodes.backward:
            for each in self._operands(node):
                if each.op == "get_attr":
                    inputs[each] = None
                elif each in self.program.backward_nodes or each in self.tangents:
                    if each not in backward:
                        tangents[each] = None
                elif self.program.stage_of.get(each, 0) > index:
                    tangents[each] = None
                elif each not in forward:
                    inputs[each] = None
        self._add_symbols(inputs, nodes, forward)
        outputs = [node for node in nodes.forward if self._leaves(node, forward | backward)]
        gradients = [node for node in nodes.backward if self._leaves(node, backward)]
        joint = _extract(self.program.graph, self.remade, list(inputs), list(tangents), nodes, outputs + gradients)
        return Segment(
            stage=self.program.stages[index],
            joint=joint,
            inputs=tuple(inputs),
            tangents=tuple(tangents),
            outputs=tuple(outputs),
            gradients=tuple(gradients),
            input_roles=tuple("buffer" if self._is_constant(n) else self.roles.get(n, "value") for n in inputs),
        )

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the values that ``node`` needs from outside or inside its segment, through what is made again."""
        found: list[fx.Node] = []
        for each in node.all_input_nodes:
            if each in self.remade:
                found += self._operands(each)
            elif each.op != "get_attr" or self._is_constant(each):
                found.append(each)
        return found

    def _is_constant(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and not isinstance(
            _attribute(self.program.graph, str(node.target)), fx.GraphModule
        )

    def _leaves(self, node: fx.Node, own: set[fx.Node]) -> bool:
        return node in self.returned or any(user not in own and user.op != "output" for user in node.users)

    def _add_symbols(self, inputs: dict[fx.Node, None], nodes: _StageNodes, forward: set[fx.Node]) -> None:
        """Pass every symbol that the segment's sizes mention as an input, unless the segment computes it."""
        if not self.symbol_nodes:
            return
        names: set[Any] = set()
        for node in [*inputs, *nodes.forward, *nodes.backward]:
            names |= free_symbols(fake_value(node))
        for symbol in sorted(names, key=str):
            source = self.symbol_nodes.get(symbol)
            if source is not None and source not in forward:
                inputs[source] = None


def _made_from_parameters(program: Program) -> set[fx.Node]:
    """Return the nodes that are views or casts of parameters and of nothing else, and do not leave the graph."""
    parameters = {
        node
        for node, source in zip(program.primals, program.inputs, strict=True)
        if source.kind is InputKind.PARAMETER and not source.mutated
    }
    found: set[fx.Node] = set()
    for node in program.calls():
        sources = node.all_input_nodes
        if sources and (is_view(node) or is_parameter_cast(node)) and (parameters | found).issuperset(sources):
            found.add(node)
    return found - set(program.results)


def _made_from_symbols(program: Program) -> set[fx.Node]:
    """Return the numbers that are computed from nothing but symbolic numbers, and do not leave the graph."""
    numbers = {node for node in program.calls() if is_symbol(node) and node.all_input_nodes}
    return {node for node in numbers if all(map(is_symbol, node.all_input_nodes))} - set(program.results)


def _symbol_nodes(program: Program) -> dict[Any, fx.Node]:
    """Return the node that stands for each plain symbol (a graph input, or the first node computing it)."""
    found: dict[Any, fx.Node] = {}
    for node in program.graph.graph.nodes:
        if is_symbol(node) and node not in program.backward_nodes:
            expression = fake_value(node).node.expr
            if expression.is_Symbol:
                found.setdefault(expression, node)
    return found


def _input_roles(program: Program) -> dict[fx.Node, str]:
    roles: dict[fx.Node, str] = {}
    for node, source in zip(program.primals, program.inputs, strict=True):
        if source.mutated:
            roles[node] = "mutated"
        elif source.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            roles[node] = source.kind.value
    return roles


def _extract(
    owner: fx.GraphModule,
    remade: set[fx.Node],
    inputs: list[fx.Node],
    tangents: list[fx.Node],
    nodes: _StageNodes,
    results: Iterable[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for kind, sources in (("primals", inputs), ("tangents", tangents)):
        for number, source in enumerate(sources, start=1):
            copies[source] = graph.placeholder(f"{kind}_{number}")
            copies[source].meta = {"val": fake_value(source)}
    attributes: dict[str, Any] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            attributes[str(node.target)] = _attribute(owner, str(node.target))
            copies[node] = graph.node_copy(node)
        elif node not in copies and node in remade:
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    for node in nodes.forward + nodes.backward:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(attributes, graph)


def _attribute(owner: fx.GraphModule, target: str) -> Any:
    value: Any = owner
    for name in target.split("."):
        value = getattr(value, name)
    return value
