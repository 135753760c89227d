"""RowLoop: an operation that computes a stretch of a graph one slice of rows at a time.

It stands in a template's graph as one call::

    loop = row_loop(rows_0, ..., whole_0, ...)     rows_*: [total, ...], read in slices; whole_*: read whole
    out_i = loop[i]

and returns, by the kind of each output,

* ``rows``     [total, ...]: the slices' results, one behind the other
* ``sum``      the slices' results added up, in fp32 where they are 16-bit numbers
* ``product``  left @ right summed over the slices (left [a, rows], right [rows, b]): added up in place, in the result's
               own type, as one fp32 accumulation a slice

Whatever is as wide as a row exists for one slice only. Of a product of rows that is returned as it is (logits), each
slice is computed straight into its place in the result, and handed to the slice's graph (``Direct``).

An artefact with such a call is compiled in pieces: what comes before the loop, one slice, what comes after
(``compile_around_loop``).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from protrain_compile import ops
from protrain_compile.compat import is_fake, use_boxed_calls

Boxed = Callable[[list[Any]], Sequence[Any]]
OutputKind = Literal["rows", "sum", "product"]


@dataclasses.dataclass(frozen=True)
class LoopOutput:
    """One result of a RowLoop: how the slices' results become it, its sizes, and its type."""

    kind: OutputKind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Direct:
    """A product of rows that the loop computes itself: an output, and the inputs ``[bias +] left @ right`` of it.

    The slice's graph takes it behind all other inputs, and does not return it.
    """

    output: int
    left: int
    right: int
    bias: int | None = None

    def write(self, into: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute it for one slice, whose inputs are given, and return it."""
        left, right = inputs[self.left], inputs[self.right]
        if self.bias is None:
            return torch.mm(left, right, out=into)
        return torch.addmm(inputs[self.bias], left, right, out=into)


class RowLoop:
    """See the module docstring.

    Attributes:
        slice_graph: ``(row slices..., whole inputs...) -> results``; a product has two results, left and right.
        tail_graph: The same for the rows that are left at the end, if any.
        rows: Rows of a slice.
        total: All rows.
        num_row_inputs: How many of the inputs are read in slices.
        outputs: What it returns.
        wide_bytes: Bytes that the widest value would have for all rows.
        direct: The output that the loop computes itself, if there is one.
    """

    def __init__(
        self,
        slice_graph: fx.GraphModule,
        tail_graph: fx.GraphModule | None,
        *,
        rows: int,
        total: int,
        num_row_inputs: int,
        outputs: tuple[LoopOutput, ...],
        wide_bytes: int,
        direct: Direct | None = None,
    ) -> None:
        self.__name__ = "row_loop"
        self.__qualname__ = self.__name__
        self.__module__ = __name__
        self.slice_graph = slice_graph
        self.tail_graph = tail_graph
        self.rows = rows
        self.total = total
        self.num_row_inputs = num_row_inputs
        self.outputs = outputs
        self.wide_bytes = wide_bytes
        self.direct = direct

    @property
    def slices(self) -> int:
        """How many slices there are, a shorter one at the end included."""
        return -(-self.total // self.rows)

    def graphs(self) -> list[fx.GraphModule]:
        """Return the graphs of a slice: of one, and of the shorter last one if there is."""
        return [self.slice_graph] if self.tail_graph is None else [self.slice_graph, self.tail_graph]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run the loop operation by operation."""
        tail = self.tail_graph or self.slice_graph
        return self.run(inputs, lambda boxed: self.slice_graph(*boxed), lambda boxed: tail(*boxed))

    def __repr__(self) -> str:
        """Return what printed graphs show."""
        return f"row_loop[{self.slices} x {self.rows} rows]"

    def run(self, inputs: Sequence[torch.Tensor], one_slice: Boxed, last_slice: Boxed) -> list[torch.Tensor]:
        """Run the loop; ``last_slice`` serves a slice of fewer rows than the others."""
        if is_fake(inputs[0]):
            return [inputs[0].new_empty(output.shape, dtype=output.dtype) for output in self.outputs]
        sliced, whole = inputs[: self.num_row_inputs], inputs[self.num_row_inputs :]
        totals: list[torch.Tensor | None] = [None] * len(self.outputs)
        direct = self.direct
        if direct is not None:
            output = self.outputs[direct.output]
            written = totals[direct.output] = inputs[0].new_empty(output.shape, dtype=output.dtype)
        for start in range(0, self.total, self.rows):
            stop = min(start + self.rows, self.total)
            call = one_slice if stop - start == self.rows else last_slice
            boxed = [*(each[start:stop] for each in sliced), *whole]
            if direct is not None:
                boxed.append(direct.write(written[start:stop], boxed))
            parts = list(call(boxed))
            parts.reverse()
            for i, output in enumerate(self.outputs):
                if direct is None or i != direct.output:
                    totals[i] = _add(output, totals[i], parts, start, stop)
        return [_finished(output, total) for output, total in zip(self.outputs, totals, strict=True)]


def _add(
    output: LoopOutput, total: torch.Tensor | None, parts: list[torch.Tensor], start: int, stop: int
) -> torch.Tensor:
    """Take one slice's part of ``output`` off the end of ``parts``; return the total with it."""
    part = parts.pop()
    if output.kind == "rows":
        if total is None:
            total = torch.empty(output.shape, dtype=output.dtype, device=part.device)
        total[start:stop].copy_(part)
        return total
    if output.kind == "product":
        right = parts.pop()
        return torch.mm(part, right) if total is None else total.addmm_(part, right)
    if total is None:
        return part.to(torch.float32 if _is_16_bit(part.dtype) else part.dtype, copy=True)
    return total.add_(part)


def _is_16_bit(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 2


def _finished(output: LoopOutput, total: torch.Tensor | None) -> torch.Tensor:
    assert total is not None, "a loop has at least one slice"
    return total.to(output.dtype)


def row_loops(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of row loops in ``graph``."""
    return [node for node in graph.nodes if isinstance(node.target, RowLoop)]


def loop_of(call: fx.Node) -> RowLoop:
    """Return the RowLoop that ``call`` calls."""
    assert isinstance(call.target, RowLoop)
    return call.target


def compile_around_loop(module: fx.GraphModule, compile_piece: Callable[[fx.GraphModule], Boxed]) -> Boxed:
    """Compile a graph that holds one RowLoop: the part before it, its slices, and the part after it.

    Args:
        module: The graph.
        compile_piece: Compiles a graph without a loop to a boxed call.
    """
    (call,) = row_loops(module.graph)
    loop = loop_of(call)
    one_slice = compile_piece(loop.slice_graph)
    last_slice = compile_piece(loop.tail_graph) if loop.tail_graph is not None else one_slice

    def run_loop(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return loop.run(inputs, one_slice, last_slice)

    return use_boxed_calls(_assemble(module, call, run_loop, compile_piece)).forward


def _assemble(
    module: fx.GraphModule,
    call: fx.Node,
    run_loop: Callable[..., Any],
    compile_piece: Callable[[fx.GraphModule], Boxed],
) -> fx.GraphModule:
    """Return a graph that calls the compiled pieces in turn."""
    after = _descendants(call)
    results: tuple[Any, ...] = module.graph.output_node().args[0]  # type: ignore[assignment]
    others = [node for node in module.graph.nodes if node.op not in ("placeholder", "output") and node is not call]
    before = [node for node in others if node not in after]
    late_users = {call, *after}
    wanted = [node for node in before if node in results or not late_users.isdisjoint(node.users)]
    items = [node for node in call.users if node.target is operator.getitem]
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in module.graph.find_nodes(op="placeholder")}
    _call_piece("before", graph, values, _piece(module, before, wanted), wanted, compile_piece)
    arguments = [values[each] for each in call.args if isinstance(each, fx.Node)]
    made = graph.call_function(_Call("run_loop", run_loop), tuple(arguments))
    for item in items:
        values[item] = graph.call_function(operator.getitem, (made, item.args[1]))
    rest = [node for node in others if node in after and node not in items]
    late = [node for node in rest if node in results]
    _call_piece("after", graph, values, _piece(module, rest, late), late, compile_piece)
    graph.output(tuple(values[each] if isinstance(each, fx.Node) else each for each in results))
    return fx.GraphModule({}, graph)


def _descendants(call: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in call.graph.nodes:
        if node.op != "output" and any(source is call or source in found for source in node.all_input_nodes):
            found.add(node)
    return found


class _Call:
    """A compiled piece, as graphs call and print it."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "artefact"
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        """Run it."""
        return self._run(*arguments)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a graph as a graph of its own, and the nodes that feed it."""

    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]


def _piece(module: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> _Piece | None:
    """Return the graph that computes ``results`` by ``nodes`` from what they take of others; None for no results."""
    if not results:
        return None
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code()
    return _Piece(fx.GraphModule(module, graph), inputs)


def _call_piece(
    name: str,
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
    piece: _Piece | None,
    results: Sequence[fx.Node],
    compile_piece: Callable[[fx.GraphModule], Boxed],
) -> None:
    """Write the call of a compiled piece, and the names of its results."""
    if piece is None:
        return
    packed = graph.call_function(ops.pack, tuple(values[node] for node in piece.inputs))
    made = graph.call_function(_Call(f"{name}_loop", compile_piece(piece.graph)), (packed,))
    for number, node in enumerate(results):
        values[node] = graph.call_function(operator.getitem, (made, number))
