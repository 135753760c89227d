"""The ranks of a demo that `torchrun` started: each trains on its part of every batch; rank 0 prints."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from protrain_compile.demo.data import Batch
from protrain_compile.errors import OptionError


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the ranks.

    Attributes:
        rank: Its number.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank prints."""
        return self.rank == 0

    def part(self, batch: Batch) -> Batch:
        """Return this rank's windows of a batch, as a data loader with a distributed sampler would."""
        return Batch(*(windows.chunk(self.size)[self.rank] for windows in batch))

    def mean(self, loss: float) -> float:
        """Return the mean of every rank's loss: that of the whole batch."""
        if self.size == 1:
            return loss
        losses: list[float] = [loss] * self.size
        dist.all_gather_object(losses, loss)
        return sum(losses) / self.size


WHOLE = World()
"""One process, which trains on whole batches."""


@contextlib.contextmanager
def joined(batch: int) -> Iterator[World]:
    """Join the process group if `torchrun` started this process; silence every rank but the first.

    Args:
        batch: Windows in a step, which the ranks share.

    Raises:
        OptionError: If the ranks cannot share a batch evenly.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield WHOLE
        return
    if batch % size:
        raise OptionError(f"argument --batch: {size} ranks cannot share {batch} windows; use a multiple of {size}")
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    world = World(dist.get_rank(), size)
    output = contextlib.nullcontext() if world.is_first else contextlib.redirect_stdout(io.StringIO())
    try:
        with output:
            yield world
    finally:
        dist.destroy_process_group()
