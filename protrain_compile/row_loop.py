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
slice is computed straight into its place in the result, and handed to the slice's graph (``Direct``). A wide value that
only products use may be gathered over several slices, so that these are made less often (``Window``).

An artefact with such a call is compiled in pieces: what comes before the loop, one slice, what comes after
(``compile_around_loop``).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from protrain_compile import ops
from protrain_compile.compat import is_fake, unset_fake_temporarily, use_boxed_calls

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

    @property
    def summing_bytes(self) -> int:
        """Bytes beyond ``size_bytes`` until the last slice is added: sums of 16-bit numbers are kept in fp32."""
        return self.size_bytes if self.kind == "sum" and _is_16_bit(self.dtype) else 0


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


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows of several slices of a value that the loop multiplies itself; of a slice they are its graph's last result.

    Attributes:
        rows: How many rows it has, those of some slices.
        operands: By number, the outputs that are made of it, and the input that makes each: of a ``product`` it is
            ``window.T @ rows of the input``, of ``rows`` it is ``window @ input``. The graph returns no part of them.
    """

    rows: int
    operands: dict[int, int]


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
        window: What is gathered over several slices, if anything is.
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
        window: Window | None = None,
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
        self.window = window

    @property
    def window_value(self) -> torch.Tensor:
        """The fake value of a slice's rows of the window."""
        value = _gathered(self.slice_graph)[1].meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Sizes of the window."""
        assert self.window is not None
        return (min(self.window.rows, self.total), *self.window_value.shape[1:])

    @property
    def slices(self) -> int:
        """How many slices there are, a shorter one at the end included."""
        return -(-self.total // self.rows)

    def graphs(self) -> list[fx.GraphModule]:
        """Return the graphs of a slice: of one, and of the shorter last one if there is."""
        return [self.slice_graph] if self.tail_graph is None else [self.slice_graph, self.tail_graph]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run the loop operation by operation."""
        return self.run(inputs, self._eager(self.slice_graph), self._eager(self.tail_graph or self.slice_graph))

    def _eager(self, graph: fx.GraphModule) -> Boxed:
        def run(boxed: list[Any]) -> Sequence[Any]:
            into = boxed.pop() if self.window is not None else None
            results = list(graph(*boxed))
            if into is not None:
                into.copy_(results.pop())
            return results

        return run

    def __repr__(self) -> str:
        """Return what printed graphs show."""
        windows = f", windows of {self.window.rows}" if self.window is not None else ""
        return f"row_loop[{self.slices} x {self.rows} rows{windows}]"

    def run(self, inputs: Sequence[torch.Tensor], one_slice: Boxed, last_slice: Boxed) -> list[torch.Tensor]:
        """Run the loop.

        Args:
            inputs: Row inputs, then whole ones.
            one_slice: Computes a slice; of a window it takes the slice's rows as its last input, and fills them.
            last_slice: Does so for fewer rows.
        """
        if is_fake(inputs[0]):
            return [inputs[0].new_empty(output.shape, dtype=output.dtype) for output in self.outputs]
        return _Run(self, inputs).results(one_slice, last_slice)


class _Run:
    """One run of a loop.

    Attributes:
        totals: What is known of each output.
        window: Memory for the window.
    """

    def __init__(self, loop: RowLoop, inputs: Sequence[torch.Tensor]) -> None:
        self.loop, self.inputs = loop, inputs
        self.totals: list[torch.Tensor | None] = [None] * len(loop.outputs)
        self.window: torch.Tensor | None = None
        if loop.direct is not None:
            self._new(loop.direct.output)
        if loop.window is not None:
            self.window = inputs[0].new_empty(loop.window_shape, dtype=loop.window_value.dtype)

    def results(self, one_slice: Boxed, last_slice: Boxed) -> list[torch.Tensor]:
        """Run all slices."""
        loop = self.loop
        for start in range(0, loop.total, loop.rows):
            stop = min(start + loop.rows, loop.total)
            self._slice(start, stop, one_slice if stop - start == loop.rows else last_slice)
            if loop.window is not None and (stop % loop.window.rows == 0 or stop == loop.total):
                self._multiply((stop - 1) // loop.window.rows * loop.window.rows, stop)
        return [_finished(output, total) for output, total in zip(loop.outputs, self.totals, strict=True)]

    def _new(self, number: int) -> torch.Tensor:
        output = self.loop.outputs[number]
        made = self.totals[number] = self.inputs[0].new_empty(output.shape, dtype=output.dtype)
        return made

    def _slice(self, start: int, stop: int, call: Boxed) -> None:
        loop, count = self.loop, self.loop.num_row_inputs
        boxed = [*(each[start:stop] for each in self.inputs[:count]), *self.inputs[count:]]
        apart = set(loop.window.operands) if loop.window is not None else set[int]()
        if loop.direct is not None:
            written = self.totals[loop.direct.output]
            assert written is not None
            boxed.append(loop.direct.write(written[start:stop], boxed))
            apart.add(loop.direct.output)
        if loop.window is not None:
            assert self.window is not None
            first = start % loop.window.rows
            boxed.append(self.window[first : first + stop - start])
        parts = list(call(boxed))
        parts.reverse()
        for i, output in enumerate(loop.outputs):
            if i not in apart:
                self.totals[i] = _add(output, self.totals[i], parts, start, stop)

    def _multiply(self, start: int, stop: int) -> None:
        """Make what is made of the window, which holds the rows from ``start`` to ``stop``."""
        assert self.loop.window is not None
        assert self.window is not None
        gathered = self.window[: stop - start]
        for number, operand in self.loop.window.operands.items():
            total, operand_value = self.totals[number], self.inputs[operand]
            if self.loop.outputs[number].kind == "product":
                self.totals[number] = _add_product(total, gathered.t(), operand_value[start:stop])
            else:
                total = self._new(number) if total is None else total
                torch.mm(gathered, operand_value, out=total[start:stop])


def _gathered(module: fx.GraphModule) -> tuple[list[fx.Node], fx.Node]:
    """Return the results of a slice's graph that has rows of a window, and these."""
    results: tuple[fx.Node, ...] = module.graph.output_node().args[0]  # type: ignore[assignment]
    return list(results[:-1]), results[-1]


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
        return _add_product(total, part, parts.pop())
    if total is None:
        return part.to(torch.float32 if _is_16_bit(part.dtype) else part.dtype, copy=True)
    return total.add_(part)


def _add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right) if total is None else total.addmm_(left, right)


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
    one_slice, *others = (compile_piece(each if loop.window is None else _filling(each)) for each in loop.graphs())
    last_slice = others[0] if others else one_slice

    def run_loop(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return loop.run(inputs, one_slice, last_slice)

    return use_boxed_calls(_assemble(module, call, run_loop, compile_piece)).forward


def _filling(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph of a slice that writes its last result into one more input, its rows of the window."""
    with unset_fake_temporarily():
        module = copy.deepcopy(module)
    graph, output = module.graph, module.graph.output_node()
    rest, made = _gathered(module)
    with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
        into = graph.placeholder("window")
    # Its rows follow one another, however the graph lays out what it makes (for a transposed mask, column by column).
    into.meta["val"] = torch.empty_like(made.meta["val"], memory_format=torch.contiguous_format)
    with graph.inserting_before(output):
        graph.call_function(torch.ops.aten.copy_.default, (into, made))
    output.args = (tuple(rest),)
    module.recompile()
    return module


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
