"""What the ranks' collectives take, measured once by all of them together, for the search."""

from __future__ import annotations

import time
from typing import get_args

import torch

from protrain_compile.profile import CollectiveCost, CollectiveKind
from protrain_compile.runtime.ranks import Ranks

SIZES_BYTES = (4 << 20, 64 << 20)
"""Two sizes give a line: latency counts in the first, bytes in the second. Both are little beside a large model."""

REPEATS = 3


def measure_collectives(ranks: Ranks) -> tuple[CollectiveCost, ...]:
    """Return the cost of every kind of collective that the ranks run; a collective call."""
    found = []
    for size in SIZES_BYTES:
        flat = torch.zeros(size // 4 // ranks.size * ranks.size, device=ranks.device)
        for kind in get_args(CollectiveKind):
            count = ranks.world.replicas if kind == "all_reduce" else ranks.size
            if count > 1:
                whole = ranks.shard(flat).nbytes if kind == "all_reduce" else flat.nbytes
                found.append(CollectiveCost(kind, whole, count, _measure_ms(ranks, kind, flat)))
    return tuple(found)


def _measure_ms(ranks: Ranks, kind: CollectiveKind, flat: torch.Tensor) -> float:
    ranks.run(kind, flat)  # the first call connects the ranks
    _finish(ranks.device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        ranks.run(kind, flat)
    _finish(ranks.device)
    return max(1e-6, (time.perf_counter() - begin) / REPEATS * 1e3)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
