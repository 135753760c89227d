from __future__ import annotations

import pytest
import torch
from support.capture import Graph
from support.counting import CountingMeter

from passes.node_facts import op_name
from protrain_compile.profiler.footprint import node_changes, workspace_bytes
from protrain_compile.row_loop import LoopOutput, RowLoop

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_a_row_loop(dtype: torch.dtype) -> None:
    """Of 16-bit numbers they are kept in 32 bits until all slices are added."""
    one = Graph()
    summed = one.call(aten.sum.dim_IntList, one.input("x", 4, 64, dtype=dtype), [0])
    output = LoopOutput("sum", (64,), dtype)
    loop = RowLoop(one.module(summed), None, rows=4, total=8, num_row_inputs=1, outputs=(output,), wide_bytes=0)
    whole = Graph()
    x = whole.input("x", 8, 64, dtype=dtype)
    call = whole.graph.call_function(loop, (x,))
    call.meta["val"] = (torch.empty(64, dtype=dtype, device="meta"),)
    ((_, _, inside),) = node_changes(whole.module(call))
    meter = CountingMeter()
    with meter:
        given = torch.ones(8, 64, dtype=dtype)
        _, taken = meter.peak_bytes(lambda: loop(given))
    assert inside == taken
