"""dedupe_templates: equal structures share a template, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.capture import Graph, capture
from support.light import GPT
from support.models import tokens
from torch import fx

from passes import structure_pipeline
from passes.dedupe_templates import DedupeTemplates, structure_key
from protrain_compile.program import GraphInput, InputKind, Program, Segment, Stage

aten = torch.ops.aten


def segment(build: Callable[[Graph], fx.GraphModule], roles: tuple[str, ...] = ("value", "parameter")) -> Segment:
    module = build(Graph())
    results: Any = module.graph.output_node().args[0]
    return Segment(Stage("block", "block 0"), module, (), (), results, (), roles)


def product(
    shape: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float32, alpha: Any = 1, target: Any = aten.add.Tensor
) -> Callable[[Graph], fx.GraphModule]:
    def build(graph: Graph) -> fx.GraphModule:
        x, w = graph.input("primals_1", *shape, dtype=dtype), graph.input("primals_2", *shape, dtype=dtype)
        return graph.module(graph.call(target, x, w, alpha=alpha))

    return build


def test_equal_structures_have_equal_keys() -> None:
    key = structure_key(segment(product()))
    assert key == structure_key(segment(product()))
    assert hash(key) == hash(structure_key(segment(product())))


def test_names_do_not_matter() -> None:
    def build(graph: Graph) -> fx.GraphModule:
        module = product()(graph)
        for number, node in enumerate(module.graph.nodes):
            node.name = f"other_{number}"
        return module

    assert structure_key(segment(build)) == structure_key(segment(product()))


@pytest.mark.parametrize(
    "other",
    [
        segment(product(shape=(4, 5))),
        segment(product(dtype=torch.bfloat16)),
        segment(product(alpha=2)),
        segment(product(alpha=1.0)),
        segment(product(alpha=True)),
        segment(product(target=aten.sub.Tensor)),
        segment(product(), roles=("value", "value")),
        segment(product(), roles=("parameter", "value")),
    ],
    ids=["shape", "dtype", "constant", "float", "bool", "target", "roles", "roles swapped"],
)
def test_differences_that_matter(other: Segment) -> None:
    assert structure_key(other) != structure_key(segment(product()))


def test_operands_matter() -> None:
    def swapped(graph: Graph) -> fx.GraphModule:
        x, w = graph.input("primals_1", 4, 4), graph.input("primals_2", 4, 4)
        return graph.module(graph.call(aten.add.Tensor, w, x, alpha=1))

    assert structure_key(segment(swapped)) != structure_key(segment(product()))


def test_strides_matter() -> None:
    def transposed(graph: Graph) -> fx.GraphModule:
        module = product()(graph)
        node = next(iter(module.graph.nodes))
        node.meta["val"] = node.meta["val"].t()
        return module

    assert structure_key(segment(transposed)) != structure_key(segment(product()))


def test_the_order_of_results_matters() -> None:
    def build(first: int) -> Callable[[Graph], fx.GraphModule]:
        def inner(graph: Graph) -> fx.GraphModule:
            x = graph.input("primals_1", 4)
            found = [graph.call(aten.sin.default, x), graph.call(aten.cos.default, x)]
            return graph.module(found[first], found[1 - first])

        return inner

    assert structure_key(segment(build(0))) != structure_key(segment(build(1)))


def test_placeholder_kinds_matter() -> None:
    """A tangent is no primal, even where both have one shape."""

    def build(name: str) -> Callable[[Graph], fx.GraphModule]:
        def inner(graph: Graph) -> fx.GraphModule:
            return graph.module(graph.call(aten.sin.default, graph.input(name, 4)))

        return inner

    assert structure_key(segment(build("primals_1"))) != structure_key(segment(build("tangents_1")))
    assert structure_key(segment(build("primals_1"))) == structure_key(segment(build("primals_2")))


def test_marks_for_recomputation_matter() -> None:
    def marked(graph: Graph) -> fx.GraphModule:
        module = product()(graph)
        for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.meta["recompute"] = "must save"
        return module

    assert structure_key(segment(marked)) != structure_key(segment(product()))


def attribute(value: torch.Tensor) -> Segment:
    graph = Graph()
    held = graph.graph.get_attr("held")
    held.meta["val"] = graph.tensor(4)
    made = graph.call(aten.sin.default, held)
    graph.graph.output((made,))
    module = fx.GraphModule({"held": value}, graph.graph)
    return Segment(Stage("block", "block 0"), module, (), (), (made,), (), ())


def test_attributes_match_by_identity() -> None:
    value = torch.ones(4)
    assert structure_key(attribute(value)) == structure_key(attribute(value))
    assert structure_key(attribute(value)) != structure_key(attribute(value.clone()))


def test_the_pass_numbers_templates_in_order() -> None:
    segments = (segment(product()), segment(product(alpha=2)), segment(product()), segment(product(alpha=2)))
    program = Program("Hand", product()(Graph()), (GraphInput("x", InputKind.INPUT),), 1, False)
    program.segments = segments
    assert DedupeTemplates().run(program) is False
    assert program.template_of == (0, 1, 0, 1)
    assert [template.name for template in program.templates] == ["t0", "t1"]
    assert program.templates[0].joint is segments[0].joint
    assert program.templates[0].num_outputs == 1


def test_templates_do_not_grow_with_depth() -> None:
    counts = []
    for blocks in (2, 4):
        program = capture(GPT(blocks), tokens())
        structure_pipeline(inductor=False, inductor_draws=False).run(program)
        counts.append(program.structures)
    assert counts == [3, 3]


def test_an_odd_block_has_its_own_template() -> None:
    model = GPT(4)
    model.blocks[2].norm.eps = 1e-3  # type: ignore[union-attr]
    program = capture(model, tokens())
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    assert program.template_of == (0, 1, 1, 2, 1, 3)
