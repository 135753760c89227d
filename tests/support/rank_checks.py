"""Checks that every rank of a world runs (see ``worlds``): several ranks against one rank on the joined batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import GPT
from support.prepared import (
    CHUNKS,
    Block,
    Optimizers,
    Stack,
    Trainee,
    adamw,
    assert_close,
    assert_same_values,
    batch,
    eager,
    forced,
    prepared,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import protrain_compile
from protrain_compile import Plan
from protrain_compile.errors import BudgetError
from protrain_compile.report.model_schedule import Part
from protrain_compile.runtime.agreement import Agreement
from protrain_compile.runtime.collective_rates import measure_collectives
from protrain_compile.sharded_residency import ShardedResidency
from protrain_compile.shards import SHARDINGS

KINDS = (
    ("persistent", "states", "keep"),
    ("persistent", "gradients", "recompute"),
    ("persistent", "parameters", "keep"),
    ("offloaded", "parameters", "recompute"),
    ("mixed", "parameters", "keep"),
    ("split", "gradients", "keep"),
)
"""Residency, sharding and policy: every sharding, and every residency, at least once."""
ROWS = 4


def own(seed: int) -> Tensor:
    """Return this rank's part of a batch."""
    return batch(seed * 100 + dist.get_rank(), ROWS)


def joined(seed: int) -> Tensor:
    """Return the whole world's batch."""
    return torch.cat([batch(seed * 100 + rank, ROWS) for rank in range(dist.get_world_size())])


def pair(
    plan: Plan, model: nn.Module | None = None, optimizers: Optimizers = adamw, **arguments: Any
) -> tuple[Trainee, Trainee]:
    """Return a prepared model on this rank's batches, and an eager one on the joined batch."""
    model = Stack() if model is None else model
    return prepared(model, plan, optimizers, own, **arguments), eager(model, optimizers, joined)


def kinds(**fields: Any) -> list[Plan]:
    return [forced(residency, policy, uniform_sharding=sharding, **fields) for residency, sharding, policy in KINDS]


def mean(value: Tensor) -> Tensor:
    """Return the mean over ranks."""
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def residency_of(trainee: Trainee) -> ShardedResidency:
    residency = trainee.managed.packed
    assert isinstance(residency, ShardedResidency)
    return residency


def assert_same_on_all_ranks(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name


# ---- two ranks equal one ---------------------------------------------------------------------------------------------


def gradients_equal_one_rank() -> None:
    """fp32 gradients within 1e-6, and the weights after the steps that use them."""
    for plan in kinds():
        ours, plain = pair(plan, max_grad_norm=math.inf)
        for seed in range(2):
            assert_close("loss", mean(ours.backward(seed)), plain.backward(seed))
            for p, q in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)
            ours.update()
            plain.update()
        assert_same_values(ours.model, plain.model)
        assert_same_on_all_ranks(ours.model)


def updates_in_the_backward_equal_one_rank() -> None:
    for plan in kinds():
        ours, plain = pair(plan)
        losses = [mean(ours.step(seed)) for seed in range(4)]
        assert residency_of(ours).mode == "in_backward"
        assert residency_of(ours).counters.misses == 0
        assert_close("losses", torch.stack(losses), plain.steps(*range(4)))
        assert_same_values(ours.model, plain.model)


def a_hundred_steps_equal_one_rank() -> None:
    ours, plain = pair(forced("mixed", uniform_sharding="parameters"))
    losses = torch.stack([mean(ours.step(seed)) for seed in range(100)])
    assert_close("losses", losses, plain.steps(*range(100)), rtol=1e-4)


def micro_batches_equal_one_rank() -> None:
    """Three to a step, then a window that ``step()`` ends early."""
    for plan in kinds():
        ours, plain = pair(plan, gradient_accumulation_steps=3)
        for seeds in ((0, 1, 2), (3, 4, 5), (6, 7)):
            for seed in seeds:
                ours.backward(seed)
                plain.backward(seed)
            ours.update()
            plain.update()
        assert_same_values(ours.model, plain.model)


