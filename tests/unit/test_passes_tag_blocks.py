"""tag_blocks: which stretches are blocks, and the stage of every node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import models
from support.capture import Graph, capture
from support.light import GPT, WIDTH, Block
from support.models import tokens
from torch import Tensor, fx, nn

from passes.node_facts import op_name
from passes.tag_blocks import TagBlocks, backward_nodes, find_runs, module_path, module_tree
from passes.verify import verify_program
from protrain_compile.program import Program

aten = torch.ops.aten


def tagged(model: Any, *inputs: Any, **keywords: Any) -> Program:
    program = capture(model, *inputs, **keywords)
    assert TagBlocks().run(program) is False
    verify_program(program, "tag_blocks")
    return program


def kinds(program: Program) -> list[str]:
    return [stage.kind for stage in program.stages]


class Chain(nn.Module):
    """Calls the given modules one after the other and sums the result."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.items = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for item in self.items:
            x = item(x)
        return x.sum()


def hidden() -> Tensor:
    return torch.randn(2, 5, WIDTH, requires_grad=True)


def test_a_decoder() -> None:
    program = tagged(GPT(3), tokens())
    assert kinds(program) == ["prologue", "block", "block", "block", "epilogue"]
    assert [stage.path for stage in program.stages] == ["", "blocks.0", "blocks.1", "blocks.2", ""]
    assert [stage.name for stage in program.stages] == ["prologue", "block 0", "block 1", "block 2", "epilogue"]
    assert program.notes == []


@pytest.mark.parametrize("model", [models.GPT(2), models.Llama(2)], ids=["gpt", "llama"])
def test_every_node_has_a_stage(model: nn.Module) -> None:
    program = tagged(model, tokens())
    assert set(program.stage_of) == set(program.calls())
    assert all(0 <= stage < len(program.stages) for stage in program.stage_of.values())


@pytest.mark.parametrize("model", [models.GPT(2), models.Llama(2)], ids=["gpt", "llama"])
def test_backward_nodes_follow_their_forward_nodes(model: nn.Module) -> None:
    """Each block's backward holds two matrix products for each of its forward's, and attention's backward."""
    program = tagged(model, tokens())
    products = {"mm", "addmm"}
    for index, stage in enumerate(program.stages):
        if stage.kind != "block":
            continue
        nodes = [n for n, where in program.stage_of.items() if where == index and op_name(n) in products]
        forward = [n for n in nodes if n not in program.backward_nodes]
        backward = [n for n in nodes if n in program.backward_nodes]
        assert len(backward) == 2 * len(forward) > 0


def test_the_forward_is_no_backward() -> None:
    program = capture(GPT(2), tokens())
    found = backward_nodes(program)
    tagged_forward = {n for n in program.calls() if n.meta.get("partitioner_tag") == "is_forward"}
    assert not found & tagged_forward
    gradients = {n for n in program.results[program.num_outputs :] if isinstance(n, fx.Node)}
    assert gradients <= found | set(program.tangents)


def test_without_a_backward() -> None:
    with torch.no_grad():
        program = tagged(GPT(3), tokens())
    assert not program.differentiable
    assert program.backward_nodes == set()
    assert kinds(program) == ["prologue", "block", "block", "block", "epilogue"]


def test_no_repeated_blocks() -> None:
    program = tagged(Chain(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), hidden())
    assert kinds(program) == ["prologue"]
    assert program.notes == ["no repeated blocks found: the graph is planned as one segment"]


def test_one_block_is_no_run() -> None:
    assert kinds(tagged(GPT(1), tokens())) == ["prologue"]


def test_light_modules_are_no_blocks() -> None:
    """One matrix product each: a stack of linear layers is not cut into blocks."""
    assert kinds(tagged(Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), hidden())) == ["prologue"]


def test_a_shared_module_is_a_block_per_call() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x)
            return x.sum()

    program = tagged(Loop(), hidden())
    assert [stage.path for stage in program.stages if stage.kind == "block"] == ["block"] * 3


