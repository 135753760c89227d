"""Facts about single nodes that several passes ask for: cost class, randomness, effects, views."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from protrain_compile.program import fake_value
from protrain_compile.row_loop import RowLoop

aten = torch.ops.aten

HEAVY_NAMES = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "matmul", "_grouped_mm", "grouped_mm"}
)
"""Operations that dominate a transformer's time; attention kernels are recognised by their name's ending."""

ROUTING_OPS = frozenset(
    {
        *(aten.topk.default, aten.sort.default, aten.sort.stable, aten.nonzero.default),
        *(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim),
    }
)
"""Decisions that a recompute must not make again: a tie broken the other way would send a token elsewhere."""

PARAMETER_CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
"""Casts that are cheaper to repeat in the backward than to keep beside the parameter."""


def op_name(node: fx.Node) -> str:
    """Return the short operation name of a call, such as ``addmm``."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target._opname)
    return str(getattr(target, "__name__", target))


def is_heavy(node: fx.Node) -> bool:
    """Whether the node is a matrix product, a convolution or an attention kernel."""
    if node.op != "call_function":
        return False
    name = op_name(node)
    return name in HEAVY_NAMES or "attention" in name


def is_backward_tagged(node: fx.Node) -> bool:
    """Whether tracing recorded the node while it differentiated."""
    return node.meta.get("partitioner_tag") == "is_backward" or "fwd_nn_module_stack" in node.meta


def draws_randomness(node: fx.Node) -> bool:
    """Whether running the node twice may give two results because it draws random numbers.

    Attention kernels carry the tag whatever their dropout; with a dropout of zero they are pure. A higher-order
    operator draws if an operator that it is given does (``auto_functionalized`` runs one that writes its arguments).
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return any(isinstance(each, OpOverload) and _is_seeded(each) for each in node.args)
    if not isinstance(target, OpOverload) or not _is_seeded(target):
        return False
    dropout = _argument(node, "dropout_p")
    return not (isinstance(dropout, int | float) and dropout == 0)


def _is_seeded(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def _argument(node: fx.Node, name: str) -> Any:
    target = node.target
    assert isinstance(target, OpOverload)
    if name in node.kwargs:
        return node.kwargs[name]
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else argument.default_value
    return None


def is_effectful(node: fx.Node) -> bool:
    """Whether the node does something besides returning its result (writes an argument, prints, sends)."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    return isinstance(target, HigherOrderOperator) and target.__name__ in ("with_effects", "print", "call_torchbind")


def never_recompute(node: fx.Node) -> bool:
    """Whether the node's results must be saved rather than computed again, its own or those of a graph that it runs."""
    if node.op != "call_function":
        return False
    return (
        draws_randomness(node)
        or is_effectful(node)
        or node.target in ROUTING_OPS
        or isinstance(node.target, RowLoop)  # it computes gradients, too
        or any(never_recompute(inner) for inner in _inner_nodes(node))
    )


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graphs that a higher-order operator (``cond``, say) is given."""
    for source in node.all_input_nodes if isinstance(node.target, HigherOrderOperator) else ():
        if source.op == "get_attr":
            inner = operator.attrgetter(str(source.target))(node.graph.owning_module)
            yield from inner.graph.nodes if isinstance(inner, fx.GraphModule) else ()


def is_view(node: fx.Node) -> bool:
    """Whether the node returns a view of its first argument and nothing else."""
    target = node.target
    return isinstance(target, OpOverload) and bool(target.is_view)


def is_parameter_cast(node: fx.Node) -> bool:
    """Whether the node only changes the floating-point type of its argument."""
    if node.target not in PARAMETER_CASTS:
        return False
    source = fake_value(node.all_input_nodes[0]) if node.all_input_nodes else None
    result = fake_value(node)
    return bool(
        isinstance(source, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and source.is_floating_point()
        and result.is_floating_point()
        and source.device == result.device
    )


def free_symbols(value: Any) -> set[Any]:
    """Return the sympy symbols in a fake value's sizes, strides and offset."""
    if isinstance(value, list | tuple):
        return set().union(*(free_symbols(each) for each in value)) if value else set()
    if isinstance(value, torch.Tensor):
        return free_symbols([*value.shape, *value.stride(), value.storage_offset()])
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    return set()


def reach(wanted: Iterable[fx.Node], stop: Container[fx.Node] = ()) -> set[fx.Node]:
    """Return ``wanted`` and all that they depend on, as far as ``stop``, which is left out."""
    stack, seen = list(wanted), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in seen and node not in stop:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen
