"""Pass omit_tangents: backwards without the gradients of outputs that nothing was computed from.

A model that returns its logits besides the loss has a tangent for them, as large as they are. Who trains on the loss
alone never makes one; autograd would make zeros, and hold them until the whole backward is over. The runtime tells
autograd not to, and hands None on. So a backward is written twice where it only adds such a tangent to something::

    backward           (inputs, saved, tangents; None for what is absent) -> gradients      what is planned for
    complete_backward  (inputs, saved, tangents) -> gradients                    compiled when such a tangent comes

Both take the same arguments, so one schedule serves both, and saved values that only the complete one reads are there.

A tangent is *absent* if the model returns a loss besides, a scalar, and every backward that takes the tangent can do
without. All others are made of zeros where autograd has none: a backward whose results would be nothing but zero needs
them as tensors, and so does one that takes a tangent in an operation that is not known to be linear (see
``linearity``). What a model that returns no loss is trained on cannot be told.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx

from passes.linearity import NotZeroError, copy_without, dependent_nodes
from protrain_compile import compat
from protrain_compile.program import Parts, Program, Template, fake_value, results_of

log = logging.getLogger("protrain_compile.passes")


Places = Mapping[int, set[fx.Node]]
"""By position among a template's tangents: which of the captured graph's values its segments have there."""


class OmitTangents:
    """Write the backwards without absent tangents."""

    name: ClassVar[str] = "omit_tangents"
    requires: ClassVar[frozenset[str]] = frozenset({"parts"})
    provides: ClassVar[frozenset[str]] = frozenset({"absent tangents"})

    def run(self, program: Program) -> bool:
        """Set ``absent_tangents``, and ``parts`` of templates that take any; the captured graph stays as it is."""
        places = _places(program)
        absent = _candidates(program)
        while True:
            found = {template: _parts_without(template, places[template], absent) for template in places}
            refused = set[fx.Node]().union(*(each for each in found.values() if isinstance(each, set)))
            absent -= refused
            if not refused:
                break
        for template, parts in found.items():
            if isinstance(parts, Parts):
                template.parts = parts
        program.absent_tangents = frozenset(i for i, node in enumerate(program.tangents) if node in absent)
        return False


def _candidates(program: Program) -> set[fx.Node]:
    """Return the tangents of what is returned besides a scalar loss."""
    values = {node: fake_value(node) for node in program.tangents}
    large = {node for node, value in values.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    return large if len(large) < len(values) else set()


def _places(program: Program) -> dict[Template, Places]:
    """Return what is where among the tangents of every template, the sliced ones included."""
    found: dict[Template, dict[int, set[fx.Node]]] = {template: {} for template in program.templates}
    for segment, index in zip(program.segments, program.template_of, strict=True):
        for each in {index, program.sliced.get(index, index)}:
            for place, node in enumerate(segment.tangents):
                found[program.templates[each]].setdefault(place, set()).add(node)
    return found  # type: ignore[return-value]


def _parts_without(template: Template, places: Places, absent: set[fx.Node]) -> Parts | set[fx.Node]:
    """Return the parts that do without ``absent``, or which of these the template needs as tensors."""
    parts = template.parts
    assert parts is not None
    if parts.backward is None:
        return set()
    taken = {ref.index for ref in parts.backward_inputs if ref.kind == "tangent" and places[ref.index] & absent}
    mixed = set[fx.Node]().union(*(places[i] & absent for i in taken if not places[i] <= absent))
    if not taken or mixed:
        return mixed
    try:
        return _without(parts, parts.backward, taken)
    except NotZeroError as reason:
        log.debug("omit_tangents leaves %s alone: %s", template.name, reason)
        return _refused(parts, parts.backward, taken, places)


def _refused(parts: Parts, backward: fx.GraphModule, taken: set[int], places: Places) -> set[fx.Node]:
    """Return the values of the places that cannot be done without; of places that can, but not together, the first."""
    found: set[int] = set()
    for place in taken:
        try:
            _without(parts, backward, {place})
        except NotZeroError:
            found.add(place)
    return set().union(*(places[place] for place in found or {min(taken)}))


def _without(parts: Parts, backward: fx.GraphModule, taken: set[int]) -> Parts:
    """Return ``parts`` with a backward without these tangents.

    Raises:
        NotZeroError: If it needs them as tensors.
    """
    with compat.unset_fake_temporarily():
        written = copy.deepcopy(backward)
    graph = written.graph
    refs = zip(graph.find_nodes(op="placeholder"), parts.backward_inputs, strict=True)
    zeros = {node for node, ref in refs if ref.kind == "tangent" and ref.index in taken}
    dependent = set[fx.Node]().union(*(dependent_nodes(graph, node) for node in zeros))
    output = graph.output_node()
    with graph.inserting_before(output):
        copies = copy_without([node for node in graph.nodes if node in dependent - zeros], zeros)
    results = [copies.get(each, each) if isinstance(each, fx.Node) else each for each in results_of(written)]
    if any(each is None and before is not None for each, before in zip(results, results_of(written), strict=True)):
        raise NotZeroError("a gradient is nothing but zero")
    output.args = (tuple(results),)
    graph.eliminate_dead_code()
    for node in zeros:
        node.meta = {**node.meta, "val": None}
    written.recompile()
    return dataclasses.replace(parts, backward=written, complete_backward=backward, absent_tangents=frozenset(taken))