def test_named_attributes_may_be_blocks() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).sum()

    program = tagged(Named(), hidden())
    assert [stage.path for stage in program.stages if stage.kind == "block"] == ["first", "second"]


def test_nested_stages_cut_at_the_innermost_run() -> None:
    def level() -> nn.Module:
        return nn.Sequential(Block(), Block(), Block())

    program = tagged(Chain(level(), level()), hidden())
    paths = [stage.path for stage in program.stages if stage.kind == "block"]
    assert paths == [f"items.{i}.{j}" for i in range(2) for j in range(3)]


def test_a_module_between_blocks_has_its_own_stage() -> None:
    class Bridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.ModuleList(Block() for _ in range(2))
            self.bridge = nn.Linear(WIDTH, WIDTH)
            self.after = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.before:
                x = block(x)
            x = self.bridge(x)
            for block in self.after:
                x = block(x)
            return x.sum()

    program = tagged(Bridge(), hidden())
    assert [each for each in kinds(program) if each != "prologue"] == ["block"] * 2 + ["between"] + ["block"] * 2 + [
        "epilogue"
    ]


def test_parallel_experts_are_no_run() -> None:
    """They follow each other in the trace, but none uses what the one before it made."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            return sum(expert(x) for expert in self.experts)  # type: ignore[return-value]

    program = tagged(Chain(Experts()), hidden())
    assert kinds(program) == ["prologue"]


def test_blocks_must_hold_half_of_the_heavy_work() -> None:
    class Mostly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(30)))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.trunk(x)
            for block in self.blocks:
                x = block(x)
            return x.sum()

    assert "block" not in kinds(tagged(Mostly(), hidden()))


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("L['self'].layers[0].mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['model'].h['3']", "h.3"),
        ("L['self']", ""),
    ],
)
def test_module_paths(raw: str, path: str) -> None:
    assert module_path(raw) == path


def hand_made(paths: list[str], products: int = 2) -> list[fx.Node]:
    """Return a chain of matrix products, ``products`` for each of ``paths``, with recorded module stacks."""
    graph = Graph()
    x = graph.input("x", 4, 4)
    for number, path in enumerate(paths):
        stack = {f"call {number}": (f"L['self'].{path}", nn.Module)}
        for _ in range(products):
            x = graph.call(aten.mm.default, x, x, meta={"nn_module_stack": stack})
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def runs_of(forward: list[fx.Node]) -> list[list[str]]:
    return [[call.path for call in run] for run in find_runs(module_tree(forward), forward)]


def test_runs_of_a_hand_made_trace() -> None:
    assert runs_of(hand_made(["layers.0", "layers.1", "layers.2"])) == [["layers.0", "layers.1", "layers.2"]]
    assert runs_of(hand_made(["layers.0", "layers.1"], products=1)) == []
    assert runs_of(hand_made(["embed", "head"])) == [["embed", "head"]]


def test_two_stacks_are_two_runs() -> None:
    found = runs_of(hand_made(["encoder.0", "encoder.1", "decoder.0", "decoder.1"]))
    assert found == [["encoder.0", "encoder.1"], ["decoder.0", "decoder.1"]]


def test_interleaved_modules_are_no_run() -> None:
    """Two calls whose stretches overlap do not follow each other."""
    graph = Graph()
    x = graph.input("x", 4, 4)
    for path in ("layers.0", "layers.1") * 2:
        x = graph.call(aten.mm.default, x, x, meta={"nn_module_stack": {path: (f"L['self'].{path}", nn.Module)}})
    assert runs_of([node for node in graph.graph.nodes if node.op == "call_function"]) == []


def test_mostly_different_structures_are_no_run() -> None:
    graph = Graph()
    x = graph.input("x", 4, 4)
    for number in range(4):
        stack = {f"call {number}": (f"L['self'].layers[{number}]", nn.Module)}
        for _ in range(2 + number):
            x = graph.call(aten.mm.default, x, x, meta={"nn_module_stack": stack})
    assert runs_of([node for node in graph.graph.nodes if node.op == "call_function"]) == []
