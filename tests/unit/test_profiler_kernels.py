from __future__ import annotations

import torch
from support.capture import Graph
from torch import fx

from passes.node_facts import op_name
from protrain_compile.profiler.kernels import Kernel, kernels_of, source_of, value_bytes

aten = torch.ops.aten
FLOAT = 4


def named(kernel: Kernel) -> tuple[str, ...]:
    return tuple(op_name(node) for node in kernel.nodes)


def sizes(given: dict[fx.Node, int]) -> dict[str, int]:
    return {op_name(node) if node.op == "call_function" else node.name: size for node, size in given.items()}


def test_node_by_node_views_are_free() -> None:
    g = Graph()
    x = g.input("x", 4, 6)
    turned = g.call(aten.t.default, x)
    y = g.call(aten.exp.default, turned)
    found = kernels_of(g.module(g.call(aten.neg.default, y)), fused=False)
    assert [named(kernel) for kernel in found] == [("exp",), ("neg",)]
    assert sizes(found[0].reads) == {"x": 24 * FLOAT}
    assert found[0].moved_bytes == 2 * 24 * FLOAT
    assert source_of(turned) is x


def test_a_chain_is_one_kernel_that_writes_its_end() -> None:
    g = Graph()
    x = g.input("x", 4, 6)
    y = g.call(aten.mul.Tensor, g.call(aten.exp.default, x), g.call(aten.neg.default, x))
    (kernel,) = kernels_of(g.module(y), fused=True)
    assert named(kernel) == ("mul",)
    assert sizes(kernel.reads) == {"x": 24 * FLOAT}
    assert sizes(kernel.writes) == {"mul": 24 * FLOAT}


def test_a_norm_is_one_kernel_and_its_product_another() -> None:
    g = Graph()
    x, w = g.input("x", 4, 6), g.input("w", 6, 8)
    mean = g.call(aten.mean.dim, x, [-1], True)
    product = g.call(aten.mm.default, g.call(aten.mul.Tensor, x, mean), w)
    norm, mm = kernels_of(g.module(product), fused=True)
    assert named(norm) == ("mean", "mul")
    assert sizes(norm.reads) == {"x": 24 * FLOAT}
    assert (named(mm), mm.flops) == (("mm",), 2 * 4 * 6 * 8)
    assert sizes(mm.reads) == {"mul": 24 * FLOAT, "w": 48 * FLOAT}


def test_a_value_needed_late_is_computed_there() -> None:
    g = Graph()
    x, w = g.input("x", 4, 4), g.input("w", 4, 4)
    early = g.call(aten.exp.default, x)
    late = g.call(aten.add.Tensor, g.call(aten.mm.default, x, w), early)
    mm, add = kernels_of(g.module(late), fused=True)
    assert (named(mm), named(add)) == (("mm",), ("add",))
    assert sizes(add.reads) == {"mm": 16 * FLOAT, "x": 16 * FLOAT}


def test_the_gradient_of_a_norms_weight_is_a_kernel_of_its_own() -> None:
    g = Graph()
    x = g.input("x", 4, 6)
    y = g.call(aten.exp.default, x)
    rows = g.call(aten.sum.dim_IntList, y, [1])
    columns = g.call(aten.sum.dim_IntList, y, [0])
    found = kernels_of(g.module(rows, columns), fused=True)
    assert list(map(named, found)) == [("sum",), ("sum",)]
    assert all(sizes(kernel.reads) == {"x": 24 * FLOAT} for kernel in found)


def test_parts_of_one_value_are_read_once() -> None:
    g = Graph()
    x = g.input("x", 4, 6)
    half = g.call(aten.slice.Tensor, x, 1, 0, 3)
    other = g.call(aten.slice.Tensor, x, 1, 3, 6)
    (kernel,) = kernels_of(g.module(g.call(aten.mul.Tensor, half, other)), fused=True)
    assert sizes(kernel.reads) == {"x": 24 * FLOAT}
    (kernel,) = kernels_of(_exp_of_half(), fused=True)
    assert sizes(kernel.reads) == {"x": 12 * FLOAT}


def _exp_of_half() -> fx.GraphModule:
    g = Graph()
    half = g.call(aten.slice.Tensor, g.input("x", 4, 6), 1, 0, 3)
    return g.module(g.call(aten.exp.default, half))


def test_a_look_up_reads_what_it_returns() -> None:
    for fused in (True, False):
        g = Graph()
        table, rows = g.input("table", 1000, 6), g.input("rows", 4, dtype=torch.int64)
        (kernel,) = kernels_of(g.module(g.call(aten.embedding.default, table, rows)), fused=fused)
        assert sizes(kernel.reads) == {"table": 24 * FLOAT, "rows": 4 * 8}


def test_a_kernel_comes_after_what_it_reads() -> None:
    g = Graph()
    x, w = g.input("x", 4, 4), g.input("w", 4, 4)
    first = g.call(aten.exp.default, x)
    one = g.call(aten.mm.default, first, w)
    both = g.call(aten.neg.default, x)  # one kernel with exp, written before the product reads it
    found = kernels_of(g.module(one, both), fused=True)
    assert [named(kernel) for kernel in found] == [("exp", "neg"), ("mm",)]


def test_value_bytes_of_several_tensors() -> None:
    g = Graph()
    several = g.call(aten.var_mean.correction, g.input("x", 4, 6), [1])
    assert value_bytes(several) == 2 * 4 * FLOAT
