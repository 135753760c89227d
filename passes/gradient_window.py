"""Gradient window: products with the logits' gradient that are made once for several slices of a loop.

Every product over rows reads and writes the whole gradient of the projection's weight: half a millisecond for 128,000
words on an H200. Larger slices would mean fewer of them, but a slice has its logits and their gradient at once. So the
slices stay small, and fill one after the other a *window* on the gradient, which alone is large::

    slices     logits, per_token, d_logits     of 1/16 of the tokens; d_logits is written into the window
    windows    d_hidden = window @ weight;  d_weight += window.T @ hidden     of 1/4 of the tokens

That is done where the gradient serves products alone, and rows are aligned: others are padded inside the slice's graph.
"""

from __future__ import annotations

from torch import fx

from passes.direct_product import has_aligned_rows
from passes.row_slices import Exit, SliceWriter
from passes.wide_region import PRODUCTS, aten
from protrain_compile.row_loop import Window


def gradient_window(writer: SliceWriter, slices: int) -> Window | None:
    """Return the window of ``slices`` slices on a gradient; None if there is none that serves products alone."""
    gradient = next((found for each in writer.exits if (found := _gradient_of(each)) is not None), None)
    if gradient is None or not has_aligned_rows(writer.region.logits):
        return None
    placeholders = list(writer.graph.find_nodes(op="placeholder"))
    fitting = {"product": writer.row_inputs.values(), "rows": writer.whole_inputs.values(), "sum": ()}
    operands: dict[int, int] = {}
    for number, leaving in enumerate(writer.exits):
        operand = _operand(leaving, gradient)
        if operand in fitting[leaving.kind]:
            operands[number] = placeholders.index(operand)
    served = {user for number in operands for user in _made_of(writer.exits[number], gradient)}
    return Window(slices * writer.rows, operands) if served == set(gradient.users) else None


def _gradient_of(leaving: Exit) -> fx.Node | None:
    """Return what a product over rows has on its left, turned around: [rows, words]."""
    left = leaving.parts[0]
    is_turned = leaving.kind == "product" and left.target is aten.permute.default
    return left.all_input_nodes[0] if is_turned and left.all_input_nodes[0].op == "call_function" else None


def _operand(leaving: Exit, gradient: fx.Node) -> fx.Node | None:
    """Return what ``gradient`` is multiplied with to make an exit; None if that is made in another way."""
    part = leaving.parts[0]
    if _gradient_of(leaving) is gradient:
        return leaving.parts[1]
    is_product = leaving.kind == "rows" and part.target in PRODUCTS and len(part.args) == 2 and not part.kwargs
    alone = is_product and part.args[0] is gradient and not part.users and len(leaving.shape) == 2
    return part.all_input_nodes[1] if alone and len(part.all_input_nodes) == 2 else None


def _made_of(leaving: Exit, gradient: fx.Node) -> list[fx.Node]:
    """Return the users of ``gradient`` that make an exit."""
    return [part for part in leaving.parts if gradient in part.all_input_nodes]


def window_parts(writer: SliceWriter, window: Window) -> tuple[fx.Node, ...]:
    """Return what the graph of one slice computes: what leaves it otherwise, and last its rows of the window."""
    rest = [part for i, each in enumerate(writer.exits) if i not in window.operands for part in each.parts]
    gradient = writer.exits[next(iter(window.operands))].parts[0].all_input_nodes[0]
    return (*rest, gradient)
