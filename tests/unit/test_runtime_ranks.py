"""Ranks alone in their world, what their messages say; worlds of several are in ``cases/test_ranks.py``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import protrain_compile
from protrain_compile import Plan, compat
from protrain_compile.errors import BudgetError, OptionError, RankError
from protrain_compile.planner import Budgets
from protrain_compile.runtime.agreement import Agreement
from protrain_compile.runtime.ranks import Ranks, Traffic, _backend_of, _difference
from protrain_compile.shards import ALONE

CPU = torch.device("cpu")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    timeout = datetime.timedelta(seconds=77)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_one_rank_gathers_and_reduces_in_place() -> None:
    ranks = Ranks(CPU)
    flat = torch.arange(8.0)
    ranks.all_gather(flat, "chunk 0")
    ranks.reduce_scatter(flat, "chunk 0")
    assert torch.equal(ranks.shard(flat), torch.arange(8.0))
    assert ranks.traffic == Traffic(0, 0, gathers=1, reduces=1)
    assert (ranks.total(2.5, "norm"), ranks.least(None, "free"), ranks.least(3, "free")) == (2.5, None, 3)
    assert ranks.exchange("plan", "the plan") == ["plan"]
    ranks.agree(["a", "b"], "lines")


@pytest.mark.usefixtures("world")
def test_the_smallest_budgets_of_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(CPU)
    assert ranks.world == ALONE
    agreement = Agreement(ranks)
    assert agreement.budgets(Budgets(7, None)) == Budgets(7, None)
    monkeypatch.setattr(ranks, "exchange", lambda *_: ["[7, null]", "[null, 3]", "[5, 9]"])
    assert agreement.budgets(Budgets(7, None)) == Budgets(5, 3)


@pytest.mark.usefixtures("world")
def test_a_graph_is_new_until_its_plan_is_agreed() -> None:
    agreement = Agreement(Ranks(CPU))
    assert agreement.is_new("graph")
    assert agreement.plan(Plan.uniform("recompute"), "graph", 7) == Plan.uniform("recompute")
    assert not agreement.is_new("graph")
    assert agreement.plan(Plan.uniform("keep"), "graph", 9) == Plan.uniform("recompute")
    assert not Agreement(None).is_new("graph")


@pytest.mark.usefixtures("world")
def test_the_largest_step_decides_as_far_as_its_plan_fits_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(CPU)
    plans = [Plan.uniform("keep"), Plan.uniform("recompute"), Plan.uniform("swap")]
    steps = [json.dumps([values, plan.to_json()]) for values, plan in zip((5, 9, 9), plans, strict=True)]
    lacks: dict[Plan, list[int]] = dict(zip(plans, ([0, 80], [0, 0], [70, 0]), strict=True))
    asked: list[Plan] = []

    def exchange(text: str, _: str) -> list[str]:
        return steps if "policy" in text else list(map(str, lacks[asked[-1]]))

    def own_lack(plan: Plan) -> int:
        asked.append(plan)
        return lacks[plan][0]

    monkeypatch.setattr(ranks, "exchange", exchange)
    assert Agreement(ranks).plan(plans[0], "graph", 5, own_lack) == plans[1]
    lacks[plans[1]] = [0, 90]
    lacks[plans[2]] = [0, 0]
    assert Agreement(ranks).plan(plans[0], "graph", 5, own_lack) == plans[2]
    lacks[plans[2]] = [70, 0]
    with pytest.raises(BudgetError, match=r"no rank's plan fits all; it must be at least 70 B") as caught:
        Agreement(ranks).plan(plans[0], "graph", 5, own_lack)
    assert caught.value.needed_bytes == 70


@pytest.mark.usefixtures("world")
def test_a_failure_names_rank_and_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(CPU)

    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(compat, "all_gather_into", fail)
    with pytest.raises(RankError, match=r"rank 0 of 1 waited in vain in all_gather of chunk 3: .*closed by peer"):
        ranks.all_gather(torch.zeros(2), "chunk 3")


@pytest.mark.usefixtures("world")
def test_the_agreement_waits_as_long_as_the_group() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert compat.group_timeout(group, CPU) == datetime.timedelta(seconds=77)


@pytest.mark.usefixtures("world")
def test_a_group_without_the_device_is_refused() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert _backend_of(group, CPU) == "gloo"
    with pytest.raises(OptionError, match="no backend for xpu: call init_process_group"):
        _backend_of(group, torch.device("xpu"))


def test_the_first_difference_is_shown() -> None:
    message = _difference("the schedule", 3, ["a", "b", "c"], ["a", "x"])
    assert message.startswith("ranks differ in the schedule: line 2 of rank 0 is 'b', of rank 3 'x'")
    assert "line 3 of rank 0 is 'c', of rank 1 'nothing more'" in _difference("it", 1, ["a", "b", "c"], ["a", "b"])


def test_a_mesh_needs_a_process_group() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"mesh: torch\.distributed is not initialised"):
        protrain_compile.prepare(model, torch.optim.SGD(model.parameters()), mesh=object())  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter


@pytest.mark.usefixtures("world")
def test_a_rank_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(CPU)
    ranks.refuse("no memory", "the plan")
    monkeypatch.setattr(ranks, "_every", lambda *_: [("plan", ""), ("", "no memory")])
    with pytest.raises(RankError, match="rank 1 of 1 cannot go on, so nor can the others: no memory"):
        ranks.exchange("plan", "the plan")
