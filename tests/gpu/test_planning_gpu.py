"""Cases 13 and 14 on a device: budgets are kept by what is measured, and predicted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.models import Llama
from torch import Tensor, nn

import protrain_compile
from protrain_compile.backend import protrain
from protrain_compile.errors import BudgetError

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS, ROWS, LENGTH = 2048, 6, 8, 128


def batch() -> Tensor:
    return torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Llama(BLOCKS, width=WIDTH, heads=16, kv_heads=8).to(torch.bfloat16)


def free() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def train(found: Any, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = found(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    torch.cuda.synchronize()
    return losses


def eager_peak() -> int:
    free()
    own = model().cuda()
    train(own, torch.optim.AdamW(own.parameters()))
    return torch.cuda.max_memory_allocated()


def planned(budget: int | None) -> tuple[int, int, tuple[str, ...]]:
    """Train under a budget; return the predicted and the measured peak of two later steps, and where chunks live.

    What others hold, such as the workspaces of libraries, is part of both.
    """
    free()
    own = model()
    _, optimizer = protrain_compile.prepare(
        own, torch.optim.AdamW(own.parameters()), memory_budget=budget, device="cuda"
    )
    compiled: Any = torch.compile(own, backend=lambda gm, inputs: protrain(gm, inputs, options={"schedule": "off"}))
    train(compiled, optimizer)
    torch.cuda.reset_peak_memory_stats()
    train(compiled, optimizer, 2)
    part = protrain_compile.schedule(compiled).parts[0]
    found = part.graph.planned(part.schedule)
    assert found is not None
    assert found.prediction is not None
    assert part.schedule.chunks is not None
    predicted = found.prediction.peak_bytes + found.budget.other_bytes
    return predicted, torch.cuda.max_memory_allocated(), part.schedule.chunks.residency


def test_budgets_are_kept() -> None:
    """Case 13: no out-of-memory, the peak within the budget and about what was predicted."""
    whole = eager_peak()
    for share in (1.0, 0.75, 0.5, 0.35):
        budget = int(share * whole)
        try:
            predicted, peak, _ = planned(budget)
        except BudgetError as error:
            budget = error.needed_bytes
            predicted, peak, _ = planned(budget)
        assert peak <= budget
        assert predicted == pytest.approx(peak, rel=0.03)  # what the reserve covers


def test_a_cap_of_the_process_is_a_budget() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    cap = int(0.6 * eager_peak())
    free()
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        _, peak, _ = planned(None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert peak <= cap


def test_what_fits_is_resident() -> None:
    """Case 14."""
    _, _, residency = planned(None)
    assert set(residency) == {"persistent"}
