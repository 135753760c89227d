"""partition_templates: the parts compute what the joint graph computes, and save what may be saved."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from support.capture import Graph, capture
from support.models import GPT, Llama, tokens
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from passes import structure_pipeline
from passes.node_facts import draws_randomness, never_recompute
from passes.partition_templates import partition
from protrain_compile.program import Parts, Program, Ref, Template, fake_value, results_of

aten = torch.ops.aten


def partitioned(model: nn.Module, *, inductor: bool = False) -> Program:
    program = capture(model, tokens())
    structure_pipeline(inductor=inductor, inductor_draws=inductor).run(program)
    return program


def example(node: fx.Node) -> Any:
    """Return real data like a placeholder's fake value."""
    value = fake_value(node)
    if not isinstance(value, Tensor):
        return 1
    if value.dtype.is_floating_point:
        real = torch.randn(value.shape, dtype=torch.float32).to(value.dtype)
    else:
        real = torch.randint(0, 2, value.shape).to(value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(real)


def bind(refs: tuple[Ref, ...], inputs: list[Any], saved: list[Any], tangents: list[Any]) -> list[Any]:
    sources = {"input": inputs, "saved": saved, "tangent": tangents}
    return [sources[ref.kind][ref.index] for ref in refs]


def check_parts(template: Template) -> None:
    """Run the joint graph, and the parts in keep's and in recompute's order; all give the same."""
    parts = template.parts
    assert parts is not None
    torch.manual_seed(0)
    examples = [example(node) for node in template.joint.graph.find_nodes(op="placeholder")]
    inputs, tangents = examples[: len(template.input_roles)], examples[len(template.input_roles) :]
    expected = template.joint(*examples)
    results = list(parts.forward(*(inputs[i] for i in parts.forward_inputs)))
    outputs, saved = results[: parts.num_outputs], results[parts.num_outputs :]
    assert_equal(outputs, expected[: parts.num_outputs])
    if parts.backward is None:
        assert len(expected) == parts.num_outputs
        return
    for recompute in parts.recomputes.values():
        kept = [None if i in recompute.results else value for i, value in enumerate(saved)]
        again = recompute.graph(*bind(recompute.inputs, inputs, kept, tangents))
        for index, value in zip(recompute.results, again, strict=True):
            torch.testing.assert_close(value, saved[index], rtol=0, atol=0)
        assert not parts.pinned & set(recompute.results)
    if parts.recomputes:
        assert set(parts.recomputes["recompute"].results) | parts.pinned == set(range(len(saved)))
    gradients = parts.backward(*bind(parts.backward_inputs, inputs, saved, tangents))
    assert_equal(list(gradients), list(expected[parts.num_outputs :]))


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=["gpt", "llama", "dropout"])
def program(request: pytest.FixtureRequest) -> Program:
    return partitioned({"gpt": GPT(2), "llama": Llama(2), "dropout": GPT(2, dropout=0.2, tied=False)}[request.param])


def test_the_parts_compute_what_the_joint_graph_computes(program: Program) -> None:
    for template in program.templates:
        if not any(draws_randomness(node) for node in template.joint.graph.nodes):  # two runs draw differently
            check_parts(template)


def test_the_graphs_are_well_formed_and_take_only_what_they_use(program: Program) -> None:
    for template in program.templates:
        assert template.parts is not None
        parts = template.parts
        counts = {"forward": len(parts.forward_inputs), "backward": len(parts.backward_inputs)}
        counts |= {role: len(recompute.inputs) for role, recompute in parts.recomputes.items()}
        for role, module in parts.graphs().items():
            module.graph.lint()
            assert all(node.users for node in module.graph.find_nodes(op="placeholder"))
            assert len(module.graph.find_nodes(op="placeholder")) == counts[role]


def test_draws_are_saved_and_not_repeated(program: Program) -> None:
    for template in program.templates:
        parts = template.parts
        assert parts is not None
        for recompute in parts.recomputes.values():
            assert not any(never_recompute(node) for node in recompute.graph.graph.nodes)
        draws = [node for node in parts.forward.graph.nodes if node.op == "call_function" and never_recompute(node)]
        if draws and parts.backward is not None:
            assert parts.pinned


def test_a_block_saves_no_parameter(program: Program) -> None:
    """Transposed weights are views of parameters; the backward makes them again."""
    for template in program.templates:
        assert template.parts is not None
        forward = template.parts.forward
        placeholders = set(forward.graph.find_nodes(op="placeholder"))
        saved = results_of(forward)[template.parts.num_outputs :]
        assert not placeholders & set(saved)
    block = program.templates[1]
    assert block.parts is not None
    taken = {ref.index for ref in block.parts.backward_inputs if ref.kind == "input"}
    assert any(block.input_roles[i] == "parameter" for i in taken)


def test_seeded_dropout_is_recomputed() -> None:
    """With seeds the masks are functions of an input, so nothing is pinned but routing and seeds."""
    program = partitioned(GPT(2, dropout=0.2), inductor=True)
    parts = program.templates[1].parts
    assert parts is not None
    for recompute in parts.recomputes.values():
        assert torch.ops.prims.inductor_random.default in {node.target for node in recompute.graph.graph.nodes}


def test_the_captured_graph_and_the_template_stay() -> None:
    program = capture(GPT(2), tokens())
    pipeline = structure_pipeline(inductor=True, inductor_draws=False)
    for each in pipeline.passes[:-1]:
        each.run(program)
    before = [str(template.joint.graph) for template in program.templates]
    pipeline.passes[-1].run(program)
    assert [str(template.joint.graph) for template in program.templates] == before


