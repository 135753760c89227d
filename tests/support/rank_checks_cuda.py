"""Checks on CUDA devices that every rank of a world runs (see ``worlds``); the rank's device is the current one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from support.prepared import Stack, adamw, assert_close, assert_same_values, batch
from support.rank_checks import KINDS, ROWS, kinds
from torch import Tensor

import protrain_compile
from protrain_compile import Plan
from protrain_compile.backend import protrain as backend

RTOL = 1e-4
"""fp32 on the device against fp32 on the device, sums in another order."""


def device() -> torch.device:
    """Return this rank's device, and make it the current one: ranks share devices if there are fewer."""
    number = dist.get_rank() % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def cuda_equals_one_rank() -> None:
    """Under every residency and sharding: losses and weights after four steps."""
    for plan in kinds():
        _compare(plan, windows=[(seed,) for seed in range(4)])


def cuda_micro_batches_equal_one_rank() -> None:
    for plan in kinds()[: len(KINDS) // 2]:
        _compare(plan, windows=[(0, 1, 2), (3, 4, 5)], gradient_accumulation_steps=3, max_grad_norm=1.0)


def _compare(plan: Plan, windows: list[tuple[int, ...]], **arguments: Any) -> None:
    here = device()
    plain = Stack().to(here)
    model = copy.deepcopy(plain)
    eager, optimizer = adamw(plain), adamw(model)
    model, optimizer = protrain_compile.prepare(model, optimizer, plan=plan, device=here, **arguments)
    compiled = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
    for window in windows:
        for seed in window:
            loss, expected = compiled(_part(seed, here)), plain(_whole(seed, here))
            loss.backward()
            expected.backward()
            losses = [torch.zeros(())] * dist.get_world_size()
            dist.all_gather_object(losses, loss.detach().cpu())
            assert_close("loss", torch.stack(losses).mean(), expected.detach().cpu(), RTOL)
        if "max_grad_norm" in arguments:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), arguments["max_grad_norm"])
        for each in (optimizer, eager):
            each.step()
            each.zero_grad()
    assert_same_values(model, plain.cpu(), RTOL)
    optimizer._managed.close()  # before the next model takes its memory


def _part(seed: int, where: torch.device) -> Tensor:
    return batch(seed * 100 + dist.get_rank(), ROWS).to(where)


def _whole(seed: int, where: torch.device) -> Tensor:
    return torch.cat([batch(seed * 100 + rank, ROWS) for rank in range(dist.get_world_size())]).to(where)
