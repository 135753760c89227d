"""The same training loop on a prepared, compiled model and in eager, and what must come out equal."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.compare import compile_model
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.managed import ManagedModel

EPS = 1e-4
"""Of Adam: with the default, a parameter whose true gradient is zero (a key bias) amplifies rounding."""
RTOL = 1e-5
"""fp32 against eager over a few steps, of a tensor's norm: sums in another order differ by units in the last place."""
RESIDENCIES = ("persistent", "offloaded", "split", "mixed")
POLICIES = ("keep", "recompute")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """The smallest model with blocks: a stem, three residual blocks, a head; five chunks of ``CHUNK_BYTES``."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


CHUNK_BYTES, CHUNKS = 2_000, 5
"""A block of a Stack in fp32 takes 1,792 bytes with padding: every block, the stem and the head have a chunk each."""

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def forced(residency: str = "offloaded", policy: str = "keep", *, chunks: int = CHUNKS, **fields: Any) -> Plan:
    """Return a Plan with small chunks; ``mixed`` takes turns and needs to know how many ``chunks`` there are."""
    fields.setdefault("chunk_bytes", CHUNK_BYTES)
    if residency != "mixed":
        return dataclasses.replace(Plan.uniform(policy, residency), **fields)
    turns = ("offloaded", "persistent", "split")
    return dataclasses.replace(Plan.uniform(policy), residency=tuple(turns[i % 3] for i in range(chunks)), **fields)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "eps": EPS, **options})


def batch(seed: int = 0, rows: int = 5) -> Tensor:
    """Return an input of a Stack."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Trainee:
    """A model, what to call it through, and its optimizer."""

    model: nn.Module
    called: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    data: Callable[[int], Any] = batch

    def forward(self, seed: int = 0) -> Tensor:
        """Return the loss."""
        return self.called(self.data(seed))

    def backward(self, seed: int = 0) -> Tensor:
        """Run one forward and backward; return the loss."""
        loss = self.forward(seed)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """End a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed: int = 0) -> Tensor:
        """Run one training step; return the loss."""
        loss = self.backward(seed)
        self.update()
        return loss

    def steps(self, *seeds: int) -> Tensor:
        """Run one training step for each seed; return the losses."""
        return torch.stack([self.step(seed) for seed in seeds])

    @property
    def managed(self) -> ManagedModel:
        """Of a prepared model."""
        return self.optimizer._managed


def eager(model: nn.Module, optimizers: Optimizers = adamw, data: Callable[[int], Any] = batch) -> Trainee:
    """Return a copy of ``model`` that trains in eager."""
    own = copy.deepcopy(model)
    return Trainee(own, own, optimizers(own), data)


def prepared(
    model: nn.Module,
    plan: Plan | str = "offloaded",
    optimizers: Optimizers = adamw,
    data: Callable[[int], Any] = batch,
    *,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainee:
    """Return a copy of ``model``, prepared with ``arguments`` and compiled with ``options``."""
    own = copy.deepcopy(model)
    plan = forced(plan) if isinstance(plan, str) else plan
    own, optimizer = protrain_compile.prepare(own, optimizers(own), plan=plan, **arguments)
    return Trainee(own, compile_model(own, **(options or {})), optimizer, data)


def warmed(trainee: Trainee, steps: int = 2) -> Trainee:
    """Run the first steps: from the second on, updates run in the backward."""
    trainee.steps(*range(100, 100 + steps))
    return trainee


def assert_same_values(actual: nn.Module, expected: nn.Module, rtol: float = RTOL) -> None:
    """Compare parameters and buffers."""
    found, wanted = actual.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert_close(name, found[name], value, rtol)


def assert_close(name: str, actual: Tensor, expected: Tensor, rtol: float = RTOL) -> None:
    """Compare two tensors by the norm of their difference; a failure names the value."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} against {expected.dtype}"
    error = float(torch.linalg.vector_norm((actual - expected).double()))
    size = float(torch.linalg.vector_norm(expected.double()))
    assert math.isfinite(error), f"{name}: {actual}"
    assert error <= rtol * size, f"{name}: relative difference {error / (size or 1.0):.2e}, allowed {rtol:.0e}"


def check(
    loop: Callable[[Trainee], Any],
    plan: Plan | str = "offloaded",
    model: nn.Module | None = None,
    optimizers: Optimizers = adamw,
    data: Callable[[int], Any] = batch,
    *,
    rtol: float = RTOL,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainee:
    """Run ``loop`` on a prepared model and in eager; compare what it returns, and all values; return the first."""
    model = Stack() if model is None else model
    plain = eager(model, optimizers, data)
    trainee = prepared(model, plan, optimizers, data, options=options, **arguments)
    torch.manual_seed(1)
    expected = loop(plain)
    torch.manual_seed(1)
    found = loop(trainee)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert_close("what the loop returned", found, expected, rtol)
    assert_same_values(trainee.model, plain.model, rtol)
    return trainee
