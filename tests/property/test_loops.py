"""Random prepared models under random plans, loops, faults and interleavings equal eager and leak nothing.

Every example compiles a model, so there are few of them, the same in every run; ``--examples 500`` runs so many (see
``support.volume``). The schedules' verifier runs in each: it follows every pass.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import warnings
import weakref
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from support.device import install
from support.prepared import Trainee, adamw, assert_close, assert_same_values, eager, prepared
from support.threaded import ThreadedDevice
from support.volume import Volume, example_of
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.errors import BudgetError
from protrain_compile.plan import POLICIES
from protrain_compile.residency import ChunkResidency

EXAMPLES = 14
VOCABULARY = 23
Event = Literal["step", "window", "eval", "abandon", "two_forwards", "broken"]
EVENTS: tuple[Event, ...] = ("step", "window", "eval", "abandon", "two_forwards", "broken")
BREAKABLE = ("wait", "release", "collect", "offload", "update", "prefetch")


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model, how it is prepared, and what is done with it.

    Attributes:
        depth: Number of blocks.
        width: Width of the stream; odd ones leave gaps in chunks.
        tied: Whether the head is the embedding.
        frozen: Blocks whose parameters do not train.
        half: Whether every block has a frozen bf16 parameter beside its fp32 ones.
        policies: One policy for each block.
        residency: Of all chunks; None lets the budget decide.
        slack: The budget, where it decides, over the smallest that works.
        chunk_bytes: Capacity of a chunk.
        buffers: How many chunk buffers; None for the planner's choice.
        window: The declared micro-batches.
        norm: The declared clipping.
        events: What the loop does.
        broken: For every event, which operation raises and in which of its calls.
        seed: The interleaving; None for the plain CPU.
    """

    depth: int
    width: int
    tied: bool
    frozen: frozenset[int]
    half: bool
    policies: tuple[Any, ...]
    residency: Any
    slack: float
    chunk_bytes: int
    buffers: int | None
    window: int
    norm: float | None
    events: tuple[Event, ...]
    broken: tuple[tuple[str, int], ...]
    seed: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    depth = draw(st.integers(2, 4))
    events = tuple(draw(st.lists(st.sampled_from(EVENTS), min_size=2, max_size=5)))
    faults = st.tuples(st.sampled_from(BREAKABLE), st.integers(0, 5))
    return Case(
        depth=depth,
        width=draw(st.sampled_from((7, 8, 12))),
        tied=draw(st.booleans()),
        frozen=draw(st.frozensets(st.integers(0, depth - 1), max_size=depth - 1)),
        half=draw(st.booleans()),
        policies=tuple(draw(st.lists(st.sampled_from(POLICIES), min_size=depth, max_size=depth))),
        residency=draw(st.sampled_from(("persistent", "offloaded", "split", None))),
        slack=draw(st.sampled_from((1.0, 1.2, 1.5))),
        chunk_bytes=draw(st.sampled_from((700, 2_000, 6_000))),
        buffers=draw(st.sampled_from((None, 6, 9))),
        window=draw(st.integers(1, 3)),
        norm=draw(st.sampled_from((None, None, 0.2, math.inf))),
        events=("step", "step", *events, "step"),
        broken=tuple(draw(st.lists(faults, min_size=8, max_size=8))),
        seed=draw(st.none() | st.integers(0, 1000)),
    )


class Block(nn.Module):
    def __init__(self, width: int, half: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        shift = nn.Parameter(torch.randn(width).bfloat16(), requires_grad=False)
        self.register_parameter("shift", shift if half else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is not None:
            x = x + self.shift.float()
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, case.width)
        self.blocks = nn.ModuleList(Block(case.width, case.half) for _ in range(case.depth))
        self.head = nn.Linear(case.width, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        for index in case.frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(seed))


def optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model)


