"""The default sharding: the least communication that fits."""

from __future__ import annotations

import torch

from passes.pack_chunks import pack_chunks
from protrain_compile.chunks import Chunk, ChunkLayout, ParameterSpec
from protrain_compile.planner import DEFAULT_BUFFERS
from protrain_compile.sharding_rule import choose_sharding, device_bytes

CHUNKS, RANKS = 8, 4


def layout() -> ChunkLayout:
    """Return chunks of 1,024 bytes."""
    specs = [ParameterSpec(f"p{i}", (256,), torch.float32, True) for i in range(CHUNKS)]
    return pack_chunks(specs, [[i] for i in range(CHUNKS)], 1024, RANKS)


def states(chunk: Chunk) -> int:
    return 3 * chunk.size_bytes  # two moments and a gradient


def test_bytes_of_a_chunk() -> None:
    chunk = layout().chunks[0]
    assert [device_bytes(chunk, 3072, kind, 4) for kind in ("states", "gradients", "parameters")] == [
        1024 + 1024 + 768,
        1024 + 768,
        256 + 768,
    ]


def test_the_least_communication_that_fits() -> None:
    buffers = DEFAULT_BUFFERS * 1024
    room = {  # twice what is needed: half of the free memory is for chunks
        "states": 2 * (CHUNKS * 2816 + buffers),
        "gradients": 2 * (CHUNKS * 1792 + buffers),
        "parameters": 1024,
    }
    for wish, free in room.items():
        assert choose_sharding(layout(), RANKS, free, states, accumulates=True) == wish
    assert choose_sharding(layout(), RANKS, room["states"] - 1, states, accumulates=True) == "gradients"
    assert choose_sharding(layout(), RANKS, room["gradients"] - 1, states, accumulates=True) == "parameters"


def test_whole_gradients_serve_micro_batches_only() -> None:
    assert choose_sharding(layout(), RANKS, None, states, accumulates=False) == "gradients"
    assert choose_sharding(layout(), RANKS, None, states, accumulates=True) == "states"
