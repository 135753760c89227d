"""outline_blocks: one joint subgraph per stage, cut so that nothing is lost and everything arrives in time."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from support.capture import Graph, capture
from support.light import GPT
from support.models import Llama, tokens
from torch import nn

from passes import structure_pipeline
from passes.node_facts import op_name
from passes.outline_blocks import OutlineBlocks, free_symbols
from passes.seed_randomness import SeedRandomness
from passes.tag_blocks import TagBlocks
from protrain_compile.program import GraphInput, InputKind, Program, Stage, fake_value, is_symbol

aten = torch.ops.aten


def outlined(model: Any, *inputs: Any, **keywords: Any) -> Program:
    program = capture(model, *inputs, **keywords)
    for each in (TagBlocks(), SeedRandomness(inductor_draws=False), OutlineBlocks()):
        each.run(program)
    return program


MODELS: list[tuple[nn.Module, dict[str, Any]]] = [
    (GPT(3), {}),
    (GPT(2, tied=False, dropout=0.1), {}),
    (Llama(2), {}),
    (GPT(2), {"dynamic": True}),
]
IDS = ["gpt", "dropout", "llama", "dynamic"]


@pytest.fixture(params=range(len(MODELS)), ids=IDS, scope="module")
def program(request: pytest.FixtureRequest) -> Program:
    model, keywords = MODELS[request.param]
    return outlined(model, tokens(), **keywords)


def test_the_subgraphs_are_well_formed(program: Program) -> None:
    for segment in program.segments:
        segment.joint.graph.lint()
        names = [node.target for node in segment.joint.graph.find_nodes(op="placeholder")]
        inputs = [f"primals_{i + 1}" for i in range(len(segment.inputs))]
        assert names == inputs + [f"tangents_{i + 1}" for i in range(len(segment.tangents))]
        results = segment.joint.graph.output_node().args[0]
        assert len(results) == len(segment.outputs) + len(segment.gradients)  # type: ignore[arg-type]
        assert len(segment.input_roles) == len(segment.inputs)


def test_every_call_is_in_one_segment(program: Program) -> None:
    """But for numbers computed from symbols, which every segment makes itself."""
    ours = collections.Counter(str(node.target) for node in program.calls() if not is_symbol(node))
    theirs = collections.Counter(
        str(node.target)
        for segment in program.segments
        for node in segment.joint.graph.nodes
        if node.op not in ("placeholder", "output") and not is_symbol(node)
    )
    assert ours == theirs


def test_values_arrive_in_time(program: Program) -> None:
    """Inputs come from earlier segments' forwards, tangents from what ran before in the backward."""
    made_forward = set(program.primals)
    for segment in program.segments:
        used = {n for n in segment.inputs if any(u not in program.backward_nodes for u in n.users)}
        assert used <= made_forward | set(segment.outputs)
        made_forward |= set(segment.outputs)
    made_backward = set(program.tangents) | made_forward
    for segment in reversed(program.segments):
        assert set(segment.tangents) <= made_backward
        assert set(segment.inputs) <= made_forward
        made_backward |= set(segment.gradients)
    wanted = {node for node in program.results if isinstance(node, torch.fx.Node)}
    assert wanted <= made_backward


def test_nothing_leaves_that_nobody_wants(program: Program) -> None:
    wanted = {node for node in program.results if isinstance(node, torch.fx.Node)}
    for segment in program.segments:
        wanted |= set(segment.inputs) | set(segment.tangents)
    for segment in program.segments:
        assert set(segment.outputs) | set(segment.gradients) <= wanted


def test_a_block_takes_the_stream_and_its_own_parameters() -> None:
    program = outlined(GPT(3), tokens())
    blocks = [segment for segment in program.segments if segment.stage.kind == "block"]
    for index, segment in enumerate(blocks):
        names = {
            source.name for node, source in zip(program.primals, program.inputs, strict=True) if node in segment.inputs
        }
        assert names == {name for name in (i.name for i in program.inputs) if name.startswith(f"blocks.{index}.")}
        assert segment.input_roles.count("parameter") == len(names)
        assert segment.input_roles.count("value") == 1
        assert len(segment.outputs) == 1
        assert len(segment.tangents) == 1


def test_a_parameter_used_in_two_segments_gives_a_gradient_in_each() -> None:
    program = outlined(GPT(3, tied=True), tokens())
    shape = (64, 16)
    last, first = program.segments[-1], program.segments[0]
    assert any(fake_value(node).shape == shape for node in last.gradients)
    assert any(fake_value(node).shape == shape for node in first.tangents)


