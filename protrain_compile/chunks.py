"""Chunks: flat buffers of parameters in first-use order, the unit of residency, movement and updates. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, get_args

import torch

from protrain_compile.shards import Sharding
from protrain_compile.sizes import dtype_bytes

Residency = Literal["persistent", "offloaded", "split"]
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)
"""Persistent: parameters and states on the device. Offloaded: both on the host. Split: parameters on the device, states
on the host."""

ALIGNMENT_BYTES = 256
"""Every parameter starts at a multiple of this: Inductor clones, without a word, an input not aligned to 16 bytes,
and copies and vector loads like whole cache lines."""


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What packing needs to know of one parameter.

    Attributes:
        name: Its name in the model.
        shape: Its sizes.
        dtype: Its data type on the device.
        trainable: Whether it requires a gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> ParameterSpec:
        """Return what packing needs to know of ``parameter``."""
        return cls(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its chunk: elements ``[offset, offset + numel)``."""

    parameter: int
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A flat buffer of parameters of one data type, all trainable or all frozen.

    Attributes:
        index: Its number, in first-use order.
        dtype: Data type of its elements.
        trainable: Whether its parameters are updated.
        numel: Elements, padding included.
        slots: Its parameters.
    """

    index: int
    dtype: torch.dtype
    trainable: bool
    numel: int
    slots: tuple[Slot, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its parameters on the device, padding included."""
        return self.numel * dtype_bytes(self.dtype)


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """All chunks of a model, made once and never repacked.

    Attributes:
        parameters: The parameters that were packed.
        chunks: The chunks, in first-use order.
        place_of: For every parameter, its chunk and the number of its slot there.
    """

    parameters: tuple[ParameterSpec, ...]
    chunks: tuple[Chunk, ...]
    place_of: tuple[tuple[int, int], ...]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest chunk; 0 without chunks."""
        return max((chunk.size_bytes for chunk in self.chunks), default=0)

    def shard(self, rank: int, ranks: int) -> ChunkLayout:
        """Return what lies on one of ``ranks`` ranks: the same chunks and slots, cut to the rank's shards.

        A slot keeps its number and the shape of its parameter; ``numel`` is what of it lies here, perhaps nothing.
        """
        chunks = tuple(_cut_chunk(chunk, rank, ranks) for chunk in self.chunks)
        return dataclasses.replace(self, chunks=chunks)


def _cut_chunk(chunk: Chunk, rank: int, ranks: int) -> Chunk:
    numel = chunk.numel // ranks
    assert numel * ranks == chunk.numel, f"chunk {chunk.index} does not divide into {ranks} shards"
    slots = []
    for slot in chunk.slots:
        begin, end = (min(max(at - rank * numel, 0), numel) for at in (slot.offset, slot.offset + slot.numel))
        slots.append(dataclasses.replace(slot, offset=begin, numel=end - begin))
    return dataclasses.replace(chunk, numel=numel, slots=tuple(slots))


@dataclasses.dataclass(frozen=True)
class ChunkBinding:
    """How one binding's parameters lie in chunks, and where the chunks live.

    Attributes:
        layout: All chunks of the model.
        residency: Per chunk.
        buffers: How many standard chunk buffers there are.
        place_of: Chunk and slot of the graph inputs that are managed, by position among the forward's arguments.
        gathered: Positions that this graph reads in another type than their chunk has: gathered from the exact values.
        ranks: How many ranks share each chunk.
        sharding: Per chunk, what is divided among the ranks; None for one rank.
    """

    layout: ChunkLayout
    residency: tuple[Residency, ...]
    buffers: int
    place_of: dict[int, tuple[int, int]]
    gathered: frozenset[int] = frozenset()
    ranks: int = 1
    sharding: tuple[Sharding, ...] | None = None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for bindings that one schedule can serve."""
        places = tuple(self.place_of.items())
        return (self.layout, self.residency, self.buffers, places, self.gathered, self.ranks, self.sharding)
