"""Pass slice_loss: logits that never exist whole.

For a template whose forward ends in a scalar loss, the last projection and the loss are written a second time, for one
slice of tokens, forward and backward together::

    before   logits = hidden @ weight.T;  loss = f(logits, labels);  then, in the backward:
             d_logits = tangent * f'(logits, labels);  d_hidden = d_logits @ weight;  d_weight = d_logits.T @ hidden
    after    per_token, d_hidden_1, d_weight_1 = row_loop(hidden, labels, weight)     forward; a tangent of one
             loss = sum(per_token) / count
             d_hidden = tangent * d_hidden_1;  d_weight = tangent * d_weight_1          backward

The loss need not be cross-entropy: whatever works on each token for itself (see ``row_slices``) and whose gradients are
linear in one scalar tangent (see ``linearity``) is found. Left alone, with the reason in the log: losses that are no
scalar, fp16 (gradients of a tangent of one would underflow), sizes that vary.

**Logits that the model returns**, as models of Hugging Face do, are results of the loop, written slice by slice. They
stay whole, in the type in which they are returned (16 bits of a 16-bit model), as long as the caller holds them; what
is whole nowhere is the rest: their fp32 copy, the log-softmax, their gradient. A loss of the caller's own on them sends
a tangent as large as they are. Gradients are linear in both tangents together, so each is written as a sum
(``separate_tangents``), of which the loop computes the first summand and the backward the second, from what came::

    d_hidden = tangent * d_hidden_1 + tangent_of_logits @ weight
    d_weight = tangent * d_weight_1 + tangent_of_logits.T @ hidden

Without that tangent nothing of the second summand is left (see ``omit_tangents``). Only where the way from the returned
logits to the projection needs other values as wide as they are, such as the tanh of softcapped ones, is the loss left
alone. The other way to have logits without memory, to return a tensor that computes itself when it is read, was not
taken: read after an update of the parameters it would be wrong, or an error where eager has none.

The result is a template of its own beside the first (``Program.sliced``); the Plan says which one runs.
"""

from __future__ import annotations

import copy
import logging
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from passes.direct_product import direct_product, give_product
from passes.gradient_window import gradient_window, window_parts
from passes.linearity import dependent_nodes, first_nonlinear
from passes.node_facts import reach
from passes.row_slices import RowInput, SliceWriter
from passes.separate_tangents import separate_tangents, sort
from passes.wide_region import PRODUCTS, CannotSliceError, Region, sizes
from protrain_compile import compat
from protrain_compile.program import Program, Template, fake_value, results_of
from protrain_compile.row_loop import LoopOutput, RowLoop
from protrain_compile.sizes import dtype_bytes

log = logging.getLogger("protrain_compile.passes")

aten = torch.ops.aten

MAX_SLICE_BYTES = 1 << 30
"""Of the logits of one slice, or of a window's rows. Large enough that products over a slice run at full speed (2,000
tokens and 128,000 words in 16 bits), small beside a device's memory."""

MIN_SLICES = 8
"""Where there are tokens enough: the logits' part of the peak falls to an eighth (with fifths, 0.38 of the whole peak
remained for 16,000 tokens and 128,000 words). Every slice reads and writes the whole gradient of the projection's
weight, so more of them cost time: half a millisecond for 128,000 words on an H200."""

WINDOWS, WINDOW_SLICES = 4, 4
"""Where the gradient can be gathered (see ``gradient_window``): windows where there are tokens enough, and slices of
each. A window of a quarter and the logits of a sixteenth take 5/16 of all logits, two eighths 4/16 with twice as many
products over rows."""

ROWS_STEP = 16
"""Slices begin at a multiple of this many rows, so that they are as aligned as kernels assume."""


class SliceLoss:
    """Add the sliced form of every template that has one."""

    name: ClassVar[str] = "slice_loss"
    requires: ClassVar[frozenset[str]] = frozenset({"templates"})
    provides: ClassVar[frozenset[str]] = frozenset({"sliced"})

    def run(self, program: Program) -> bool:
        """Set ``sliced`` and append to ``templates``; the captured graph stays as it is."""
        for index, template in enumerate(program.templates):
            joint = sliced_joint(template)
            if joint is not None:
                program.sliced[index] = len(program.templates)
                made = Template(f"{template.name}s", joint, template.input_roles, template.num_outputs)
                program.templates = (*program.templates, made)
        return False


def sliced_joint(template: Template) -> fx.GraphModule | None:
    """Return the joint subgraph of ``template`` with its widest product in slices; None if it is left alone."""
    if not _ends_in_scalar(template):
        return None
    found = _widest_product(template.joint.graph)
    if found is None:
        return None
    with compat.unset_fake_temporarily():
        joint = copy.deepcopy(template.joint)
    logits = next(node for node in joint.graph.nodes if node.name == found.name)
    try:
        separate_tangents(joint.graph, logits)
        _Rewrite(joint, logits, template.num_outputs).run()
    except CannotSliceError as reason:
        log.debug("slice_loss leaves %s alone: %s", template.name, reason)
        return None
    return joint


