"""Pass hoist_casts: a parameter that is used only through a 16-bit cast travels as 16 bits.

Under autocast an fp32 weight reads as ``mm(x, cast(w, bf16))`` in the forward, and its gradient as ``cast(g, fp32)``::

    before   w: fp32 -> convert_element_type(w, bf16) -> uses      gradient convert_element_type(g, fp32)
    after    w: bf16 -> uses                                       gradient g

The chunk then holds bf16 (half the bytes over the link and in buffers) and the fp32 value is its master, bit-exact: the
user still sees an fp32 parameter. Only trainable managed parameters are hoisted: a frozen one has no master.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from passes.node_facts import is_parameter_cast
from protrain_compile.program import Program, fake_value

TRAVELLING = (torch.bfloat16, torch.float16)


class HoistCasts:
    """Let parameters travel in the type that they are used in."""

    name: ClassVar[str] = "hoist_casts"
    requires: ClassVar[frozenset[str]] = frozenset({"stages"})
    provides: ClassVar[frozenset[str]] = frozenset({"hoisted"})

    def run(self, program: Program) -> bool:
        """Rewrite the graph and set ``travels`` on the inputs concerned."""
        inputs = list(program.inputs)
        for position, (node, source) in enumerate(zip(program.primals, program.inputs, strict=True)):
            dtype = _used_dtype(program, node, position)
            if dtype is not None:
                _hoist(program, node, position)
                inputs[position] = dataclasses.replace(source, travels=dtype)
        changed = tuple(inputs) != program.inputs
        program.inputs = tuple(inputs)
        return changed


def _used_dtype(program: Program, node: fx.Node, position: int) -> torch.dtype | None:
    """Return the 16-bit type in which every user reads the parameter, or None."""
    value, source = fake_value(node), program.inputs[position]
    if not source.hoistable or not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not node.users:
        return None
    if node in program.results or not all(is_parameter_cast(user) for user in node.users):
        return None
    dtypes = {fake_value(user).dtype for user in node.users}
    if len(dtypes) != 1 or not dtypes <= set(TRAVELLING):
        return None
    dtype: torch.dtype = dtypes.pop()
    gradient = program.results[program.num_outputs + position] if program.differentiable else None
    # A gradient that is summed in fp32 (a tied weight) would lose bits in a 16-bit chunk.
    return dtype if gradient is None or (is_parameter_cast(gradient) and _from(gradient, dtype)) else None


def _hoist(program: Program, node: fx.Node, position: int) -> None:
    node.meta["val"] = fake_value(next(iter(node.users)))
    for user in list(node.users):
        user.replace_all_uses_with(node)
        program.graph.graph.erase_node(user)
        program.stage_of.pop(user, None)
        program.backward_nodes.discard(user)
    output = program.graph.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    gradient = results[program.num_outputs + position] if program.differentiable else None
    if gradient is not None:
        results[program.num_outputs + position] = gradient.args[0]
        output.args = (tuple(results),)
        if not gradient.users:
            program.graph.graph.erase_node(gradient)
            program.stage_of.pop(gradient, None)
            program.backward_nodes.discard(gradient)


def _from(cast: fx.Node, dtype: torch.dtype) -> bool:
    return bool(fake_value(cast.all_input_nodes[0]).dtype == dtype)
