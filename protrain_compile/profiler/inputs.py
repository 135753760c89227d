"""Random inputs of a graph's placeholders: of the right shape, stride, type and device, and harmless.

Numbers are random, as the speed of a matrix product depends on its factors' bits. Whole numbers are where an index
might be out of range, which on a CUDA device ends the process: they are random only below the size of what they are
seen to index, else zero. Masks are true everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from passes.node_facts import op_name
from protrain_compile.profiler.kernels import moves_nothing
from protrain_compile.program import fake_value
from protrain_compile.sizes import hint

SCALE = 0.02
"""Standard deviation: that of weights, and small enough for half precision after several products."""

PASSED_ON = frozenset({"where", "clone", "convert_element_type", "_to_copy", "copy"})
"""Operations besides views whose results are among the values of their arguments, or zero."""

INDEXED_ROWS = {"embedding": (1, 0), "index_select": (2, 0), "gather": (2, 0), "scatter_add": (2, 0), "scatter": (2, 0)}
"""Operations that index: the position of the index, and of the tensor that it indexes."""


def make_inputs(placeholders: Iterable[fx.Node], seed: int = 0) -> list[Any]:
    """Return a value for each of ``placeholders``; of a symbolic size, the one that was traced."""
    return [make_value(node, seed + i) for i, node in enumerate(placeholders)]


def make_value(node: fx.Node, seed: int = 0) -> Any:
    """Return one value; the same seed gives the same values on one device."""
    fake = fake_value(node)
    if not isinstance(fake, Tensor):
        return hint(fake) if isinstance(fake, torch.SymInt) else fake
    shape, stride = [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()]
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    generator = torch.Generator(fake.device).manual_seed(seed)
    flat = torch.zeros(extent, dtype=fake.dtype, device=fake.device)
    _fill(flat, generator, index_limit(node))
    return flat.as_strided(shape, stride)


def _fill(flat: Tensor, generator: torch.Generator, limit: int) -> None:
    if flat.dtype == torch.bool:
        flat.fill_(True)
    elif flat.is_floating_point() and flat.dtype.itemsize > 1:
        flat.normal_(0.0, SCALE, generator=generator)
    elif limit > 1 and not flat.is_complex() and flat.dtype.itemsize > 1:
        flat.random_(0, limit, generator=generator)


def index_limit(node: fx.Node) -> int:
    """Return below which number the values of ``node`` are valid indices everywhere; 0 if that cannot be told."""
    limits: list[int] = []
    return min(limits) if _collect_limits(node, limits) and limits else 0


def _collect_limits(node: fx.Node, limits: list[int]) -> bool:
    """Append the sizes that ``node`` indexes; return whether all its uses are understood."""
    for user in node.users:
        name = op_name(user)
        if name in INDEXED_ROWS and user.args[INDEXED_ROWS[name][0]] is node:
            dim = 0 if name == "embedding" else user.args[1]
            limits.append(hint(fake_value(user.args[INDEXED_ROWS[name][1]]).shape[dim]))  # type: ignore[arg-type]
        elif name in ("index", "index_put", "_unsafe_index", "_unsafe_masked_index_put_accumulate"):
            limits += _indexed_dims(node, user)
        elif moves_nothing(user) or name in PASSED_ON:
            if not _collect_limits(user, limits):
                return False
        elif not _is_condition(user):
            return False
    return True


def _indexed_dims(node: fx.Node, user: fx.Node) -> list[int]:
    """Return the sizes of the dimensions that ``node`` indexes in ``index(source, [None, node, ...])``."""
    shape = fake_value(user.args[0]).shape  # type: ignore[arg-type]
    lists = [argument for argument in user.args[1:] if isinstance(argument, list | tuple)]
    return [hint(shape[dim]) for indices in lists for dim, each in enumerate(indices) if each is node]


def _is_condition(user: fx.Node) -> bool:
    """Whether the result is a truth value, or leaves the graph: nothing is indexed by it here."""
    value = fake_value(user)
    return user.op == "output" or (isinstance(value, Tensor) and value.dtype == torch.bool)
