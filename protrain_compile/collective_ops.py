"""Collectives among the lowered operations of a graph: the rules of the pass ``shard_collectives``, on tuples.

::

    all_gather       behind every prefetch, in place of it where the shard lies on the device; of chunks that stay whole
                     on the device, in the order of first use, as early in the forward as the gathers before allow
    reduce_scatter   behind every collect
    update           of a chunk on the device: behind the next call's gradients, which hide its reduce_scatter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from protrain_compile.chunks import Residency
from protrain_compile.roles import ROLES

if TYPE_CHECKING:
    from protrain_compile.lowering import Op


def with_collectives(ops: Sequence[Op], residency: Sequence[Residency], *, backward: bool) -> list[Op]:
    """Return the operations of a graph with the collectives of chunks that ranks divide.

    Args:
        ops: Placed operations.
        residency: Of every chunk.
        backward: Whether the graph is the backward.
    """
    found = _gather_in_buffers(ops, residency)
    if not backward:
        return _gather_resident(found)
    return _delay_updates(_reduce(found), residency)


def _gather_in_buffers(ops: Sequence[Op], residency: Sequence[Residency]) -> list[Op]:
    found: list[Op] = []
    for op in ops:
        if op.op != "prefetch":
            found.append(op)
            continue
        if residency[op.chunk] != "persistent":
            found.append(op)
        found.append(op._replace(op="all_gather"))
    return found


def _gather_resident(ops: Sequence[Op]) -> list[Op]:
    latest: dict[tuple[int, int], int] = {}
    reached = -1
    behind: dict[int, list[Op]] = {}
    for position, op in enumerate(ops):
        if op.op == "all_gather":
            latest[op.chunk, op.buffer] = position
        elif op.op == "wait":
            reached = max(reached, latest.get((op.chunk, op.buffer), -1))
        elif op.op == "bind":
            behind.setdefault(reached, []).append(op._replace(op="all_gather"))
    found = behind.get(-1, [])
    for position, op in enumerate(ops):
        found += [op, *behind.get(position, ())]
    return found


def _reduce(ops: Sequence[Op]) -> list[Op]:
    found: list[Op] = []
    for op in ops:
        found += [op, op._replace(op="reduce_scatter")] if op.op == "collect" else [op]
    return found


def _delay_updates(ops: Sequence[Op], residency: Sequence[Residency]) -> list[Op]:
    found: list[Op] = []
    waiting: list[Op] = []
    ripe: list[Op] = []
    for op in ops:
        if op.op in ROLES:
            ripe, waiting = ripe + waiting, []
        if op.op != "update":
            found.append(op)
            continue
        found += ripe
        ripe = []
        if residency[op.chunk] == "persistent":
            waiting.append(op)
        else:
            found.append(op)
    return found + ripe + waiting
