"""The verifier: every check has a graph that breaks it."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
from support.capture import Graph, gpt_program, mixed, write_schedule
from support.schedules import changed, mixed_schedule
from torch import fx

from passes.verify import VerifierError, verify_program, verify_schedule
from protrain_compile import ProtrainError, ops
from protrain_compile.program import GraphInput, InputKind, Parts, Program, Recompute, Ref, Stage, Template
from protrain_compile.schedule import Operation, Schedule, operation_of

aten = torch.ops.aten


def staged(stages: list[int], backward: set[int] = frozenset()) -> Program:  # type: ignore[assignment]
    """Return a chain of relus with the given stages; those in ``backward`` run in the backward."""
    graph = Graph()
    x = graph.input("primals_1", 4)
    nodes = []
    for _ in stages:
        x = graph.call(aten.relu.default, x)
        nodes.append(x)
    program = Program("Hand", graph.module(x), (GraphInput("x", InputKind.INPUT),), 1, False)
    program.stages = tuple(Stage("block", f"block {i}") for i in range(max(stages) + 1))
    program.stage_of = dict(zip(nodes, stages, strict=True))
    program.backward_nodes = {nodes[i] for i in backward}
    return program


def test_it_is_a_protrain_error_and_an_assertion() -> None:
    assert issubclass(VerifierError, ProtrainError)
    assert issubclass(VerifierError, AssertionError)


@pytest.mark.parametrize(
    ("stages", "backward"), [([0, 0, 1, 2], set()), ([2, 1, 1, 0], {0, 1, 2, 3}), ([0, 1, 1, 0], {2, 3})]
)
def test_good_stages(stages: list[int], backward: set[int]) -> None:
    verify_program(staged(stages, backward), "x")


def test_a_forward_node_before_its_input() -> None:
    with pytest.raises(
        VerifierError, match="after cut: relu_default_1 runs in stage 0, before its input relu_default in stage 1"
    ):
        verify_program(staged([1, 0]), "cut")


def test_a_backward_node_before_its_input() -> None:
    with pytest.raises(
        VerifierError, match="after cut: relu_default_1 runs in stage 1, before its input relu_default in stage 0"
    ):
        verify_program(staged([0, 1], {0, 1}), "cut")


def with_parts(parts: Parts, roles: tuple[str, ...]) -> Program:
    program = staged([0])
    program.templates = (Template("t0", parts.forward, roles, parts.num_outputs, parts),)
    return program


def forward_that_saves(target: Any, role: str, *, dtype: torch.dtype | None = None) -> Program:
    graph = Graph()
    x, w = graph.input("primals_1", 4, 4), graph.input("primals_2", 4, 4)
    arguments = () if dtype is None else (dtype,)
    saved = w if target is None else graph.call(target, w, *arguments)
    module = graph.module(graph.call(aten.mm.default, x, w), saved)
    return with_parts(Parts(module, (0, 1), 1), ("value", role))


@pytest.mark.parametrize(
    ("target", "dtype"),
    [(None, None), (aten.t.default, None), (torch.ops.prims.convert_element_type.default, torch.bfloat16)],
    ids=["itself", "view", "cast"],
)
def test_a_saved_parameter(target: Any, dtype: torch.dtype | None) -> None:
    with pytest.raises(VerifierError, match=r"after split: t0 saves \w+, which is \(a view of\) a parameter"):
        verify_program(forward_that_saves(target, "parameter", dtype=dtype), "split")
    verify_program(forward_that_saves(target, "value", dtype=dtype), "split")


def test_a_saved_view_of_a_view_of_a_parameter() -> None:
    graph = Graph()
    w = graph.input("primals_1", 4, 4)
    view = graph.call(aten.view.default, graph.call(aten.t.default, graph.call(aten.t.default, w)), [16])
    module = graph.module(graph.call(aten.sin.default, w), view)
    with pytest.raises(VerifierError, match="t0 saves view_default"):
        verify_program(with_parts(Parts(module, (0,), 1), ("parameter",)), "split")


def test_a_computation_on_a_parameter_may_be_saved() -> None:
    verify_program(forward_that_saves(aten.sin.default, "parameter"), "split")


@pytest.mark.parametrize(
    ("target", "arguments"),
    [(aten.bernoulli.default, ()), (aten.relu_.default, ()), (aten.argmax.default, ())],
    ids=str,
)
def test_a_recompute_of_what_must_run_once(target: Any, arguments: tuple[Any, ...]) -> None:
    graph = Graph()
    x = graph.input("primals_1", 4)
    recompute = graph.module(graph.call(target, x, *arguments))
    forward = Graph()
    parts = Parts(
        forward.module(forward.call(aten.sin.default, forward.input("primals_1", 4))),
        (0,),
        1,
        recomputes={"recompute_pointwise": Recompute(recompute, (), ())},
    )
    with pytest.raises(VerifierError, match=r"after split: t0 recomputes \w+ \(aten.*\), which must run once"):
        verify_program(with_parts(parts, ("value",)), "split")


def test_a_backward_that_draws_again_what_the_forward_drew() -> None:
    def draw(name: str) -> fx.GraphModule:
        graph = Graph()
        x = graph.input("primals_1", 4)
        node = graph.call(aten.bernoulli.default, x)
        node.name = name
        return graph.module(node)

    parts = Parts(draw("mask"), (0,), 1, backward=draw("mask"), backward_inputs=(Ref("input", 0),))
    with pytest.raises(VerifierError, match="t0 recomputes mask"):
        verify_program(with_parts(parts, ("value",)), "split")
    # A draw of the backward's own.
    verify_program(with_parts(dataclasses.replace(parts, backward=draw("other")), ("value",)), "split")


@pytest.fixture
def schedule() -> Schedule:
    """Two kept and one recomputed block, in graphs that a test may break."""
    return write_schedule(gpt_program(), mixed("krk"))


def calls(schedule: Schedule, graph: str, op: str) -> list[fx.Node]:
    found = []
    for node in schedule.graphs[graph].graph.nodes:
        operation = operation_of(node)
        if operation is not None and operation.op == op:
            found.append(node)
    return found


def test_a_good_schedule(schedule: Schedule) -> None:
    verify_schedule(schedule, "x")


def test_a_packed_list_that_feeds_two_calls(schedule: Schedule) -> None:
    first, second = calls(schedule, "forward", "forward")[1:3]
    second.args = (first.args[0],)
    with pytest.raises(VerifierError, match=r"after x: pack_1 \(forward\): feeds 2 calls; a packed list is emptied"):
        verify_schedule(schedule, "x")


def test_a_packed_list_that_feeds_none(schedule: Schedule) -> None:
    graph = schedule.graphs["forward"].graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(ops.pack, ())
    with pytest.raises(VerifierError, match="feeds 0 calls"):
        verify_schedule(schedule, "x")


def test_a_part_that_runs_twice(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"].graph
    call = calls(schedule, "backward", "recompute")[0]
    with graph.inserting_before(call):
        packed = graph.node_copy(call.args[0], lambda node: node)  # type: ignore[arg-type]
        again = graph.node_copy(call, lambda node: packed if node is call.args[0] else node)
    assert operation_of(again) == operation_of(call)
    with pytest.raises(VerifierError, match=r"\(backward, block 1\): runs recompute of block 1 again \(t"):
        verify_schedule(schedule, "x")


def test_a_recompute_after_its_backward(schedule: Schedule) -> None:
    recompute = calls(schedule, "backward", "recompute")[0]
    segment = recompute.meta["operation"].segment
    backward = next(n for n in calls(schedule, "backward", "backward") if n.meta["operation"].segment == segment)
    recompute.meta["operation"] = Operation("backward", "block 1", "compute", segment)
    backward.meta["operation"] = Operation("recompute", "block 1", "compute", segment)
    with pytest.raises(VerifierError, match="recomputes block 1 after its backward"):
        verify_schedule(schedule, "x")


def test_a_forgotten_recompute(schedule: Schedule) -> None:
    """The plan says recompute, so the backward must not run without one."""
    for node in calls(schedule, "backward", "recompute"):
        node.meta["operation"] = dataclasses.replace(node.meta["operation"], op="other")
    with pytest.raises(VerifierError, match="runs block 1 without the recompute that its policy asks for"):
        verify_schedule(schedule, "x")


def test_a_recompute_against_the_policy(schedule: Schedule) -> None:
    schedule.plan = mixed("kkk")
    with pytest.raises(VerifierError, match="recomputes block 1, which its policy keeps"):
        verify_schedule(schedule, "x")


def test_a_recompute_of_another_policy(schedule: Schedule) -> None:
    schedule.plan = mixed("kwk")
    with pytest.raises(VerifierError, match="recomputes block 1, whose policy asks for recompute_pointwise"):
        verify_schedule(schedule, "x")


def gradients(schedule: Schedule) -> tuple[fx.Node, list[Any]]:
    output = schedule.graphs["backward"].graph.output_node()
    return output, list(output.args[0])  # type: ignore[arg-type]


def test_a_missing_gradient(schedule: Schedule) -> None:
    output, found = gradients(schedule)
    index = next(i for i, source in enumerate(schedule.program.inputs) if source.trainable)
    found[index] = None
    output.args = (tuple(found),)
    name = schedule.program.inputs[index].name
    with pytest.raises(VerifierError, match=rf"after x: output \(backward\): {name} is trainable but gets no gradient"):
        verify_schedule(schedule, "x")


def test_a_gradient_of_something_frozen(schedule: Schedule) -> None:
    output, found = gradients(schedule)
    index = next(i for i, source in enumerate(schedule.program.inputs) if not source.trainable)
    found[index] = next(each for each in found if each is not None)
    output.args = (tuple(found),)
    name = schedule.program.inputs[index].name
    with pytest.raises(VerifierError, match=f"{name} is frozen but gets the gradient"):
        verify_schedule(schedule, "x")


def test_too_few_gradients(schedule: Schedule) -> None:
    output, found = gradients(schedule)
    output.args = (tuple(found[:-1]),)
    with pytest.raises(VerifierError, match=r"output \(backward\): returns \d+ gradients for \d+ inputs"):
        verify_schedule(schedule, "x")


def test_a_value_used_after_the_call_that_empties_its_list(schedule: Schedule) -> None:
    """A packed list is no value: nothing but its call may read it."""
    graph = schedule.graphs["forward"].graph
    packed = calls(schedule, "forward", "forward")[0].args[0]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(operator.getitem, (packed, 0))
    with pytest.raises(VerifierError, match="feeds 2 calls"):
        verify_schedule(schedule, "x")


def test_a_gradient_that_leaves_twice() -> None:
    """To autograd, though its chunk has collected it."""
    schedule = changed(mixed_schedule())
    output, found = gradients(schedule)
    index = next(i for i, each in enumerate(found) if each is None and schedule.program.inputs[i].trainable)
    found[index] = calls(schedule, "backward", "backward")[0]
    output.args = (tuple(found),)
    name = schedule.program.inputs[index].name
    with pytest.raises(VerifierError, match=rf"output \(backward\): the gradient of {name} is reduced 2 times"):
        verify_schedule(schedule, "x")


def test_a_failure_shows_ten_rows_and_marks_the_nodes() -> None:
    schedule = changed(mixed_schedule())
    node, twin = calls(schedule, "backward", "recompute")[:2]
    node.meta["operation"] = twin.meta["operation"]
    with pytest.raises(VerifierError, match="runs recompute of") as caught:
        verify_schedule(schedule, "x")
    first, header, *rows = str(caught.value).splitlines()
    assert first.startswith("after x: ")
    assert header.split() == ["node", "stream", "op", "what", "buffer"]
    assert len(rows) == 10
    assert {row.split()[1] for row in rows if row.startswith(">")} == {node.name, twin.name}