def clipping_equals_one_rank() -> None:
    """By ``max_grad_norm``, and by the stock function on gradients that wait."""
    for plan, limit in itertools.product(kinds(), (0.05, math.inf)):
        ours, plain = pair(plan, max_grad_norm=limit)
        for seed in range(3):
            ours.backward(seed)
            plain.backward(seed)
            expected = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
            if limit == math.inf:
                assert_close("norm", nn.utils.clip_grad_norm_(ours.model.parameters(), 0.05), expected)
            ours.update()
            plain.update()
        assert_same_values(ours.model, plain.model)


def mixed_sharding_equals_one_rank() -> None:
    """Of persistent chunks, every one has another part divided; three micro-batches add up."""
    divided = tuple(itertools.islice(itertools.cycle(SHARDINGS), CHUNKS))
    plan = dataclasses.replace(forced("persistent"), sharding=divided)
    ours, plain = pair(plan, gradient_accumulation_steps=3)
    for seed in range(6):
        ours.backward(seed)
        plain.backward(seed)
        if seed % 3 == 2:
            ours.update()
            plain.update()
    assert residency_of(ours).store.division.sharding == divided
    assert_same_values(ours.model, plain.model)


def two_forwards_then_two_backwards_equal_one_rank() -> None:
    """Buffers do not hold what the backward expects: every rank repairs it by the same demand gathers."""
    for plan in kinds():
        ours, plain = pair(plan)
        for trainee in (ours, plain):
            trainee.step(0)
            first, second = trainee.forward(1), trainee.forward(2)
            first.backward()
            second.backward()
            trainee.update()
            with torch.no_grad():
                trainee.forward(3)
            trainee.step(4)
        assert_same_values(ours.model, plain.model)


class Odd(nn.Module):
    """Scalars, a frozen part, a tied weight, one large matrix: shards cut parameters, and some hold only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.frozen = nn.Linear(4, 7), nn.Linear(7, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(3)])
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.scale, self.large = nn.Parameter(torch.tensor(1.5)), nn.Linear(7, 301)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.stem(x)) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.large(x).square().mean()


def uneven_tails_equal_one_rank() -> None:
    def optimizers(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-4)

    for sharding in ("states", "parameters"):
        for residency in ("persistent", "offloaded"):
            plan = forced(residency, uniform_sharding=sharding, chunk_bytes=700)
            ours, plain = pair(plan, Odd(), optimizers)
            ours.steps(0, 1, 2)
            plain.steps(0, 1, 2)
            assert_same_values(ours.model, plain.model)


def hybrid_sharding_equals_one_rank() -> None:
    """Divided in pairs, replicated across pairs: gradients are means over all ranks, pairs hold the same."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    for plan in kinds()[2:4]:
        ours, plain = pair(plan, mesh=mesh, max_grad_norm=0.05)
        for seed in range(3):
            assert_close("loss", mean(ours.backward(seed)), plain.backward(seed))
            nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
            ours.update()
            plain.update()
        ranks = residency_of(ours).ranks
        assert (ranks.world.ranks, ranks.world.replicas, ranks.world.nodes) == (2, 2, 1)
        assert {each.kind for each in measure_collectives(ranks)} == {"all_gather", "reduce_scatter", "all_reduce"}
        assert_same_values(ours.model, plain.model)
        assert_same_on_all_ranks(ours.model)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def traffic_is_that_of_zero() -> None:
    """Bytes received by a rank in a step: ZeRO's formulas over the padded parameters, for each sharding."""
    size = dist.get_world_size()
    for residency, sharding in (
        ("persistent", "states"),
        ("persistent", "gradients"),
        ("persistent", "parameters"),
        ("offloaded", "parameters"),
    ):
        ours, _ = pair(forced(residency, uniform_sharding=sharding, buffers=3))
        ours.steps(0, 1)
        traffic, chunks = residency_of(ours).ranks.traffic, residency_of(ours).layout.chunks
        before = (traffic.gathered_bytes, traffic.reduced_bytes)
        ours.step(2)
        gathered, reduced = traffic.gathered_bytes - before[0], traffic.reduced_bytes - before[1]
        psi = sum(chunk.size_bytes for chunk in chunks) * (size - 1) // size
        assert reduced == psi
        # Stage 3 gathers again in the backward, but not what the forward left in three buffers, nor the first chunk,
        # a linear layer, whose gradient needs no parameters.
        spared = sum(chunks[i].size_bytes for i in (0, -3, -2, -1)) * (size - 1) // size
        assert gathered == (2 * psi - spared if sharding == "parameters" else psi)
        assert (gathered, reduced) == scheduled_bytes(ours)