def test_roles() -> None:
    class Counting(GPT):
        def __init__(self) -> None:
            super().__init__(2)
            self.register_buffer("scale", torch.ones(()))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(ids) * self.scale * self.calls

    program = outlined(Counting(), tokens())
    roles = {
        program.inputs[program.primals.index(node)].name: role
        for segment in program.segments
        for node, role in zip(segment.inputs, segment.input_roles, strict=True)
        if node in program.primals
    }
    assert roles["scale"] == "buffer"
    assert roles["calls"] == "mutated"
    assert roles["norm.weight"] == "parameter"
    assert roles["ids"] == "value"


def hand_made() -> Program:
    """Two stages; stage 0 makes ``a`` and ``mask``, and only stage 1's backward needs the mask."""
    graph = Graph()
    x, w = graph.input("primals_1", 4), graph.input("primals_2", 4)
    tangent = graph.input("tangents_1", 4)
    a = graph.call(aten.mul.Tensor, x, w)
    mask = graph.call(aten.gt.Scalar, x, 0)
    b = graph.call(aten.relu.default, a)
    masked = graph.call(aten.where.self, mask, tangent, x)
    grad_w = graph.call(aten.mul.Tensor, masked, x)
    module = graph.module(b, None, grad_w)
    inputs = (GraphInput("x", InputKind.INPUT), GraphInput("w", InputKind.PARAMETER, trainable=True))
    program = Program("Hand", module, inputs, 1, True)
    program.stages = (Stage("prologue", "prologue"), Stage("epilogue", "epilogue"))
    program.stage_of = {a: 0, mask: 0, b: 1, masked: 1, grad_w: 0}
    program.backward_nodes = {masked, grad_w}
    return program


def test_a_value_that_only_another_backward_needs_is_an_output_of_its_maker() -> None:
    program = hand_made()
    assert OutlineBlocks().run(program) is False
    first, last = program.segments
    names = {n: op_name(n) if n.op == "call_function" else n.name for n in program.graph.graph.nodes}
    assert [names[n] for n in first.outputs] == ["mul", "gt"]
    assert [names[n] for n in first.tangents] == ["where"]
    assert [names[n] for n in first.gradients] == ["mul"]
    assert [names[n] for n in last.inputs] == ["mul", "gt", "primals_1"]
    assert [names[n] for n in last.tangents] == ["tangents_1"]
    assert [names[n] for n in last.outputs] == ["relu"]
    assert [names[n] for n in last.gradients] == ["where"]
    assert first.input_roles == ("value", "parameter")


def test_empty_stages_have_no_segment() -> None:
    program = hand_made()
    program.stages = (*program.stages, Stage("between", "between 0"))
    OutlineBlocks().run(program)
    assert [segment.stage.name for segment in program.segments] == ["prologue", "epilogue"]


def test_symbols_are_inputs_of_their_own(program: Program) -> None:
    for segment in program.segments:
        needed: set[Any] = set()
        for node in segment.joint.graph.nodes:
            needed |= free_symbols(fake_value(node))
        passed: set[Any] = set()
        for node in segment.inputs:
            if not isinstance(fake_value(node), torch.Tensor):
                passed |= free_symbols(fake_value(node))
        computed: set[Any] = set()
        for node in segment.joint.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            computed |= free_symbols(fake_value(node))
        assert needed <= passed | computed


def test_constant_tensors_are_inputs() -> None:
    """A tensor that the graph holds as an attribute is passed to the subgraph that uses it: equal blocks stay equal."""
    graph = Graph()
    x = graph.input("primals_1", 4)
    constant = graph.graph.get_attr("constant")
    constant.meta["val"] = graph.tensor(4)
    y = graph.call(aten.add.Tensor, x, constant)
    graph.graph.output((y,))
    module = torch.fx.GraphModule({"constant": torch.arange(4.0)}, graph.graph)
    program = Program("Hand", module, (GraphInput("x", InputKind.INPUT),), 1, False)
    program.stages, program.stage_of = (Stage("prologue", "prologue"),), {constant: 0, y: 0}
    OutlineBlocks().run(program)
    (segment,) = program.segments
    assert (segment.inputs, segment.input_roles) == ((x, constant), ("value", "buffer"))
    torch.testing.assert_close(segment.joint(torch.ones(4), torch.arange(4.0))[0], torch.arange(4.0) + 1)


def test_the_pass_does_not_touch_the_graph() -> None:
    program = capture(GPT(2), tokens())
    before = str(program.graph.graph)
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    assert str(program.graph.graph) == before
