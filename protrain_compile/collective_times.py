"""How long the collectives of one chunk take, and how many bytes those of a step move.

::

    gather     all_gather among the ranks that divide the chunk
    reduce     reduce_scatter among them, then, with replicas, all_reduce of the shard across them (hybrid sharding)

Each by the HardwareProfile's measured collectives of this kind and number of ranks, a line through the two nearest
sizes; where there is none, by the link table (``links``).
"""

from __future__ import annotations

from collections.abc import Sequence

from protrain_compile.links import default_links
from protrain_compile.lowering import Lowered
from protrain_compile.profile import CollectiveCost, CollectiveKind, HardwareProfile
from protrain_compile.shards import World
from protrain_compile.step_shape import ChunkShape, StepShape

DIVIDE_PASSES = 2
"""Times that a reduce reads or writes a whole gradient besides: it is divided by the number of ranks first."""

ADD_PASSES = 2
"""Times that it reads or writes the shard of a chunk on the device afterwards: it is copied to where gradients wait."""


class CollectiveTimes:
    """The times of one world's collectives on one machine."""

    def __init__(self, hardware: HardwareProfile, world: World) -> None:
        self.hardware = hardware
        self.world = world
        fewest = max(1, world.size // world.nodes)  # of one node: where they differ, its ports are what all wait for
        self._shard_members = fewest if world.ranks > world.node_ranks else None
        self._replica_members = 1 if world.nodes > 1 else None

    def gather_ms(self, chunk: ChunkShape) -> float:
        """Return the time of a chunk's all_gather."""
        return self._ms("all_gather", chunk.size_bytes, self.world.ranks, self._shard_members)

    def reduce_ms(self, chunk: ChunkShape, *, adds: bool) -> float:
        """Return the time of a chunk's reduce_scatter with all that belongs to it; ``adds`` if it is on the device."""
        world = self.world
        passes = DIVIDE_PASSES * chunk.size_bytes + (ADD_PASSES * chunk.shard_bytes if adds else 0)
        ms = self._ms("reduce_scatter", chunk.size_bytes, world.ranks, self._shard_members)
        if world.replicas > 1:
            ms += self._ms("all_reduce", chunk.shard_bytes, world.replicas, self._replica_members)
        return ms + passes / self.hardware.device_gb_per_s / 1e6

    def _ms(self, kind: CollectiveKind, size_bytes: int, ranks: int, node_members: int | None) -> float:
        known = [each for each in self.hardware.collectives if each.kind == kind and each.ranks == ranks]
        if known:
            return _measured_ms(known, size_bytes)
        links = self.hardware.links or default_links()
        return links.ring_ms(size_bytes, ranks, node_members=node_members) * (2 if kind == "all_reduce" else 1)


def _measured_ms(known: Sequence[CollectiveCost], size_bytes: int) -> float:
    """Return the time on the line through the two nearest measured sizes; in proportion to the only one."""
    if len(known) == 1:
        return known[0].ms * size_bytes / known[0].size_bytes
    near = sorted(known, key=lambda each: abs(each.size_bytes - size_bytes))[:2]
    low, high = sorted(near, key=lambda each: each.size_bytes)
    slope = (high.ms - low.ms) / max(1, high.size_bytes - low.size_bytes)
    return max(0.0, low.ms + slope * (size_bytes - low.size_bytes))


def traffic_bytes(shape: StepShape, lowered: Lowered) -> dict[str, int]:
    """Return the bytes that a rank receives from the others that divide its chunks in a step, by collective.

    With several micro-batches a step is one of them: what runs once for all, on what is whole on the device, counts by
    its share. A chunk that stays whole and is not updated is gathered once, not in every step.
    """
    moved = {"all_gather": 0, "reduce_scatter": 0} if shape.world.size > 1 else {}
    for op in (*lowered.forward, *lowered.backward):
        if op.op in moved:
            chunk = shape.chunks[op.chunk]
            if chunk.updated or op.buffer >= 0:
                received = chunk.size_bytes - chunk.shard_bytes
                moved[op.op] += received if op.buffer >= 0 else received // shape.micro_batches
    return moved