def scheduled_bytes(trainee: Trainee) -> tuple[int, int]:
    """Return the bytes that a step's schedule gathers and reduces."""
    schedule = protrain_compile.schedule(trainee.called).parts[0].schedule
    moved = {"all_gather": 0, "reduce_scatter": 0}
    for module in schedule.graphs.values():
        for node in module.graph.nodes:
            operation = node.meta.get("operation")
            if operation is not None and operation.op in moved:
                moved[operation.op] += operation.moved_bytes
    return moved["all_gather"], moved["reduce_scatter"]


def micro_batches_communicate_once_where_gradients_are_whole() -> None:
    for sharding, reduces in (("states", 1), ("gradients", 3)):
        ours, _ = pair(forced("persistent", uniform_sharding=sharding), gradient_accumulation_steps=3)
        for seed in range(3):
            ours.backward(seed)
        ours.update()
        traffic = residency_of(ours).ranks.traffic
        before = traffic.reduces
        for seed in range(3):
            ours.backward(seed)
        ours.update()
        assert traffic.reduces - before == reduces * CHUNKS


def collectives_are_measured() -> None:
    """Every kind that the ranks run, at two sizes, which is no traffic of the model; once for all that ask."""
    ranks = prepared(Stack(), forced("persistent"), data=own).optimizer._managed.preparation.ranks
    before = dataclasses.replace(ranks.traffic)
    found = measure_collectives(ranks)
    assert ranks.traffic == before
    kinds = ["all_gather", "reduce_scatter"] + ["all_reduce"] * (ranks.world.replicas > 1)
    assert [each.kind for each in found] == 2 * kinds
    assert all(each.ms > 0 for each in found)
    agreement = Agreement(ranks)
    agreement.measure()
    assert len(agreement.collectives) == len(found)


def host_bytes() -> int:
    """Return this rank's host bytes of an offloaded model."""
    model = Stack(width=64)
    ours, _ = pair(forced("offloaded", chunk_bytes=80_000), model)
    ours.step(0)
    return residency_of(ours).store.spec.host_bytes()


# ---- agreement -------------------------------------------------------------------------------------------------------


def all_ranks_start_from_rank_0() -> None:
    """Parameters and buffers, as with DDP."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with torch.no_grad():
        model[1].running_mean.fill_(dist.get_rank())
    ours = prepared(model, forced("persistent"), data=own)
    assert_same_on_all_ranks(ours.model)
    assert float(ours.model[1].running_mean[0]) == 0


def all_ranks_follow_rank_0s_plan() -> str:
    policies = ("recompute", "keep")
    ours, plain = pair(forced("offloaded", policies[dist.get_rank() % 2]))
    ours.steps(0, 1)
    plain.steps(0, 1)
    assert_same_values(ours.model, plain.model)
    return "".join(protrain_compile.schedule(ours.called).parts[0].schedule.plan.policies or ())


class Turned(Stack):
    """Rank 1 runs the blocks in another order."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in reversed(self.blocks) if dist.get_rank() else self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def other_schedules_are_refused() -> None:
    ours, _ = pair(forced("offloaded"), Turned())
    ours.step(0)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def one_rank_has_no_plan() -> None:
    """Only the last rank's plan is for another model; the others do not wait for it."""
    plan = Plan(policies=("keep",)) if is_last() else Plan()
    ours = prepared(Stack(), plan, data=own, memory_budget="1GiB")
    ours.step(0)


def smallest_budget(model: nn.Module, data: Any, plan: Plan) -> int:
    """Return the smallest budget in which every rank can train, as the refusal of none says."""
    try:
        prepared(model, plan, data=data, memory_budget="1KiB" if is_last() else "1GiB").step(0)
    except BudgetError as error:
        return error.needed_bytes
    raise AssertionError("1 KiB was enough for the last rank")


