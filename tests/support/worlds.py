"""Runs checks in a world of several processes (ranks) on this machine, many checks to a world: starting one costs
seconds.

A check is a function ``check() -> result`` of a module under ``support``; every rank calls it. Its results come back
picklable, or the traceback of what it raised.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 240
"""How long a rank waits for another in a collective."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank's check came to: its result, or the traceback of what it raised."""

    result: Any = None
    error: str | None = None


def run_world(
    size: int,
    module: str,
    checks: Sequence[str],
    *,
    timeout_s: float = 560,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    backend: str = "gloo",
) -> dict[str, list[Outcome]]:
    """Run ``checks`` of ``support.<module>`` one after the other on ``size`` ranks; return every rank's outcomes.

    A rank that ended without a word leaves outcomes that say so.
    """
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[Outcome]] = {name: [Outcome(error="no word")] * size for name in checks}
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        arguments = (size, f"file://{folder}/meet", module, tuple(checks), group_timeout_s, backend, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        missing = size * len(checks)
        while missing and time.monotonic() < deadline:
            try:
                name, rank, outcome = results.get(timeout=0.5)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    break
                continue
            found[name][rank] = outcome
            missing -= 1
        for process in processes:
            process.join(10)
            process.kill()
    return found


def _rank(
    rank: int,
    size: int,
    place: str,
    module: str,
    checks: Sequence[str],
    group_timeout_s: float,
    backend: str,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=group_timeout_s)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=size, timeout=timeout)
    found = importlib.import_module(f"support.{module}")
    for name in checks:
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            outcome = Outcome(getattr(found, name)())
        except BaseException:
            outcome = Outcome(error=traceback.format_exc())
        results.put((name, rank, outcome))
    results.close()
    results.join_thread()
    dist.destroy_process_group()
