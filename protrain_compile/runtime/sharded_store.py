"""The chunk store of one rank of several: its shard of every chunk, and whole values through collectives.

=============  =======================================================  ============================
residency      device                                                   host
=============  =======================================================  ============================
persistent     shards of parameters, states and gradients; whole        nothing
               parameters unless they are divided; a whole gradient
               if only states are divided
offloaded      nothing of its own (chunk buffers)                       shards of parameters, states
split          a buffer of its own (see the residency)                  shards of parameters, states
=============  =======================================================  ============================

Reading a value is a collective call: every rank has to read it, and each gets the whole. Writing is not; all ranks are
to write the same.
"""

from __future__ import annotations

import dataclasses

import torch

from protrain_compile.chunks import Chunk, ChunkLayout
from protrain_compile.runtime.chunk_store import ChunkStore, HostParts, StoreSpec
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.runtime.host_memory import HostMemory
from protrain_compile.runtime.ranks import Ranks
from protrain_compile.shards import Sharding


@dataclasses.dataclass(frozen=True)
class Division:
    """How a model's chunks are divided.

    Attributes:
        layout: The whole chunks.
        sharding: Of each.
    """

    layout: ChunkLayout
    sharding: tuple[Sharding, ...]


class ShardedStore(ChunkStore):
    """What a StoreSpec says of one rank's shards, and whole values in and out (see the module docstring).

    Attributes:
        division: How chunks are divided.
        whole_parameters: Of the persistent chunks that are whole on the device; their home is the shard in it.
        whole_gradients: Of the persistent chunks of which only states are divided.
    """

    def __init__(
        self, spec: StoreSpec, division: Division, ranks: Ranks, budget: HostBudget, memory: HostMemory | None = None
    ) -> None:
        """Allocate parameters and gradients.

        Args:
            spec: What this rank holds: its layout is the shards'.
            division: How chunks are divided.
            ranks: Who holds the rest.
            budget: Bounds on host memory.
            memory: Where pinned host memory comes from.

        Raises:
            HostMemoryError: If the host budget is too small; nothing is allocated then.
        """
        self.division = division
        self.ranks = ranks
        self.whole_parameters: dict[int, torch.Tensor] = {}
        self.whole_gradients: dict[int, torch.Tensor] = {}
        super().__init__(spec, budget, memory)

    def _allocate(self, chunk: Chunk, pinned: HostParts) -> torch.Tensor:
        home = super()._allocate(chunk, pinned)
        sharding = self.division.sharding[chunk.index]
        if self.spec.residency[chunk.index] != "persistent":
            return home
        numel = self.division.layout.chunks[chunk.index].numel
        if sharding == "states" and chunk.trainable:
            dtype = self.spec.gradient_dtype or chunk.dtype
            self.whole_gradients[chunk.index] = torch.zeros(numel, dtype=dtype, device=self.spec.device)
        if sharding == "parameters":
            return home
        whole = torch.zeros(numel, dtype=chunk.dtype, device=self.spec.device)
        self.whole_parameters[chunk.index] = whole
        return self.ranks.shard(whole)

    def whole(self, parameter: int, part: torch.Tensor) -> torch.Tensor:
        """See :meth:`ChunkStore.whole`; a collective call, and the result is on the device."""
        spec = self.division.layout.parameters[parameter]
        flat = torch.empty(spec.numel, dtype=part.dtype, device=self.spec.device)
        for owner in range(self.ranks.size):
            begin, end = self._range_on(parameter, owner)
            if begin < end:
                if owner == self.ranks.rank:
                    flat[begin:end].copy_(part)
                self.ranks.broadcast(flat[begin:end], owner, f"{spec.name} from rank {owner}")
        return flat.view(spec.shape)

    def part_here(self, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """See :meth:`ChunkStore.part_here`."""
        begin, end = self._range_on(parameter, self.ranks.rank)
        return value.detach().reshape(-1)[begin:end]

    def _range_on(self, parameter: int, rank: int) -> tuple[int, int]:
        """Return which elements of a parameter lie on a rank; an empty range if none do."""
        index, number = self.division.layout.place_of[parameter]
        chunk = self.division.layout.chunks[index]
        slot, shard = chunk.slots[number], chunk.numel // self.ranks.size
        begin, end = rank * shard - slot.offset, (rank + 1) * shard - slot.offset
        return min(max(begin, 0), slot.numel), min(max(end, 0), slot.numel)

    def close(self) -> None:
        """See :meth:`ChunkStore.close`."""
        self.whole_parameters.clear()
        self.whole_gradients.clear()
        super().close()