def searched_plans_equal_one_rank() -> str:
    """The smallest budget of all ranks counts; all follow one searched plan, which needs no more."""
    model, plan = Stack(width=64), Plan(chunk_bytes=80_000)
    budget = smallest_budget(model, own, plan) + 20_000
    ours = prepared(model, plan, data=own, memory_budget=budget if is_last() else "1GiB")
    plain = eager(model, data=joined)
    losses = [mean(ours.step(seed)) for seed in range(4)]
    assert_close("losses", torch.stack(losses), plain.steps(*range(4)))
    assert_same_values(ours.model, plain.model)
    part = protrain_compile.schedule(ours.called).parts[0]
    planned = part.graph.planned(part.schedule)
    assert planned is not None
    assert planned.prediction is not None
    assert planned.prediction.peak_bytes <= budget
    assert planned.prediction.traffic_bytes["reduce_scatter"] > 0
    spec, found = residency_of(ours).store.spec, part.schedule.plan
    assert set(found.residency or ()) != {"persistent"}
    assert found.residency == spec.residency
    assert found.sharding == residency_of(ours).store.division.sharding
    # Every part of a slab starts at a multiple of 256 bytes.
    assert planned.prediction.host_bytes == pytest.approx(spec.most_host_bytes(), abs=256 * len(spec.layout.chunks))
    return found.to_json()


def longer_sequences_are_planned_anew() -> int:
    """The last rank meets sequences that fit only with recomputed blocks; it plans anew, and the others need not."""
    return max(recomputed_blocks(first_long_seed=2))


def a_longer_first_sequence_decides_for_all() -> int:
    """The last rank begins with sequences that fit only with recomputed blocks: the others follow its plan at first."""
    return recomputed_blocks(first_long_seed=0)[0]


def recomputed_blocks(first_long_seed: int) -> list[int]:
    """Train with sequences of 9 to 12 tokens, and 65 on the last rank from a seed on, in a budget for just those.

    Returns:
        After every step, the most blocks that a schedule of this rank recomputes.
    """

    def tokens(seed: int, rank: int) -> Tensor:
        length = 65 if seed >= first_long_seed and rank == dist.get_world_size() - 1 else 9 + seed
        return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))

    rank, size = dist.get_rank(), dist.get_world_size()
    model, plan = GPT(4), Plan(chunk_bytes=60_000, uniform_residency="offloaded", buffers=3)
    budget = smallest_budget(model, lambda _: torch.zeros(2, 65, dtype=torch.int64), plan) + 200_000
    ours = prepared(model, plan, data=lambda seed: tokens(seed, rank), memory_budget=budget)
    plain, counts, peaks = eager(model), [], []
    for seed in range(4):
        ours.step(seed)
        parts = protrain_compile.schedule(ours.called).parts
        counts.append(max((part.schedule.plan.policies or ()).count("recompute") for part in parts))
        peaks += map(predicted_peak, parts)
        sum(plain.called(tokens(seed, each)) / size for each in range(size)).backward()
        plain.update()
    # The last norm's bias begins at zero and is of the size of four steps: its differences are 4e-5 of it.
    assert_same_values(ours.model, plain.model, rtol=1e-4)
    assert max(peaks) <= budget
    return counts


def predicted_peak(part: Part) -> int:
    """Return what the plan of a part of a schedule is predicted to take."""
    planned = part.graph.planned(part.schedule)
    assert planned is not None
    assert planned.prediction is not None
    return planned.prediction.peak_bytes


