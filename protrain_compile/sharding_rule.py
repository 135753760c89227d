"""What of each chunk ranks divide, where neither the Plan nor a search says: before the first call, or without bounds.

The least communication that fits: whole gradients on the device where micro-batches add up (then only the last one
communicates), else whole parameters; if the chunks take more than ``SHARE_FOR_CHUNKS`` of the free device memory so,
everything is divided. The same on every rank: it is decided from the least free memory.
"""

from __future__ import annotations

from collections.abc import Callable

from protrain_compile.chunks import Chunk, ChunkLayout
from protrain_compile.planner import DEFAULT_BUFFERS, SHARE_FOR_CHUNKS
from protrain_compile.shards import Sharding


def device_bytes(chunk: Chunk, state_bytes: int, sharding: Sharding, ranks: int) -> int:
    """Return the device bytes of a persistent chunk on one of ``ranks``, without chunk buffers.

    Args:
        chunk: The whole chunk.
        state_bytes: Of its states and its gradient.
        sharding: What of it is divided.
        ranks: Among how many.
    """
    gradient = chunk.size_bytes if chunk.trainable else 0
    divided = state_bytes // ranks
    if sharding == "parameters":
        return divided + chunk.size_bytes // ranks
    return divided + chunk.size_bytes + (gradient if sharding == "states" else 0)


def choose_sharding(
    layout: ChunkLayout, ranks: int, free_bytes: int | None, state_bytes: Callable[[Chunk], int], *, accumulates: bool
) -> Sharding:
    """Return what of every persistent chunk to divide (see the module docstring).

    Args:
        layout: The whole chunks.
        ranks: How many ranks share them.
        free_bytes: Free device memory; None if nothing bounds it.
        state_bytes: Bytes of a chunk's states and gradient.
        accumulates: Whether several micro-batches make a step.
    """
    wishes: list[Sharding] = ["states", "gradients"] if accumulates else ["gradients"]
    for wish in wishes:
        needed = sum(device_bytes(chunk, state_bytes(chunk), wish, ranks) for chunk in layout.chunks)
        needed += DEFAULT_BUFFERS * layout.largest_bytes
        if free_bytes is None or needed <= free_bytes * SHARE_FOR_CHUNKS:
            return wish
    return "parameters"
