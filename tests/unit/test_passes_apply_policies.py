"""apply_policies: the graphs that carry a plan out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.capture import gpt_program, mixed, schedule_of, write_schedule
from support.light import GPT
from support.models import tokens
from torch import Tensor, fx, nn

from passes.apply_policies import block_policies
from protrain_compile import ops
from protrain_compile.liveness import kept_sources
from protrain_compile.program import InputKind, Program, results_of
from protrain_compile.schedule import Schedule, operation_of


@pytest.fixture(scope="module")
def program() -> Program:
    return gpt_program()


def operations(schedule: Schedule, graph: str) -> list[str]:
    found = (operation_of(node) for node in schedule.graphs[graph].graph.nodes)
    return [f"{each.op} {each.what}" for each in found if each is not None]


def placeholders(schedule: Schedule, kind: str | None = None) -> list[fx.Node]:
    nodes = schedule.graphs["backward"].graph.find_nodes(op="placeholder")
    return [node for node in nodes if kind in (None, node.meta.get("kind"))]


FORWARD = ["forward prologue", "forward block 0", "forward block 1", "forward block 2", "forward epilogue"]


def test_keep(program: Program) -> None:
    schedule = write_schedule(program, "keep")
    assert operations(schedule, "forward") == FORWARD
    assert operations(schedule, "backward") == [each.replace("forward", "backward") for each in reversed(FORWARD)]


def test_recompute(program: Program) -> None:
    schedule = write_schedule(program, "recompute")
    assert operations(schedule, "forward") == FORWARD
    assert operations(schedule, "backward") == [
        "backward epilogue",
        *(f"{op} block {i}" for i in (2, 1, 0) for op in ("recompute", "backward")),
        "backward prologue",
    ]


def test_mixed(program: Program) -> None:
    schedule = write_schedule(program, mixed("rkr"))
    assert block_policies(schedule) == ("keep", "recompute", "keep", "recompute", "keep")
    assert [each for each in operations(schedule, "backward") if each.startswith("recompute")] == [
        "recompute block 2",
        "recompute block 0",
    ]


def test_inference() -> None:
    with torch.no_grad():
        schedule = schedule_of(GPT(3), tokens(), plan="recompute")
    assert set(schedule.graphs) == {"inference"}
    assert operations(schedule, "inference") == FORWARD
    assert len(results_of(schedule.entry)) == schedule.program.num_outputs


def test_what_recompute_does_not_keep(program: Program) -> None:
    keep, recompute = (write_schedule(program, policy) for policy in ("keep", "recompute"))
    assert len(placeholders(recompute, "kept")) < len(placeholders(keep, "kept"))
    saved_of_blocks = [node for node in placeholders(recompute, "kept") if str(node.target).startswith("saved_2_")]
    assert saved_of_blocks == []


def test_one_policy_does_not_reach_another_block(program: Program) -> None:
    schedule = write_schedule(program, mixed("krk"))
    names = [str(node.target) for node in placeholders(schedule, "kept")]
    assert any(name.startswith("saved_1_") for name in names)
    assert not any(name.startswith("saved_2_") for name in names)
    assert any(name.startswith("saved_3_") for name in names)


@pytest.mark.parametrize("letters", ["kkk", "rrr", "krk"])
def test_how_the_backward_is_bound(program: Program, letters: str) -> None:
    """Placeholders come as primals, kept values, tangents, and stand for what the runtime passes there."""
    schedule = write_schedule(program, mixed(letters))
    inputs = schedule.backward_inputs
    kinds = [node.meta["kind"] for node in placeholders(schedule)]
    assert kinds == ["primals"] * len(inputs.primals) + ["kept"] * inputs.num_kept + ["tangents"] * len(inputs.tangents)
    names = [str(node.target) for node in placeholders(schedule, "primals")]
    assert names == [program.primals[i].name for i in inputs.primals]
    assert [str(node.target) for node in placeholders(schedule, "tangents")] == [
        program.tangents[i].name for i in inputs.tangents
    ]
    assert len(results_of(schedule.graphs["forward"])) == program.num_outputs + inputs.num_kept
    assert len(results_of(schedule.graphs["backward"])) == len(program.inputs)


@pytest.mark.parametrize("letters", ["kkk", "rrr", "krk"])
def test_no_parameter_is_kept_by_value(program: Program, letters: str) -> None:
    schedule = write_schedule(program, mixed(letters))
    parameters = [n for n in schedule.graphs["forward"].graph.find_nodes(op="placeholder") if is_parameter(n)]
    assert parameters
    assert not set(parameters) & set(kept_sources(schedule).values())


def is_parameter(node: fx.Node) -> bool:
    return node.meta["input"].kind is InputKind.PARAMETER


def test_every_call_is_packed_and_names_its_stream(program: Program) -> None:
    schedule = write_schedule(program, mixed("krk"))
    for module in schedule.graphs.values():
        for node in module.graph.nodes:
            operation = operation_of(node)
            if operation is not None:
                assert node.args[0].target is ops.pack  # type: ignore[union-attr]
                assert node.kwargs == {"stream": operation.stream}
        printed = str(module.graph)
        assert any(f"artefact.t1_{role}" in printed for role in ("forward", "backward"))
        assert "{stream: compute}" in printed


def test_equal_blocks_call_one_artefact(program: Program) -> None:
    schedule = write_schedule(program, mixed("krk"))
    handles = {
        node.target
        for module in schedule.graphs.values()
        for node in module.graph.nodes
        if operation_of(node) is not None
    }
    assert {str(handle) for handle in handles} == {
        *(f"t{i}_{role}" for i in range(3) for role in ("forward", "backward")),
        "t1_recompute",
    }


def test_graphs_take_one_list_and_empty_it(program: Program) -> None:
    schedule = write_schedule(program, "keep")
    assert "def forward(self, boxed)" in schedule.graphs["forward"].code
    assert "boxed.clear()" in schedule.graphs["backward"].code


class Counting(GPT):
    """Counts its calls in a buffer that the loss depends on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        loss = super().forward(ids) * self.calls.sin()
        self.calls += 1
        return loss


