"""Pass dedupe_templates: segments of one structure share one template.

Two segments are of one structure when their joint subgraphs have the same operations with the same arguments up to
renaming, the same shapes, strides, types and devices, and inputs of the same roles. A 48-layer model has about
three templates (prologue, block, epilogue).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx

from protrain_compile.program import Program, Segment, Template, fake_value

ALIGNMENT_BYTES = 16
"""Kernels compiled for an aligned input assume no more than this."""


class DedupeTemplates:
    """Give structurally identical segments one template."""

    name: ClassVar[str] = "dedupe_templates"
    requires: ClassVar[frozenset[str]] = frozenset({"segments"})
    provides: ClassVar[frozenset[str]] = frozenset({"templates"})

    def run(self, program: Program) -> bool:
        """Set ``templates`` and ``template_of``; the graph stays as it is."""
        index_of: dict[Any, int] = {}
        templates: list[Template] = []
        template_of: list[int] = []
        for segment in program.segments:
            key = structure_key(segment)
            if key not in index_of:
                index_of[key] = len(templates)
                templates.append(
                    Template(f"t{len(templates)}", segment.joint, segment.input_roles, len(segment.outputs))
                )
            template_of.append(index_of[key])
        program.templates, program.template_of = tuple(templates), tuple(template_of)
        return False


def structure_key(segment: Segment) -> tuple[Any, ...]:
    """Return a hashable value that is equal for segments of one structure, and for no others."""
    return (segment.input_roles, len(segment.outputs), _graph_key(segment.joint))


def _graph_key(module: fx.GraphModule) -> tuple[Any, ...]:
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    return tuple(
        (
            node.op,
            _target_key(module, node),
            _key(node.args, numbers),
            _key(node.kwargs, numbers),
            _value_key(fake_value(node)),
            str(node.meta.get("recompute")),
        )
        for node in module.graph.nodes
    )


def _target_key(module: fx.GraphModule, node: fx.Node) -> Any:
    if node.op != "get_attr":
        return node.target if node.op != "placeholder" else re.sub(r"\d+$", "", str(node.target))
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return _graph_key(value) if isinstance(value, fx.GraphModule) else id(value)


def _key(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Return ``value`` with nodes replaced by numbers and containers by tuples; types tell 1 from 1.0 and True."""
    if isinstance(value, fx.Node):
        return ("node", numbers[value])
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_key(each, numbers) for each in value))
    if isinstance(value, Mapping):
        return tuple((name, _key(each, numbers)) for name, each in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _key((value.start, value.stop, value.step), numbers))
    return (type(value).__name__, repr(value))


def _value_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(tuple(value.shape)), str(value.stride()), _alignment(value), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(_value_key(each) for each in value)
    return (type(value).__name__, str(value))


def _alignment(value: torch.Tensor) -> str:
    """Return what a kernel may know of a view's offset: blocks that get one slice each of a tensor are equal."""
    offset = value.storage_offset()
    return str(offset * value.element_size() % ALIGNMENT_BYTES if isinstance(offset, int) else offset)
