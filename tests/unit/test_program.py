"""The Program and its small questions."""

from __future__ import annotations

import pytest
import torch
from support.capture import Graph, capture, gpt_program

from protrain_compile.program import GraphInput, InputKind, Program, fake_value, is_symbol, results_of

aten = torch.ops.aten


def test_views_of_the_graph() -> None:
    graph = Graph()
    x, tangent = graph.input("primals_1", 2), graph.input("tangents_1", 2)
    y = graph.call(aten.sin.default, x)
    gradient = graph.call(aten.mul.Tensor, tangent, y)
    program = Program("Hand", graph.module(y, gradient), (GraphInput("x", InputKind.INPUT, trainable=True),), 1, True)
    assert program.placeholders == [x, tangent]
    assert program.primals == [x]
    assert program.tangents == [tangent]
    assert program.results == (y, gradient)
    assert list(program.calls()) == [y, gradient]
    assert set(program.graph_modules()) == {"joint"}
    assert program.block_names == ()


def test_an_inference_program_is_named_so() -> None:
    graph = Graph()
    program = Program("Hand", graph.module(graph.input("x", 2)), (GraphInput("x", InputKind.INPUT),), 1, False)
    assert set(program.graph_modules()) == {"inference"}
    assert program.tangents == []


@pytest.mark.parametrize(
    ("kind", "held"),
    [(InputKind.PARAMETER, True), (InputKind.BUFFER, True), (InputKind.INPUT, False), (InputKind.SYMBOL, False)],
)
def test_what_the_model_holds(kind: InputKind, held: bool) -> None:
    assert GraphInput("x", kind).held_by_model is held


def test_block_names_are_module_paths() -> None:
    assert gpt_program(3).block_names == ("blocks.0", "blocks.1", "blocks.2")


def test_symbols() -> None:
    program = capture(lambda x: x.sin().sum(), torch.ones(3, 11, requires_grad=True), dynamic=True)
    kinds = {source.name: source.kind for source in program.inputs}
    found = [source.name for node, source in zip(program.primals, program.inputs, strict=True) if is_symbol(node)]
    assert found
    assert all(kinds[name] is InputKind.SYMBOL for name in found)


def test_fake_values_and_results() -> None:
    graph = Graph()
    x = graph.input("x", 2, 3)
    module = graph.module(x, None, 3)
    assert fake_value(x).shape == (2, 3)
    assert results_of(module) == (x, None, 3)
    del x.meta["val"]
    assert fake_value(x) is None