class Broken(nn.Module):
    """Two graphs, neither of them with blocks: a small one, and a loss over a wide vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2_000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        torch._dynamo.graph_break()
        logits = self.head(x.repeat(16, 1))
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def each_piece_of_a_broken_graph_has_its_own_plan() -> list[str | None]:
    """The second fits only with the loss in slices, of which the first knows nothing."""
    plan, peaks = Plan(uniform_residency="persistent", uniform_sharding="gradients", chunk_bytes=1_000), []
    for loss in ("whole", "sliced"):
        forced_loss = prepared(Broken(), dataclasses.replace(plan, loss=loss), data=own, memory_budget="1GiB")
        forced_loss.step(0)
        peaks.append(max(each.peak_bytes for each in protrain_compile.schedule(forced_loss.called).predict()))
    budget = sum(peaks) // 2
    ours, plain = pair(plan, Broken(), memory_budget=budget)
    for seed in range(3):
        assert_close("loss", mean(ours.step(seed)), plain.step(seed))
    parts = protrain_compile.schedule(ours.called).parts
    assert max(map(predicted_peak, parts)) <= budget
    return [part.schedule.plan.loss for part in parts]


def other_models_are_refused() -> None:
    pair(forced("offloaded"), Stack(width=8 + 8 * dist.get_rank()))


def different_lengths_do_not_hang() -> None:
    """Every rank has sequences of its own length in every step; ranks compile anew at different times."""

    def tokens(seed: int, rank: int) -> Tensor:
        length = (9, 17, 12)[(seed + rank) % 3]
        return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))

    rank, size = dist.get_rank(), dist.get_world_size()
    model = GPT(2)
    ours = prepared(model, forced("offloaded", chunk_bytes=60_000), data=lambda seed: tokens(seed, rank))
    plain = eager(model)
    for seed in range(5):
        ours.step(seed)
        sum(plain.called(tokens(seed, each)) / size for each in range(size)).backward()
        plain.update()
    assert_same_values(ours.model, plain.model)


def a_nonfinite_gradient_on_one_rank_skips_on_all() -> None:
    for plan in kinds():
        ours = prepared(Stack(), plan, data=own)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = ours.model.state_dict()
        for seed in range(3):
            inputs = own(seed)
            if seed == 0 and dist.get_rank() == dist.get_world_size() - 1:
                inputs[0, 0] = math.inf
            scaler.scale(ours.called(inputs)).backward()
            scaler.step(ours.optimizer)
            scaler.update()
            ours.optimizer.zero_grad()
            changed = not torch.equal(ours.model.state_dict()["stem.weight"], before["stem.weight"])
            assert changed == (seed > 0)
        assert scaler.get_scale() == 2.0


def states_are_whole_on_every_rank() -> None:
    """A bf16 model's state dicts hold whole tensors, the same on all ranks, and resume exactly."""
    for plan in kinds(chunk_bytes=1_000):
        model = Stack().bfloat16()
        ours = prepared(model, plan, data=lambda seed: own(seed).bfloat16())
        ours.steps(0, 1)
        values, states = ours.model.state_dict(), ours.optimizer.state_dict()
        for (name, p), state in zip(ours.model.named_parameters(), states["state"].values(), strict=True):
            assert values[name].shape == p.shape == state["exp_avg"].shape == state["protrain_master"].shape
            assert torch.equal(state["protrain_master"].bfloat16(), values[name])
        assert_same_on_all_ranks(ours.model)
        expected = ours.steps(2, 3)
        resumed = prepared(model, plan, data=ours.data)
        resumed.step(9)
        resumed.model.load_state_dict(values)
        resumed.optimizer.load_state_dict(states)
        assert torch.equal(resumed.steps(2, 3), expected)


def gathers_wait_for_writes() -> None:
    """What packs or writes a parameter on the device is on the compute stream: a gather has to wait for it there."""
    for plan in kinds():
        ours = prepared(Stack(), plan, data=own)
        ours.step(0)
        residency = residency_of(ours)
        values = ours.model.state_dict()
        with mock.patch.object(residency.streams, "record") as record:
            ours.model.load_state_dict(values)
        resident = [i for i, kind in enumerate(residency.store.spec.residency) if kind == "persistent"]
        assert all(mock.call(residency._updated[chunk], "compute") in record.mock_calls for chunk in resident)


# ---- faults ----------------------------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def one_rank_raises() -> None:
    ours, _ = pair(forced("offloaded"))
    ours.steps(0, 1)
    if dist.get_rank() == 1:
        raise BrokenError("rank 1 breaks")
    ours.step(2)
