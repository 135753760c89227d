"""A RowLoop computes slice by slice what its graph computes for all rows, and is compiled in pieces around itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from protrain_compile.compat import use_boxed_calls
from protrain_compile.row_loop import LoopOutput, RowLoop, Window, compile_around_loop, row_loops

aten = torch.ops.aten


def slice_graph() -> fx.GraphModule:
    """(x rows, w) -> x @ w, its sum over rows, and the operands of x.T @ (x @ w)."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(aten.mm.default, (x, w))
    total = graph.call_function(aten.sum.dim_IntList, (y, [0]))
    turned = graph.call_function(aten.permute.default, (x, [1, 0]))
    graph.output((y, total, turned, y))
    return fx.GraphModule({}, graph)


def loop(total: int, rows: int, dtype: torch.dtype = torch.float32) -> RowLoop:
    outputs = (
        LoopOutput("rows", (total, 3), dtype),
        LoopOutput("sum", (3,), dtype),
        LoopOutput("product", (4, 3), dtype),
    )
    tail = slice_graph() if total % rows else None
    return RowLoop(
        slice_graph(), tail, rows=rows, total=total, num_row_inputs=1, outputs=outputs, wide_bytes=total * 3 * 4
    )


@pytest.mark.parametrize(("total", "rows"), [(8, 4), (10, 4), (3, 4), (1, 1)])
def test_results(total: int, rows: int) -> None:
    x, w = torch.randn(total, 4), torch.randn(4, 3)
    y, summed, product = loop(total, rows)(x, w)
    torch.testing.assert_close((y, summed, product), (x @ w, (x @ w).sum(0), x.T @ (x @ w)))


def test_sums_of_16_bit_numbers_are_exact() -> None:
    """A hundred and one slices of one row each, which bf16 could not count."""
    x, w = torch.full((600, 4), 0.25), torch.ones(4, 3)
    made = loop(600, 1, torch.bfloat16)(x.bfloat16(), w.bfloat16())
    assert made[1].tolist() == [600.0] * 3
    assert made[1].dtype == torch.bfloat16


def test_inputs_are_left_alone() -> None:
    x, w = torch.randn(8, 4), torch.randn(4, 3)
    before = (x.clone(), w.clone())
    loop(8, 2)(x, w)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def test_slices_and_name() -> None:
    assert loop(10, 4).slices == 3
    assert repr(loop(10, 4)) == "row_loop[3 x 4 rows]"


def windowed(total: int, rows: int, window: int) -> RowLoop:
    """(x rows, w) -> the sum of y = x @ w over rows, y.T @ x, and y @ w.T, whose y is gathered over some slices."""

    def one_slice(count: int) -> fx.GraphModule:
        graph = fx.Graph()
        x, w, turned = (graph.placeholder(name) for name in ("x", "w", "turned"))
        y = graph.call_function(aten.mm.default, (x, w))
        summed = graph.call_function(aten.sum.dim_IntList, (y, [0]))
        graph.output((summed, y))
        y.meta["val"] = torch.empty(count, 3)
        for node, sizes in ((x, (count, 4)), (w, (4, 3)), (turned, (3, 4)), (summed, (3,))):
            node.meta["val"] = torch.empty(sizes)
        return fx.GraphModule({}, graph)

    kinds: tuple[tuple[Any, tuple[int, ...]], ...] = (("product", (3, 4)), ("sum", (3,)), ("rows", (total, 4)))
    return RowLoop(
        one_slice(rows),
        one_slice(total % rows) if total % rows else None,
        rows=rows,
        total=total,
        num_row_inputs=1,
        outputs=tuple(LoopOutput(kind, shape, torch.float32) for kind, shape in kinds),
        wide_bytes=total * 3 * 4,
        window=Window(window, {0: 0, 2: 2}),
    )


@pytest.mark.parametrize(("total", "rows", "window"), [(16, 2, 8), (16, 4, 4), (15, 2, 8), (17, 4, 8), (3, 4, 16)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_products_with_what_is_gathered(total: int, rows: int, window: int, compiled: bool) -> None:
    x, w = torch.randn(total, 4), torch.randn(4, 3)
    loop = windowed(total, rows, window)
    y = x @ w
    if compiled:
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in ("x", "w", "turned")]
        made = graph.call_function(loop, tuple(given))
        graph.output(tuple(graph.call_function(operator.getitem, (made, i)) for i in range(3)))
        run = compile_around_loop(fx.GraphModule({}, graph), lambda piece: use_boxed_calls(piece).forward)
        found = run([x, w, w.t()])
    else:
        found = loop(x, w, w.t())
    torch.testing.assert_close(tuple(found), (y.T @ x, y.sum(0), y @ w.T))


def test_windows_are_in_the_name() -> None:
    """What was measured is kept by it."""
    assert repr(windowed(16, 2, 8)) == "row_loop[8 x 2 rows, windows of 8]"
    assert windowed(3, 4, 16).window_shape == (3, 3)


def whole_graph() -> fx.GraphModule:
    """(a, w) -> relu(a) sent through the loop, a result from before it, from it, and from after it."""
    graph = fx.Graph()
    a, w = graph.placeholder("a"), graph.placeholder("w")
    x = graph.call_function(aten.relu.default, (a,))
    norm = graph.call_function(aten.sum.default, (x,))
    made = graph.call_function(loop(8, 4), (x, w))
    items = [graph.call_function(operator.getitem, (made, i)) for i in range(3)]
    after = graph.call_function(aten.mul.Tensor, (items[2], norm))
    graph.output((norm, items[0], after, a))
    return fx.GraphModule({}, graph)


def test_compiled_in_pieces() -> None:
    pieces: list[list[str]] = []

    def compile_piece(piece: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
        assert not row_loops(piece.graph)
        pieces.append([str(node.target) for node in piece.graph.nodes if node.op == "call_function"])
        return use_boxed_calls(piece).forward

    run = compile_around_loop(whole_graph(), compile_piece)
    a, w = torch.randn(8, 4), torch.randn(4, 3)
    boxed: list[Tensor] = [a, w]
    norm, y, after, same = run(boxed)
    x = a.relu()
    torch.testing.assert_close((norm, y, after), (x.sum(), x @ w, (x.T @ (x @ w)) * x.sum()))
    assert same is a
    assert not boxed
    assert len(pieces) == 3
    assert pieces[1:] == [["aten.relu.default", "aten.sum.default"], ["aten.mul.Tensor"]]
