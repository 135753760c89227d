"""Schedules of prepared models for tests of passes: small, mixed, and made once."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from support.compare import compile_model
from support.prepared import Block
from support.symbolic_runtime import Run, SymbolicRuntime
from torch import fx, nn

import protrain_compile
from passes.tours import Tour, Visit
from protrain_compile import Plan
from protrain_compile.schedule import Schedule

MIXED = ("persistent", "offloaded", "offloaded", "split", "offloaded", "offloaded")


class Blocks(nn.Module):
    """Residual blocks, and perhaps a small head; each has a chunk of at most ``CHUNK_BYTES``.

    Two blocks may share a weight, and one may be frozen.
    """

    def __init__(self, count: int = 6, *, tied: bool = False, frozen: bool = False, head: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(count))
        self.head = nn.Linear(8, 3) if head else nn.Identity()
        if tied:
            self.blocks[-2].up.weight = self.blocks[1].up.weight
        if frozen:
            self.blocks[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


CHUNK_BYTES = 1792
"""What a block of ``Blocks`` takes in fp32, with padding."""


def prepared_model(
    model: nn.Module, residency: Sequence[str] | str, *, buffers: int = 3, policies: Sequence[str] = ()
) -> nn.Module:
    """Return a copy of a model, prepared and compiled, for one residency or the residency of each chunk."""
    chosen: dict[str, Any] = {"policies": tuple(policies)} if policies else {"uniform_policy": "keep"}
    lies: dict[str, Any] = {"uniform_residency": residency} if isinstance(residency, str) else {"residency": residency}
    plan = Plan(buffers=buffers, chunk_bytes=CHUNK_BYTES, **chosen, **lies)
    model = copy.deepcopy(model)
    model, _ = protrain_compile.prepare(model, torch.optim.AdamW(model.parameters()), plan=plan, device="cpu")
    torch._dynamo.reset()
    return compile_model(model)


def prepared_schedule(model: nn.Module, residency: Sequence[str] | str, *, train: bool = True, **plan: Any) -> Schedule:
    """Return the schedule of a small model's first graph; see ``prepared_model``."""
    compiled = prepared_model(model, residency, **plan)
    with torch.set_grad_enabled(train):
        compiled(torch.randn(2, 8))
    return protrain_compile.schedule(compiled).parts[0].schedule


@functools.cache
def mixed_schedule() -> Schedule:
    """Return a schedule of six blocks, half of them recomputed, with chunks of every residency; not to be changed."""
    return prepared_schedule(Blocks(), MIXED, policies=("recompute", "keep") * 3)


@functools.cache
def swapped_schedule() -> Schedule:
    """Return a schedule of six blocks under every policy, with chunks of every residency; not to be changed."""
    return prepared_schedule(Blocks(), MIXED, policies=("swap", "recompute", "keep") * 2)


def changed(schedule: Schedule) -> Schedule:
    """Return a copy of a schedule whose graphs a test may change."""
    return dataclasses.replace(schedule, graphs={name: copy.deepcopy(g) for name, g in schedule.graphs.items()})


def take_tour(runtime: SymbolicRuntime, schedule: Schedule, tour: Tour) -> None:
    """Run a schedule along a tour."""
    others = {
        "step": lambda first: runtime.step(),
        "forward of others": runtime.forward_of_others,
        "backward of others": runtime.backward_of_others,
        "updates of others": lambda first: runtime.updates_of_others(),
    }
    runs: dict[int, Run] = {}
    last = {stop: number for number, stop in enumerate(tour.stops)}
    for number, stop in enumerate(tour.stops):
        if not isinstance(stop, Visit):
            others[stop.kind](stop.first)
        elif stop.graph == "backward":
            runtime.backward(schedule, runs[stop.run], stop.mode, last=stop.last)
            if last[stop] == number:
                runs[stop.run].kept.clear()  # its context dies
        else:
            runs[stop.run] = runtime.forward(schedule, stop.graph)


def names_of(schedule: Schedule, graph: str, *targets: Any) -> list[str]:
    """Return the names of the nodes that call one of ``targets``."""
    return [node.name for node in schedule.graphs[graph].graph.nodes if node.target in targets]


def find(schedule: Schedule, graph: str, name: str) -> fx.Node:
    """Return a node by its name."""
    return next(node for node in schedule.graphs[graph].graph.nodes if node.name == name)
