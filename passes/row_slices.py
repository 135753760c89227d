"""Row slices: write the part of a joint graph that is as wide as the logits for one slice of tokens.

Inside the wide region (see ``wide_region``) each token is computed for itself, up to sums over tokens, so the region
can be written for a few rows at a time::

    outside  --row inputs [tokens, ...], whole inputs-->  region  --rows, sums over rows, products over rows-->  outside

``SliceWriter`` writes it for a number of rows and knows, of every value, its sizes apart from the rows. It refuses
(``CannotSliceError``) what it cannot prove to work on each row for itself.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from passes.wide_region import PRODUCTS, RESHAPES, SAME_SIZES, CannotSliceError, Region, is_pointwise, sizes
from protrain_compile.program import fake_value
from protrain_compile.row_loop import OutputKind

aten = torch.ops.aten

LAST_DIM_REDUCTIONS = (aten.amax.default, aten.sum.dim_IntList, aten.mean.dim)
LAST_DIM_MAPS = (aten._log_softmax.default, aten._softmax.default)


@dataclasses.dataclass(frozen=True)
class Written:
    """A value of the region in the graph of one slice.

    Attributes:
        node: Its node there; its sizes are (rows of the slice, *rest), turned around if ``turned``.
        lead: Its leading sizes in the whole graph, whose product is all rows, such as (batch, sequence).
        rest: Its other sizes.
        turned: Whether it is [rest, rows]: the transpose of a two-dimensional value.
    """

    node: fx.Node
    lead: tuple[int, ...]
    rest: tuple[int, ...]
    turned: bool = False


@dataclasses.dataclass(frozen=True)
class Exit:
    """A value of the region that others use: what it is made of in the graph of one slice, and its sizes for all rows.

    The sizes are the source's up to dimensions of one and to rows in several dimensions.
    """

    source: fx.Node
    kind: OutputKind
    parts: tuple[fx.Node, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowInput:
    """A value from outside that is read in slices: ``source`` broadcast to ``(*lead, *rest)``, rows first."""

    source: fx.Node
    lead: tuple[int, ...]
    rest: tuple[int, ...]


class SliceWriter:
    """Writes a region for ``rows`` of its tokens.

    Attributes:
        graph: The graph: row inputs, whole inputs, then the region.
        row_inputs: What the row inputs are bound to, in order.
        whole_inputs: The values from outside that are read whole.
        exits: What leaves the region.
    """

    def __init__(self, region: Region, rows: int, returned: Collection[fx.Node] = ()) -> None:
        """Write the region; of ``returned``, what the caller gets, even wide values leave it, as whole as they are.

        Raises:
            CannotSliceError: If something in it does not work on each row for itself.
        """
        self.region, self.rows, self.returned = region, rows, returned
        self.graph = fx.Graph()
        self.row_inputs: dict[RowInput, fx.Node] = {}
        self.whole_inputs: dict[fx.Node, fx.Node] = {}
        self.exits: list[Exit] = []
        self._written: dict[fx.Node, Written] = {}
        self._inside = set(region.nodes)
        for node in region.nodes:
            self._write(node)
        self._order_inputs()

    # ---- one node --------------------------------------------------------------------------------------------------

    def _write(self, node: fx.Node) -> None:
        if node.op != "call_function" or node.target is operator.getitem:
            raise CannotSliceError(f"{node.name} is no operation on tensors")
        made = self._operation(node)
        if isinstance(made, Exit):
            if any(user in self._inside for user in node.users):
                raise CannotSliceError(f"the sum {node.name} is used for each row again")
            self.exits.append(made)
            return
        self._written[node] = made
        if any(user not in self._inside for user in node.users):
            is_wide = math.prod(made.rest) == math.prod(sizes(self.region.logits)[1:])
            if made.turned or (is_wide and not (node in self.returned and fake_value(node).is_contiguous())):
                raise CannotSliceError(f"{node.name} is needed whole")
            self.exits.append(Exit(node, "rows", (made.node,), (self.region.rows, *made.rest)))

    def _operation(self, node: fx.Node) -> Written | Exit:
        target: Any = node.target
        if target in PRODUCTS:
            return self._product(node)
        if target in RESHAPES:
            return self._reshape(node)
        if target is aten.permute.default:
            return self._turn(node)
        if target in LAST_DIM_REDUCTIONS:
            return self._reduce(node)
        if target is aten.sum.default:
            return self._sum_of_all(node)
        if target in LAST_DIM_MAPS:
            return self._map_last(node)
        if target in (aten.gather.default, aten.scatter.value, aten.scatter.src):
            return self._index_last(node)
        if target in (aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default):
            return self._resize(node)
        if target in (aten.full.default, aten.expand.default):
            return self._make(node)
        if target in SAME_SIZES or is_pointwise(node):
            return self._pointwise(node)
        raise CannotSliceError(f"{node.name} ({target}) is not known to work on each row for itself")

    def _call(self, node: fx.Node, arguments: Sequence[Any], like: Written, rest: tuple[int, ...]) -> Written:
        made = self.graph.call_function(node.target, tuple(arguments), dict(node.kwargs))  # type: ignore[arg-type]
        return Written(made, like.lead, rest)

    def _value(self, argument: Any) -> Written:
        """Return a value of the region that is not turned around."""
        found = self._written.get(argument) if isinstance(argument, fx.Node) else None
        if found is None or found.turned:
            raise CannotSliceError(f"{argument} is not in the region")
        return found

    def _last(self, value: Written, dims: Any) -> None:
        """Require that ``dims`` is the last dimension of a value with one dimension behind its rows."""
        rank = len(value.lead) + len(value.rest)
        given = [dims] if isinstance(dims, int) else list(dims or ())
        if len(value.rest) != 1 or [dim % rank for dim in given] != [rank - 1]:
            raise CannotSliceError(f"dimension {dims} of {value.node} is not its last")

    # ---- kinds of operations ---------------------------------------------------------------------------------------

    def _pointwise(self, node: fx.Node) -> Written:
        shape = sizes(node)
        inside = [each for each in node.all_input_nodes if each in self._written]
        like = max((self._value(each) for each in inside), key=lambda value: len(value.rest), default=None)
        if like is None:
            raise CannotSliceError(f"{node.name} takes nothing of the region")
        if shape[: len(like.lead)] != like.lead:
            raise CannotSliceError(f"{node.name} does not keep the rows of its argument")
        rest = shape[len(like.lead) :]

        def bind(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            if argument in self._written:
                value = self._value(argument)
                if value.lead != like.lead or len(value.rest) != len(rest):
                    raise CannotSliceError(f"{argument.name} and {like.node} differ in their rows")
                return value.node
            return self._outside(argument, like.lead, len(rest))

        return self._call(node, [fx.node.map_arg(each, bind) for each in node.args], like, rest)

    def _outside(self, argument: fx.Node, lead: tuple[int, ...], count: int) -> fx.Node:
        """Return an argument from outside as it is broadcast against rows ``lead`` and ``count`` dimensions."""
        shape = sizes(argument)
        if len(shape) <= count:
            return self._whole(argument)
        front = (1,) * (len(lead) + count - len(shape)) + shape[: len(shape) - count]
        rest = shape[len(shape) - count :]
        if set(front) == {1} and front != lead:
            return self.graph.call_function(aten.view.default, (self._whole(argument), list(rest)))
        fits = all(a in (1, b) for a, b in zip(front, lead, strict=True))
        if not fits or (front != lead and math.prod(rest) > 1):
            raise CannotSliceError(f"{argument.name} is not broadcast over rows")
        return self._row_input(RowInput(argument, lead, rest))

    def _row_input(self, row_input: RowInput) -> fx.Node:
        if row_input not in self.row_inputs:
            self.row_inputs[row_input] = self._placeholder(f"rows_{len(self.row_inputs)}")
        return self.row_inputs[row_input]

    def _whole(self, argument: fx.Node) -> fx.Node:
        if argument not in self.whole_inputs:
            self.whole_inputs[argument] = self._placeholder(f"whole_{len(self.whole_inputs)}")
        return self.whole_inputs[argument]

    def _placeholder(self, name: str) -> fx.Node:
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            return self.graph.placeholder(name)

    def _rows_of(self, argument: fx.Node) -> Written:
        """Return the left operand of a product: a row value of the region, or an input [rows, width]."""
        if argument in self._written:
            return self._value(argument)
        shape = sizes(argument)
        if len(shape) != 2 or shape[0] != self.region.rows:
            raise CannotSliceError(f"{argument.name} has no rows")
        return Written(self._row_input(RowInput(argument, shape[:1], shape[1:])), shape[:1], shape[1:])

    def _product(self, node: fx.Node) -> Written | Exit:
        *bias, left, right = node.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        if right in self._written or (left in self._written and self._written[left].turned):
            return self._product_over_rows(node, left, right)
        rows = self._rows_of(left)
        if len(rows.lead) != 1 or any(not isinstance(each, fx.Node) or len(sizes(each)) > 1 for each in bias):
            raise CannotSliceError(f"{node.name} is no product of rows")
        arguments = [*(self._whole(each) for each in bias if isinstance(each, fx.Node)), rows.node, self._whole(right)]
        return self._call(node, arguments, rows, sizes(node)[1:])

    def _product_over_rows(self, node: fx.Node, left: fx.Node, right: fx.Node) -> Exit:
        """Return the exit for ``left @ right``, where rows are what is summed over."""
        if node.target is not aten.mm.default:
            raise CannotSliceError(f"{node.name} adds a product over rows to something")
        second = self._rows_of(right)
        if left in self._written:
            first = self._written[left]
            if not first.turned:
                raise CannotSliceError(f"{node.name} multiplies rows by rows")
            return Exit(node, "product", (first.node, second.node), sizes(node))
        if left.target is not aten.permute.default or list(left.args[1]) != [1, 0]:  # type: ignore[arg-type]
            raise CannotSliceError(f"{left.name} is no transpose")
        rows = self._rows_of(left.args[0])  # type: ignore[arg-type]
        turned = self.graph.call_function(aten.permute.default, (rows.node, [1, 0]))
        return Exit(node, "product", (turned, second.node), sizes(node))

    def _turn(self, node: fx.Node) -> Written:
        value = self._value(node.args[0])
        if len(value.lead) != 1 or len(value.rest) != 1 or list(node.args[1]) != [1, 0]:  # type: ignore[arg-type]
            raise CannotSliceError(f"{node.name} turns more than rows and columns")
        made = self.graph.call_function(aten.permute.default, (value.node, [1, 0]))
        return Written(made, value.lead, value.rest, turned=True)

    def _reshape(self, node: fx.Node) -> Written:
        value, shape = self._value(node.args[0]), sizes(node)
        splits = [(shape[:count], shape[count:]) for count in range(1, len(shape) + 1)]
        splits = [(lead, rest) for lead, rest in splits if math.prod(lead) == self.region.rows]
        same = [(lead, rest) for lead, rest in splits if rest == value.rest]
        for lead, rest in same or splits:
            if rest == value.rest:
                return Written(value.node, lead, rest)
            if _without_ones(rest) == _without_ones(value.rest):
                made = self.graph.call_function(aten.view.default, (value.node, [self.rows, *rest]))
                return Written(made, lead, rest)
        raise CannotSliceError(f"{node.name} mixes rows with other dimensions")

    def _resize(self, node: fx.Node) -> Written:
        """Add or drop dimensions of one behind the rows."""
        value, dims = self._value(node.args[0]), node.args[1]
        rank = len(value.lead) + len(value.rest) + (node.target is aten.unsqueeze.default)
        places = [dim % rank - len(value.lead) + 1 for dim in ([dims] if isinstance(dims, int) else dims)]  # type: ignore[union-attr, operator]
        if min(places) < 1:
            raise CannotSliceError(f"{node.name} changes the dimensions of rows")
        made = places[0] if isinstance(dims, int) else places
        return self._call(node, [value.node, made], value, sizes(node)[len(value.lead) :])

    def _reduce(self, node: fx.Node) -> Written | Exit:
        value, dims = self._value(node.args[0]), node.args[1] if len(node.args) > 1 else None
        rank, count = len(value.lead) + len(value.rest), len(value.lead)
        over = sorted(dim % rank for dim in dims) if isinstance(dims, list | tuple) else []
        if over == list(range(count)) and node.target is aten.sum.dim_IntList:
            made = self.graph.call_function(aten.sum.dim_IntList, (value.node, [0]), dict(node.kwargs))
            return Exit(node, "sum", (made,), value.rest)
        self._last(value, dims)
        keep = bool(node.args[2]) if len(node.args) > 2 else False
        return self._call(node, [value.node, [1], *node.args[2:]], value, (1,) if keep else ())

    def _sum_of_all(self, node: fx.Node) -> Exit:
        value = self._value(node.args[0])
        made = self.graph.call_function(aten.sum.default, (value.node,), dict(node.kwargs))
        return Exit(node, "sum", (made,), ())

    def _map_last(self, node: fx.Node) -> Written:
        value = self._value(node.args[0])
        self._last(value, node.args[1])
        return self._call(node, [value.node, 1, *node.args[2:]], value, value.rest)

    def _index_last(self, node: fx.Node) -> Written:
        value = self._value(node.args[0])
        self._last(value, node.args[1])
        others: list[Any] = []
        for each in node.args[2:]:
            if not isinstance(each, fx.Node):
                others.append(each)
            elif each in self._written:
                others.append(self._value(each).node)
            elif len(sizes(each)) == len(value.lead) + 1 and sizes(each)[:-1] == value.lead:
                others.append(self._outside(each, value.lead, 1))
            else:
                raise CannotSliceError(f"{each.name} does not index rows")
        return self._call(node, [value.node, 1, *others], value, sizes(node)[len(value.lead) :])

    def _make(self, node: fx.Node) -> Written:
        shape = sizes(node)
        lead, rest = shape[:-1], shape[-1:]
        if math.prod(lead) != self.region.rows:
            raise CannotSliceError(f"{node.name} has no rows")
        size = [self.rows, *rest]
        if node.target is aten.full.default:
            made = self.graph.call_function(aten.full.default, (size, node.args[1]), dict(node.kwargs))
            return Written(made, lead, rest)
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        value = self._value(source).node if source in self._written else self._outside(source, lead, 1)
        made = self.graph.call_function(aten.expand.default, (value, size))
        return Written(made, lead, rest)

    def _order_inputs(self) -> None:
        """Put row inputs first, then whole ones, each in order."""
        for node in reversed([*self.row_inputs.values(), *self.whole_inputs.values()]):
            first = next(iter(self.graph.nodes))
            if node is not first:
                first.prepend(node)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
