from __future__ import annotations

import torch
from support.capture import Graph

from passes.node_facts import op_name
from protrain_compile.profiler.footprint import node_changes, workspace_bytes

aten = torch.ops.aten
SIZE = 16 * 4


def test_node_changes_free_at_the_last_use() -> None:
    g = Graph()
    x = g.input("x", 4, 4)
    a = g.call(aten.exp.default, x)
    view = g.call(aten.t.default, a)
    b = g.call(aten.neg.default, view)
    c = g.call(aten.mm.default, b, x)
    found = {op_name(node): (change, inside) for node, change, inside in node_changes(g.module(c))}
    assert found == {"exp": (SIZE, SIZE), "t": (0, 0), "neg": (0, SIZE), "mm": (0, SIZE)}


def test_a_result_that_nothing_reads_is_freed_at_once() -> None:
    g = Graph()
    x = g.input("x", 4, 4)
    a = g.call(aten.exp.default, x)
    unused = g.call(aten.neg.default, x)
    found = {node: (change, inside) for node, change, inside in node_changes(g.module(a))}
    assert found[unused] == (0, SIZE)
    assert found[a] == (SIZE, SIZE)


def test_workspace_is_beyond_the_results() -> None:
    g = Graph()
    x, w = g.input("x", 4, 4), g.input("w", 4, 4)
    first = g.call(aten.mm.default, x, w)
    second = g.call(aten.mm.default, first, w)
    third = g.call(aten.mm.default, second, w)
    module = g.module(third)
    assert workspace_bytes(module, fused=True) == SIZE  # two alive at once, one returned


def test_a_kernel_writes_over_what_dies_in_it_but_not_over_an_input() -> None:
    g = Graph()
    x, w = g.input("x", 4, 4), g.input("w", 4, 4)
    product = g.call(aten.mm.default, x, w)
    module = g.module(g.call(aten.exp.default, product))
    assert workspace_bytes(module, fused=True) == 0
    assert workspace_bytes(module, fused=False) == SIZE
    g = Graph()
    x = g.input("x", 4, 4)
    module = g.module(g.call(aten.exp.default, x))
    assert workspace_bytes(module, fused=True, dying=(x,)) == 0


def test_an_input_that_dies_makes_room() -> None:
    g = Graph()
    x, w = g.input("x", 4, 4), g.input("w", 4, 4)
    first = g.call(aten.sum.dim_IntList, x, [1])
    module = g.module(first, g.call(aten.mm.default, w, w))
    assert workspace_bytes(module, fused=True) == 0
    assert workspace_bytes(module, fused=True, dying=(x,)) == -SIZE