@dataclasses.dataclass
class Pair:
    """A prepared model and its eager twin, which do the same."""

    case: Case
    plain: Trainee
    trainee: Trainee

    def run(self) -> None:
        """Run every event on both; compare losses after each and values at the end."""
        for number, event in enumerate(self.case.events):
            if event == "broken":
                self._break(number)
            else:
                losses = [self._run(each, event, 10 * number) for each in (self.plain, self.trainee)]
                assert_close(f"loss of {event} {number}", losses[1], losses[0])
        assert_same_values(self.trainee.model, self.plain.model)

    def _run(self, one: Trainee, event: Event, seed: int) -> Tensor:
        if event == "eval":
            with torch.no_grad():
                return one.forward(seed)
        if event == "abandon":
            return one.forward(seed).detach()
        if event == "two_forwards":
            loss = one.forward(seed) + one.forward(seed + 1)
            loss.backward()
        else:
            for part in range(self.case.window if event == "window" else 1):
                loss = one.forward(seed + part)
                loss.backward()
        self._step(one)
        return loss.detach()

    def _step(self, one: Trainee) -> None:
        if one is self.plain and self.case.norm is not None:
            nn.utils.clip_grad_norm_(one.model.parameters(), self.case.norm)
        one.update()

    def _break(self, number: int) -> None:
        """Let an operation raise in a step; then put both models at one place again."""
        name, at = self.case.broken[number]
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            patch.setattr(ChunkResidency, name, _failing(getattr(ChunkResidency, name), at))
            try:
                self.trainee.backward(number)
            except OnPurposeError:
                pass
            else:
                self.trainee.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.trainee.optimizer.zero_grad()
            with torch.no_grad():
                self.trainee.forward(0)
        self.trainee.model.load_state_dict(self.plain.model.state_dict())
        self.trainee.optimizer.load_state_dict(self.plain.optimizer.state_dict())


class OnPurposeError(Exception):
    pass


def _failing(original: Any, at: int) -> Any:
    calls = iter(range(1_000))

    def call(*arguments: Any) -> Any:
        if next(calls) == at:
            raise OnPurposeError
        return original(*arguments)

    return call


def files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture(scope="module")
def device() -> ThreadedDevice:
    return ThreadedDevice()


def test_equals_eager_and_leaks_nothing(device: ThreadedDevice, volume: Volume) -> None:
    volume.run(EXAMPLES, lambda number: check(example_of(cases(), number), device))


def check(case: Case, device: ThreadedDevice) -> None:
    """Run a case; nothing of it is left afterwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()
    threads, open_files = set(threading.enumerate()), files()
    with pytest.MonkeyPatch.context() as patch:
        if case.seed is not None:
            install(device, patch)
            device.reseed(case.seed)
        held = _train(case)
        device.synchronize()
    assert [ref() for ref in held] == [None] * len(held), "something keeps a dropped model"
    assert {each.name for each in set(threading.enumerate()) - threads} <= {"tqdm_monitor"}
    assert files() <= open_files


def _train(case: Case) -> list[weakref.ref[Any]]:
    """Run the case; return references to what must be gone afterwards."""
    plan = Plan(
        policies=case.policies,
        uniform_residency=case.residency,
        chunk_bytes=case.chunk_bytes,
        buffers=case.buffers,
    )
    arguments: dict[str, Any] = {"gradient_accumulation_steps": case.window, "max_grad_norm": case.norm}
    model = Model(case)
    if case.residency is None:
        arguments["memory_budget"] = int(_needed_bytes(model, plan, arguments) * case.slack)
    plain = eager(model, optimizers, batch)
    trainee = prepared(model, plan, optimizers, batch, **arguments)
    Pair(case, plain, trainee).run()
    for part in protrain_compile.schedule(trainee.called).parts:
        assert len(part.graph.contexts) == 0, "a context outlives its forward"
    residency = trainee.managed.packed
    held = [trainee.managed, residency, residency.worker, residency.store, *residency._buffers.values()]
    return [weakref.ref(each) for each in held]


def _needed_bytes(model: nn.Module, plan: Plan, arguments: dict[str, Any]) -> int:
    """Return the smallest budget that a plan says it works with."""
    refused = prepared(model, plan, optimizers, batch, **arguments, memory_budget=1)
    try:
        refused.forward(0)
    except BudgetError as error:
        return int(error.needed_bytes or 0)
    raise AssertionError("one byte is enough")