def hand_made(cast: bool = False) -> Template:
    """Return the template of ``y = x @ w.t()`` with gradients for both; ``cast`` computes in bf16."""
    graph = Graph()
    x, w = graph.input("primals_1", 3, 4), graph.input("primals_2", 5, 4)
    tangent = graph.input("tangents_1", 3, 5)
    operand, weight = x, w
    if cast:
        operand, weight = (graph.call(torch.ops.prims.convert_element_type.default, n, torch.bfloat16) for n in (x, w))
        tangent = graph.call(torch.ops.prims.convert_element_type.default, tangent, torch.bfloat16)
    transposed = graph.call(aten.t.default, weight)
    y = graph.call(aten.mm.default, operand, transposed)
    back = graph.call(aten.t.default, transposed)
    grad_x = graph.call(aten.mm.default, tangent, back)
    grad_w = graph.call(aten.mm.default, graph.call(aten.t.default, tangent), operand)
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            backward = node in (back, grad_x, grad_w) or any(s in (tangent,) for s in node.all_input_nodes)
            node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
    return Template("t0", graph.module(y, grad_x, grad_w), ("value", "parameter"), 1)


@pytest.mark.parametrize("cast", [False, True], ids=["view", "cast"])
def test_views_and_casts_of_parameters_are_rebuilt(cast: bool) -> None:
    template = hand_made(cast)
    template.parts = partition(template, inductor=False)
    saved = results_of(template.parts.forward)[1:]
    assert not any(fake_value(node).shape in ((4, 5), (5, 4)) for node in saved)
    assert Ref("input", 1) in template.parts.backward_inputs
    check_parts(template)


def test_draws_in_a_checkpoint_region_are_saved() -> None:
    """Although the region asks for them to be computed again."""
    graph = Graph()
    x, tangent = graph.input("primals_1", 3, 4), graph.input("tangents_1", 3, 4)
    mask = graph.call(aten.bernoulli.p, graph.call(aten.sin.default, x), 0.5)
    y, grad = graph.call(aten.mul.Tensor, x, mask), graph.call(aten.mul.Tensor, tangent, mask)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward" if node is grad else "is_forward"
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0} if node is not grad else {}
    parts = partition(Template("t0", graph.module(y, grad), ("value",), 1), inductor=False)
    assert [node.name for node in results_of(parts.forward)[1:]] == [mask.name]
    assert parts.pinned == {0}


def test_a_template_without_a_backward() -> None:
    graph = Graph()
    x, unused = graph.input("primals_1", 4), graph.input("primals_2", 4)
    y = graph.input("primals_3", 4)
    template = Template("t0", graph.module(graph.call(aten.add.Tensor, x, y)), ("value",) * 3, 1)
    parts = partition(template, inductor=False)
    assert parts.forward_inputs == (0, 2)
    assert (parts.backward, parts.recomputes, parts.pinned, parts.backward_inputs) == (None, {}, frozenset(), ())
    assert len(list(parts.forward.graph.find_nodes(op="placeholder"))) == 2
    assert unused in template.joint.graph.nodes, "the template itself stays as it is"


def routed(decide: Any, *arguments: Any, chosen: tuple[int, ...]) -> Parts:
    """Return the parts of ``values = decide(relu(x))`` scattered back in the backward."""
    graph = Graph()
    x, tangent = graph.input("primals_1", 3, 4), graph.input("tangents_1", *chosen)
    relu = graph.call(aten.relu.default, x)
    top = graph.graph.call_function(decide, (relu, *arguments))
    top.meta["val"] = (graph.tensor(*chosen), graph.tensor(*chosen, dtype=torch.int64))
    items = []
    for i in range(2):
        items.append(graph.graph.call_function(operator.getitem, (top, i)))
        items[-1].meta["val"] = top.meta["val"][i]
    y = graph.call(aten.sin.default, items[0])
    zeros = graph.call(aten.mul.Tensor, x, 0.0)
    cos = graph.call(aten.cos.default, items[0])
    chain = graph.call(aten.mul.Tensor, tangent, cos)
    scattered = graph.call(aten.scatter.src, zeros, 1, items[1], chain)
    grad = graph.call(aten.threshold_backward.default, scattered, relu, 0)
    backward = (zeros, cos, chain, scattered, grad)
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            node.meta["partitioner_tag"] = "is_backward" if node in backward else "is_forward"
    template = Template("t0", graph.module(y, grad), ("value",), 1)
    return partition(template, inductor=False)


@pytest.mark.parametrize(
    ("decide", "arguments", "chosen"), [(aten.topk.default, (2,), (3, 2)), (aten.max.dim, (1, True), (3, 1))], ids=str
)
def test_routing_decisions_are_pinned(decide: Any, arguments: tuple[Any, ...], chosen: tuple[int, ...]) -> None:
    parts = routed(decide, *arguments, chosen=chosen)
    saved = results_of(parts.forward)[parts.num_outputs :]
    pinned = [saved[i] for i in parts.pinned]
    assert any(fake_value(node).dtype == torch.int64 for node in pinned)
    assert parts.backward is not None
    for module in (parts.backward, *(recompute.graph for recompute in parts.recomputes.values())):
        assert not any(never_recompute(node) for node in module.graph.nodes)
