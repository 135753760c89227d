"""pack_chunks: lay parameters out in chunks, in first-use order.

Rules (DESIGN 4): a block's parameters share a chunk; a tied parameter lies in the chunk of its first use; frozen ones
and other data types have chunks of their own; parameters never seen follow in module order. Chunk capacity is chosen by
a grid search that wastes least of the chunk buffers, every one of which is as large as the largest chunk; a parameter
too large for the capacity has a chunk of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch

from protrain_compile.chunks import ALIGNMENT_BYTES, Chunk, ChunkLayout, ParameterSpec, Slot
from protrain_compile.sizes import dtype_bytes

MIN_CAPACITY_BYTES = 16 << 20
"""Small blocks share a chunk up to this size: a copy of 16 MiB reaches the link's full rate (derived from the link's
latency, about 10 us, against 300 us for the copy)."""

CAPACITY_STEPS = 8
"""How many multiples of the smallest useful capacity the grid search tries."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that belong together: one block's of one data type, all trainable or all frozen."""

    dtype: torch.dtype
    trainable: bool
    parameters: tuple[int, ...]


def pack_chunks(
    parameters: Sequence[ParameterSpec],
    first_uses: Iterable[Sequence[int]],
    capacity: int | None = None,
    ranks: int = 1,
) -> ChunkLayout:
    """Return the layout of ``parameters``.

    Args:
        parameters: All parameters of the model, in module order.
        first_uses: Per segment, in execution order, the parameters that it uses (by index); later uses are ignored.
        capacity: Bytes of a chunk; None for the grid search.
        ranks: Every chunk is padded so that this many aligned shards of equal size make it up.
    """
    groups = _groups(parameters, first_uses)
    sizes = [_group_numel(parameters, group) * dtype_bytes(group.dtype) for group in groups]
    if capacity is None:
        capacity = choose_capacity(sizes)
    chunks: list[Chunk] = []
    for members in _gather(groups, sizes, capacity):
        chunks.append(_chunk(len(chunks), parameters, members, ranks))
    place_of: list[tuple[int, int]] = [(-1, -1)] * len(parameters)
    for chunk in chunks:
        for number, slot in enumerate(chunk.slots):
            place_of[slot.parameter] = (chunk.index, number)
    return ChunkLayout(tuple(parameters), tuple(chunks), tuple(place_of))


def _groups(parameters: Sequence[ParameterSpec], first_uses: Iterable[Sequence[int]]) -> list[Group]:
    placed: set[int] = set()
    groups = []
    for used in [*first_uses, range(len(parameters))]:
        fresh = [index for index in dict.fromkeys(used) if index not in placed]
        placed.update(fresh)
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index in fresh:
            kinds.setdefault((parameters[index].dtype, parameters[index].trainable), []).append(index)
        groups += [Group(dtype, trainable, tuple(members)) for (dtype, trainable), members in kinds.items()]
    return groups


def choose_capacity(group_bytes: Sequence[int]) -> int:
    """Return the chunk capacity in bytes whose chunks waste least of equal buffers; the smaller one of equals."""
    if not group_bytes:
        return 0
    typical = sorted(group_bytes)[len(group_bytes) // 2]
    base = max(typical, min(MIN_CAPACITY_BYTES, sum(group_bytes)))
    candidates = [base + base * step // CAPACITY_STEPS for step in range(CAPACITY_STEPS + 1)]
    return min(candidates, key=lambda capacity: (_waste(group_bytes, capacity), capacity))


def _waste(group_bytes: Sequence[int], capacity: int) -> int:
    """Bytes of equal buffers that stay empty, over all chunks up to the capacity (larger ones do not share buffers)."""
    fills, current = [], 0
    for size in group_bytes:
        if current and current + size > capacity:
            fills.append(current)
            current = 0
        current += size
    fills.append(current)
    shared = [fill for fill in fills if fill <= capacity]
    largest = max(shared, default=0)
    return sum(largest - fill for fill in shared)


def _gather(groups: Sequence[Group], sizes: Sequence[int], capacity: int) -> list[list[Group]]:
    """Put consecutive groups of one kind together while they fit; kinds are filled side by side."""
    done: list[list[Group]] = []
    open_of: dict[tuple[torch.dtype, bool], tuple[list[Group], int]] = {}
    for group, size in zip(groups, sizes, strict=True):
        kind = (group.dtype, group.trainable)
        members, filled = open_of.get(kind, ([], 0))
        if not members or filled + size > capacity:
            members, filled = [], 0
            done.append(members)
        members.append(group)
        open_of[kind] = (members, filled + size)
    return done


def _aligned(numel: int, dtype: torch.dtype) -> int:
    step = ALIGNMENT_BYTES // dtype_bytes(dtype)
    return -(-numel // step) * step


def _group_numel(parameters: Sequence[ParameterSpec], group: Group) -> int:
    return sum(_aligned(parameters[index].numel, group.dtype) for index in group.parameters)


def _chunk(index: int, parameters: Sequence[ParameterSpec], groups: Sequence[Group], ranks: int) -> Chunk:
    dtype = groups[0].dtype
    slots, offset = [], 0
    for number in itertools.chain.from_iterable(group.parameters for group in groups):
        spec = parameters[number]
        slots.append(Slot(number, offset, spec.numel, spec.shape))
        offset += _aligned(spec.numel, dtype)
    shard = max(_aligned(-(-offset // ranks), dtype), _aligned(1, dtype))
    return Chunk(index, dtype, groups[0].trainable, ranks * shard, tuple(slots))
