"""Capture: from what Dynamo and AOTAutograd hand over to a Program.

Dynamo calls the backend with a graph and its real inputs (``describe_inputs`` reads their names and kinds then:
later they are fake). AOTAutograd then calls the partitioner with the joint graph, or the inference compiler with the
forward graph; both become a Program by ``capture_program``. AOTAutograd may drop, reorder or merge inputs, so each
placeholder of its graph is traced back to the backend's inputs by descriptor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from protrain_compile import compat
from protrain_compile.guards import ManagedParameter
from protrain_compile.program import GraphInput, InputKind, Program, fake_value, is_symbol


def describe_inputs(gm: fx.GraphModule) -> list[GraphInput]:
    """Return what each input of Dynamo's graph is; must be called while the backend runs."""
    return [_describe(node) for node in gm.graph.find_nodes(op="placeholder")]


def _describe(node: fx.Node) -> GraphInput:
    example, source = compat.traced_example(node)
    name = source_name(source)
    if isinstance(example, torch.nn.Parameter):
        managed = isinstance(example, ManagedParameter)
        hoistable = isinstance(example, ManagedParameter) and example._home.may_travel(example._index)
        frozen = not example.requires_grad
        return GraphInput(name, InputKind.PARAMETER, managed=managed, frozen=frozen, hoistable=hoistable)
    if isinstance(example, torch.nn.Buffer) or "._buffers[" in source:
        return GraphInput(name, InputKind.BUFFER)
    if isinstance(example, torch.Tensor):
        return GraphInput(name, InputKind.INPUT)
    return GraphInput(name, InputKind.SYMBOL if example is None or isinstance(example, int) else InputKind.INPUT)


def source_name(source: str) -> str:
    """Return ``blocks.0.ln.weight`` for a source such as ``L['self']._modules['blocks']...``."""
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    name = re.sub(r"\['?([^'\]]*)'?\]", r".\1", name)
    return re.sub(r"^[LG]\.(?:self\.)?", "", name)


def model_name(gm: fx.GraphModule) -> str:
    """Return the class name of the module that Dynamo is tracing, or of the outermost one that it recorded."""
    traced = compat.traced_module_name()
    if traced is not None:
        return traced
    for node in gm.graph.nodes:
        for _, root in (node.meta.get("nn_module_stack") or {}).values():
            name = root if isinstance(root, str) else root.__name__
            return str(name).rpartition(".")[2]
    return "function"


def capture_program(
    name: str,
    graph: fx.GraphModule,
    described: Sequence[GraphInput],
    num_primals: int,
    num_outputs: int,
    differentiable: bool,
) -> Program:
    """Return the Program of AOTAutograd's graph.

    Args:
        name: What to call the model.
        graph: The joint graph, or the forward graph of an inference.
        described: What the backend's inputs are.
        num_primals: How many placeholders the forward receives; the others are tangents.
        num_outputs: How many results are forward outputs; the others are gradients.
        differentiable: Whether ``graph`` is a joint graph.
    """
    unify_symbols(graph)
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    _drop_aliases(graph, placeholders[:num_primals])
    output = graph.graph.output_node()
    results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    gradients = results[num_outputs:] if differentiable else ()
    mutated = compat.mutated_positions(output)
    inputs = []
    for number, node in enumerate(placeholders[:num_primals]):
        position = compat.input_position(node)
        source = described[position] if position is not None and position < len(described) else None
        kind = source.kind if source is not None else InputKind.INPUT
        if is_symbol(node) or not isinstance(fake_value(node), torch.Tensor):
            kind = InputKind.SYMBOL
        inputs.append(
            GraphInput(
                name=source.name if source is not None else node.name,
                kind=kind,
                trainable=number < len(gradients) and gradients[number] is not None,
                mutated=position is not None and position in mutated,
                managed=source is not None and source.managed,
                frozen=source is not None and source.frozen,
                hoistable=source is not None and source.hoistable,
            )
        )
    return Program(name, graph, tuple(inputs), num_outputs, differentiable)


def unify_symbols(graph: fx.GraphModule) -> None:
    """Compute every symbolic size once, where the graph has it first.

    Tracing computes a size anew until it has a cached node for it, so that the first block of a model would take its
    sizes from other nodes than the later ones do, and be of another structure.
    """
    first: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if not is_symbol(node):
            continue
        source = first.setdefault((type(fake_value(node)), fake_value(node).node.expr), node)
        if source is not node and node.op != "placeholder":
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


def _drop_aliases(graph: fx.GraphModule, placeholders: Sequence[fx.Node]) -> None:
    """Let users of an input's alias use the input: tracing a managed parameter goes through one (see ``guards``)."""
    for node in placeholders:
        for user in list(node.users):
            if user.target is torch.ops.aten.alias.default:
                user.replace_all_uses_with(node)
                graph.graph.erase_node(user)
