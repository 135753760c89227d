"""How much host memory a prepared model will take, told from its parameters alone: before anything is changed.

Packing needs a graph, which only the first call has. ``prepare`` lays chunks out in module order instead, each numbered
child of a container (``blocks.3``) as a segment of its own, which is what tracing finds in a transformer. Where a Plan
forces residency the result is that of packing but for the padding of chunks; else it is that of the default rule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from passes.pack_chunks import pack_chunks
from protrain_compile.chunks import ParameterSpec, Residency
from protrain_compile.packing import Preparation, store_spec, where_chunks_live
from protrain_compile.plan import Plan
from protrain_compile.update_book import UpdateBook


def host_needs(specs: Sequence[ParameterSpec], preparation: Preparation, book: UpdateBook, unloaded_bytes: int) -> int:
    """Return the host bytes that a model takes at most while it is packed and trained.

    Args:
        specs: All parameters, in module order.
        preparation: What the user said.
        book: Which update every parameter gets.
        unloaded_bytes: Bytes of parameters on ``meta``, which are allocated on the host before they are packed.
    """
    plan = preparation.plan or Plan.uniform()
    ranks = 1 if preparation.ranks is None else preparation.ranks.size
    layout = pack_chunks(specs, guess_segments(specs), plan.chunk_bytes, ranks)
    if plan.residency is not None:
        plan = dataclasses.replace(plan, residency=_stretched(plan.residency, len(layout.chunks)))
    residency, _ = where_chunks_live(layout, plan, preparation, book)
    spec = store_spec(layout, residency, preparation, book)
    return max(spec.most_host_bytes(), spec.packing_bytes() + unloaded_bytes)


def guess_segments(specs: Sequence[ParameterSpec]) -> list[list[int]]:
    """Return the parameters of each segment: neighbours with the same numbered ancestor, or with none."""
    keyed = itertools.groupby(range(len(specs)), key=lambda index: _numbered_ancestor(specs[index].name))
    return [list(members) for _, members in keyed]


def _numbered_ancestor(name: str) -> str:
    """Return ``blocks.3`` for ``blocks.3.mlp.weight``; an empty string if nothing is numbered."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _stretched(residency: Sequence[Residency], chunks: int) -> tuple[Residency, ...]:
    """Return residencies for ``chunks`` chunks in the proportions and order of those given."""
    return tuple(residency[i * len(residency) // chunks] for i in range(chunks)) if residency else ()
