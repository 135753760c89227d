"""What is said where no plan fits: the smallest budget that would do, what dominates it, and what to change."""

from __future__ import annotations

import math

from protrain_compile.byte_text import format_needed, format_size
from protrain_compile.cost_model import simulate
from protrain_compile.errors import BudgetError, PlanError
from protrain_compile.plan_rows import Group, PlanRows
from protrain_compile.plan_space import PlanSpace


def budget_error(
    space: PlanSpace, rows: PlanRows, device_bytes: int | None, host_bytes: int | None
) -> BudgetError | PlanError:
    """Return the error for budgets in which no plan of ``space``, whose ``rows`` these are, fits."""
    needs = _needs(rows)
    if not needs:
        return PlanError("plan: buffers are too few for the chunks that one call uses; give more")
    in_host = [each for each in needs if host_bytes is None or each[1] <= host_bytes]
    on_device = [each for each in needs if device_bytes is None or each[0] <= device_bytes]
    name = space.shape.name
    if on_device and host_bytes is not None:
        needed = min(each[1] for each in on_device)
        other = f", or memory_budget to {format_needed(min(each[0] for each in in_host))}" if in_host else ""
        return BudgetError(
            f"host_memory_budget: {format_size(host_bytes)} is too small for what {name} has to keep on the host "
            f"(parameters and optimizer states that the device has no room for): raise it to {format_needed(needed)}"
            f"{other}; or let other programs leave more host memory free",
            needed,
            "host_memory_budget",
        )
    assert device_bytes is not None
    peak, on_host, group = min(in_host or needs, key=lambda each: each[:2])
    prediction = simulate(space.shape, space.profile, space.plan(group.choice(group.counts[0])))
    largest = sorted(prediction.device_bytes.items(), key=lambda each: -each[1])[:2]
    parts = " and ".join(f"{kind} ({format_size(size)})" for kind, size in largest)
    too = "" if in_host else f". It takes {format_needed(on_host)} on the host, too: raise host_memory_budget to that"
    return BudgetError(
        f"memory_budget: {format_size(device_bytes)} is too small to train {name} at this batch; the smallest that "
        f"works is {format_needed(peak)}, mostly {parts}, at its peak in the {prediction.peak_at}: "
        f"{_advice(largest[0][0], prepared=bool(space.shape.chunks))}{too}",
        peak,
    )


def _needs(rows: PlanRows) -> list[tuple[int, int, Group]]:
    """Return device bytes and host bytes of every group's smallest plan."""
    groups = [group for pattern in rows.patterns for group in rows.groups(pattern, math.inf, math.inf)]
    return [(each.peak_bytes(each.counts[0]), each.row.host + each.pattern.host, each) for each in groups]


ADVICE = {
    "activations": "use a smaller batch or shorter sequences, with gradient accumulation to make up for it",
    "inside calls": "use a smaller batch or shorter sequences: one block, or the loss, needs this much at once",
    "inputs": "use a smaller batch",
    "chunk buffers": "give a smaller chunk_bytes in the plan",
}


UNPREPARED = "prepare the model: its parameters and the optimizer's states need not be on the device then"
"""Advice where parameters are what takes most of a model that is not prepared."""


def _advice(kind: str, *, prepared: bool) -> str:
    others = "let the plan keep fewer chunks on the device, or use a larger one" if prepared else UNPREPARED
    return ADVICE.get(kind, others)
