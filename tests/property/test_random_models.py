"""Random small models under random plans and loops equal eager, and what is alive is what liveness says.

Every example compiles a model, so there are few of them, the same in every run; ``--examples 500`` runs so many (see
``support.volume``).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any, Literal

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from support.memory import measured_live_bytes
from support.volume import Volume, example_of
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.liveness import schedule_liveness
from protrain_compile.plan import POLICIES

EXAMPLES = 6
VOCABULARY = 24
Event = Literal["train", "two_forwards", "eval", "abandon"]
EVENTS: tuple[Event, ...] = ("train", "two_forwards", "eval", "abandon")


@dataclasses.dataclass(frozen=True)
class Case:
    """One random model and what is done with it.

    Attributes:
        depth: Number of blocks.
        width: Width of the stream.
        tied: Whether the head is the embedding.
        frozen: Blocks whose parameters do not train.
        half: Whether the blocks compute in bf16 beside an fp32 head.
        bridge: After which block another module runs; -1 for none.
        attention: Whether blocks attend.
        policies: One policy per block.
        events: What the loop does.
    """

    depth: int
    width: int
    tied: bool
    frozen: frozenset[int]
    half: bool
    bridge: int
    attention: bool
    policies: tuple[Any, ...]
    events: tuple[Event, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    depth = draw(st.integers(2, 4))
    return Case(
        depth=depth,
        width=draw(st.sampled_from((8, 12, 20))),
        tied=draw(st.booleans()),
        frozen=draw(st.frozensets(st.integers(0, depth - 1), max_size=2)),
        half=draw(st.booleans()),
        bridge=draw(st.integers(-1, depth - 2)),
        attention=draw(st.booleans()),
        policies=tuple(draw(st.lists(st.sampled_from(POLICIES), min_size=depth, max_size=depth))),
        events=tuple(draw(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3))),
    )


class Block(nn.Module):
    def __init__(self, width: int, attention: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width) if attention else None
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.qkv is not None:
            query, key, value = self.qkv(x).chunk(3, dim=-1)
            x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, case.width)
        self.blocks = nn.ModuleList(Block(case.width, case.attention) for _ in range(case.depth))
        self.bridge = nn.Linear(case.width, case.width)
        self.bridge_after = case.bridge
        self.head = nn.Linear(case.width, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        for index in case.frozen:
            self.blocks[index].requires_grad_(False)
        self.dtype = torch.bfloat16 if case.half else torch.float32
        self.blocks.to(self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).to(self.dtype)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.bridge_after:
                x = self.bridge(x.float()).to(self.dtype)
        return F.cross_entropy(self.head(x.float()).flatten(0, 1), tokens.flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(seed))


def run(model: Any, owner: nn.Module, events: tuple[Event, ...]) -> list[Any]:
    """Run the loop; return every loss, and every gradient after each event."""
    found: list[Any] = []
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
    for number, event in enumerate(events):
        losses = [model(batch(number))]
        if event == "two_forwards":
            losses.append(model(batch(number + 10)))
        if event == "eval":
            with torch.no_grad():
                found.append(model(batch(number + 20)))
        if event == "abandon":
            model(batch(number + 30))
        for loss in reversed(losses):
            loss.backward()
        found += [loss.detach() for loss in losses]
        found += [p.grad.clone() if p.grad is not None else None for p in owner.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_random_model_equals_eager(volume: Volume) -> None:
    volume.run(EXAMPLES, lambda number: check(example_of(cases(), number)))


def check(case: Case) -> None:
    """Compare a case with eager; what is alive in its schedules is what liveness says."""
    torch.manual_seed(0)
    model = Model(case)
    expected = run(*[copy.deepcopy(model)] * 2, case.events)
    torch._dynamo.reset()
    options = {"compile": "eager", "schedule": "off", "plan": Plan(policies=case.policies)}
    compiled = torch.compile(model, backend="protrain", options=options)
    actual = run(compiled, model, case.events)
    assert [t is None for t in actual] == [t is None for t in expected]
    for found, wanted in zip(actual, expected, strict=True):
        if wanted is not None:
            assert_close(found, wanted, 5e-2 if case.half else 1e-4)
    schedule = protrain_compile.schedule(model)
    gc.collect()
    assert all(len(part.graph.contexts) == 0 for part in schedule.parts)
    check_liveness(schedule)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare by norm: in bf16 a single number may be off by more than the whole."""
    assert actual.dtype == expected.dtype
    difference = (actual.float() - expected.float()).norm()
    assert difference <= tolerance * expected.float().norm() + 1e-6, f"{actual} against {expected}"


def check_liveness(schedule: protrain_compile.ModelSchedule) -> None:
    for part in schedule.parts:
        predicted, measured = schedule_liveness(part.schedule), measured_live_bytes(part.schedule)
        for name, live in measured.items():
            alive = predicted[name]
            assert [each - alive.held_bytes for each in alive.live_bytes.values()] == live