def test_an_input_that_changes_is_copied_first() -> None:
    schedule = schedule_of(Counting(), tokens())
    assert operations(schedule, "forward")[0] == "snapshot calls"
    (copied,) = schedule.graphs["forward"].graph.find_nodes(op="call_function", target=ops.snapshot)
    assert copied in kept_sources(schedule).values()


def test_a_mutation_that_the_backward_does_not_need_is_not_copied() -> None:
    class Free(Counting):
        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return GPT.forward(self, ids)

    assert operations(schedule_of(Free(), tokens()), "forward")[0] == "forward prologue"


def test_frozen_inputs_get_no_gradient() -> None:
    model = GPT(3, tied=False)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    schedule = schedule_of(model, tokens())
    gradients = results_of(schedule.graphs["backward"])
    for source, gradient in zip(schedule.program.inputs, gradients, strict=True):
        frozen = source.kind is not InputKind.PARAMETER or source.name.startswith("blocks.1.")
        assert (gradient is None) == frozen, source.name


def test_a_backward_that_needs_no_prologue_stops_early() -> None:
    """Where only the last block and the head are trained, no earlier part has a backward."""
    model = GPT(3, tied=False)
    trained = [*model.blocks[2].parameters(), *model.head.parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    schedule = schedule_of(model, tokens(), plan="recompute")
    assert operations(schedule, "backward") == ["backward epilogue", "recompute block 2", "backward block 2"]


def test_outputs_that_are_inputs_or_constants() -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            return (x * self.weight).sum(), x, 3, None

    model = Echo()
    schedule = schedule_of(model, torch.ones(4))
    assert operations(schedule, "forward") == ["forward prologue"]
    with torch.enable_grad():
        compiled: Any = torch.compile(model, backend="protrain", options={"compile": "eager", "schedule": "off"})
        x = torch.ones(4)
        loss, same, three, nothing = compiled(x)
    assert float(loss.detach()) == 4
    assert same is x
    assert (three, nothing) == (3, None)