def _ends_in_scalar(template: Template) -> bool:
    outputs = (fake_value(node) for node in results_of(template.joint)[: template.num_outputs])
    return any(isinstance(each, torch.Tensor) and each.dim() == 0 and each.is_floating_point() for each in outputs)


def _widest_product(graph: fx.Graph) -> fx.Node | None:
    """Return the forward product with the most columns: the projection to words; None for a batch without tokens."""

    def width(node: fx.Node) -> int:
        value = fake_value(node)
        fixed = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
        return int(value.shape[1]) if fixed and value.dim() == 2 and value.numel() else 0

    tangents = [node for node in graph.find_nodes(op="placeholder") if str(node.target).startswith("tangents")]
    late = set[fx.Node]().union(*(dependent_nodes(graph, tangent) for tangent in tangents))
    products = [node for node in graph.nodes if node.target in PRODUCTS and node not in late and width(node)]
    widest = max(products, key=width, default=None)
    return widest if widest is not None and width(widest) > max(_depth(widest), 1) else None


def _depth(product: fx.Node) -> int:
    """Return what a product sums over: slicing saves nothing where that is more than its columns."""
    return sizes(product.args[-2])[1]  # type: ignore[arg-type]


def slice_rows(rows: int, row_bytes: int, *, slices: int = MIN_SLICES, at_once: int = 1) -> int:
    """Return how many of ``rows`` tokens a slice has.

    Args:
        rows: All tokens.
        row_bytes: Bytes of one token's logits.
        slices: How many slices there are at least, where there are tokens enough.
        at_once: How many of them may not be larger than ``MAX_SLICE_BYTES`` together.
    """
    even = -(-rows // (slices * ROWS_STEP))
    return min(rows, max(1, min(even, MAX_SLICE_BYTES // (row_bytes * at_once * ROWS_STEP))) * ROWS_STEP)


class _Rewrite:
    """Replaces the region around ``logits`` by a loop, in place; nothing is changed before all is proven."""

    def __init__(self, joint: fx.GraphModule, logits: fx.Node, num_outputs: int) -> None:
        self.joint, self.graph = joint, joint.graph
        self.region = Region.find(logits)
        self.mode = compat.fake_mode_of(self.graph)
        row_bytes = sizes(logits)[1] * dtype_bytes(fake_value(logits).dtype)
        results = results_of(joint)
        self.returned = frozenset(results[:num_outputs]) - frozenset(results[num_outputs:])
        fine = slice_rows(self.region.rows, row_bytes, slices=WINDOWS * WINDOW_SLICES, at_once=WINDOW_SLICES)
        self.writer = SliceWriter(self.region, fine, self.returned)
        self.direct = direct_product(self.writer)
        at_once = min(WINDOW_SLICES, -(-self.region.rows // (WINDOWS * fine)))  # fewer of few tokens
        self.window = gradient_window(self.writer, at_once) if self.direct is None else None
        if self.window is None:
            self.writer = SliceWriter(self.region, slice_rows(self.region.rows, row_bytes), self.returned)
        self.rows = self.writer.rows
        self.tangent, self.dependent = self._tangent()

    def run(self) -> None:
        """Rewrite.

        Raises:
            CannotSliceError: If the region must be left alone.
        """
        if not self.writer.exits or self.mode is None:
            raise CannotSliceError("nothing leaves the region")
        if any(_is_half(fake_value(node)) for node in self.region.nodes):
            raise CannotSliceError("fp16 gradients of a tangent of one may underflow")
        dependent = self._with_tangent()
        with self.graph.inserting_before(self.graph.output_node()):
            inputs = self._inputs(dependent)
            loop = self._loop([fake_value(node) for node in inputs])
            call = self.graph.call_function(loop, tuple(inputs))
            call.meta["val"] = tuple(self._empty(output.shape, output.dtype) for output in loop.outputs)
            self._replace_exits(call)
        sort(self.graph)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.joint.recompile()

    # ---- the tangent -----------------------------------------------------------------------------------------------

    def _tangent(self) -> tuple[fx.Node | None, set[fx.Node]]:
        """Return the one scalar tangent that the region depends on, and the nodes that depend on it."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            if str(node.target).startswith("tangents"):
                dependent = dependent_nodes(self.graph, node)
                if any(each in dependent for each in self.region.nodes):
                    found[node] = dependent
        if not found:
            return None, set()
        if len(found) > 1 or sizes(next(iter(found))) != ():
            raise CannotSliceError("its gradients depend on more than one scalar tangent")
        tangent, dependent = next(iter(found.items()))
        inside = set(self.region.nodes)
        computed = reach(inside)
        nonlinear = first_nonlinear([node for node in self.graph.nodes if node in computed], dependent)
        if nonlinear is not None:
            raise CannotSliceError(f"{nonlinear.name} is not known to be linear in the tangent")
        return tangent, dependent

    # ---- what goes in ----------------------------------------------------------------------------------------------

    def _with_tangent(self) -> list[fx.Node]:
        """Return, in graph order, what depends on the tangent and what the loop's inputs are computed from.

        Raises:
            CannotSliceError: If an input depends on the region.
        """
        sources = {*(each.source for each in self.writer.row_inputs), *self.writer.whole_inputs}
        needed = reach(sources)
        if not needed.isdisjoint(self.region.nodes):
            raise CannotSliceError("an input of the region depends on the region")
        return [node for node in self.graph.nodes if node in needed and node in self.dependent]

    def _inputs(self, dependent: list[fx.Node]) -> list[fx.Node]:
        """Write copies of what depends on the tangent, for a tangent of one, and return the loop's inputs."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in dependent:
            if node is self.tangent:
                value = fake_value(node)
                kwargs = {"dtype": value.dtype, "device": value.device}
                copies[node] = self.graph.call_function(aten.full.default, ([], 1.0), kwargs)
            else:
                copies[node] = self.graph.node_copy(node, lambda each: copies.get(each, each))
            copies[node].meta = {"val": fake_value(node)}
        row_inputs = [self._row_input(copies.get(each.source, each.source), each) for each in self.writer.row_inputs]
        return row_inputs + [copies.get(each, each) for each in self.writer.whole_inputs]

    def _row_input(self, node: fx.Node, spec: RowInput) -> fx.Node:
        """Return ``node`` with all rows in its first dimension."""
        shape = (*spec.lead, *spec.rest)
        if sizes(node) != shape:
            node = self._call(aten.expand.default, node, list(shape))
        flat = [self.region.rows, *spec.rest]
        return node if len(spec.lead) == 1 else self._call(aten.reshape.default, node, flat)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        assert self.mode is not None
        with self.mode:
            node.meta["val"] = target(*fx.node.map_arg(args, fake_value))
        return node

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _loop(self, inputs: list[torch.Tensor]) -> RowLoop:
        total, rows = self.region.rows, self.rows
        outputs = tuple(LoopOutput(each.kind, each.shape, fake_value(each.source).dtype) for each in self.writer.exits)
        left = total % rows
        tail = SliceWriter(self.region, left, self.returned) if left else None
        return RowLoop(
            self._slice_graph(self.writer, inputs, rows),
            self._slice_graph(tail, inputs, left) if tail is not None else None,
            rows=rows,
            total=total,
            num_row_inputs=len(self.writer.row_inputs),
            outputs=outputs,
            wide_bytes=fake_value(self.region.logits).nbytes,
            direct=self.direct,
            window=self.window,
        )

    def _slice_graph(self, writer: SliceWriter, inputs: list[torch.Tensor], rows: int) -> fx.GraphModule:
        """Return the finished graph of one slice, with fake values; sums keep the dimensions of the whole graph's."""
        graph = writer.graph
        leaving = list(writer.exits)
        direct = self.direct
        if direct is not None:
            give_product(writer, leaving.pop(direct.output).parts[0])
            output = fake_value(self.region.logits)
        parts = tuple(part for each in leaving for part in each.parts)
        graph.output(parts if self.window is None else window_parts(writer, self.window))
        graph.eliminate_dead_code()
        module = fx.GraphModule({}, graph)
        count = len(writer.row_inputs)
        assert self.mode is not None
        with self.mode:
            given = [
                torch.empty_strided((rows, *each.shape[1:]), each.stride(), dtype=each.dtype, device=each.device)
                if i < count
                else each
                for i, each in enumerate(inputs)
            ]
            if direct is not None:
                given.append(torch.empty((rows, *output.shape[1:]), dtype=output.dtype, device=output.device))
        compat.propagate_fakes(module, given, self.mode)
        return module

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert self.mode is not None
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=fake_value(self.region.logits).device)

    # ---- what comes out --------------------------------------------------------------------------------------------

    def _replace_exits(self, call: fx.Node) -> None:
        """Let users of the region's results take the loop's, times the tangent where they depend on it."""
        inside = set(self.region.nodes)
        for number, leaving in enumerate(self.writer.exits):
            made = self.graph.call_function(operator.getitem, (call, number))
            made.meta["val"] = call.meta["val"][number]
            if leaving.source in self.dependent:
                assert self.tangent is not None
                made = self._call(aten.mul.Tensor, made, self.tangent)
            if sizes(made) != sizes(leaving.source):
                made = self._call(aten.reshape.default, made, list(sizes(leaving.source)))
            leaving.source.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16
