"""The cost model with ranks: bytes of shards, ZeRO's traffic, times that move the right way with links and ranks."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from support.made_shapes import MB, Stack, critical_path, prefix, random_hardware, random_stack

from protrain_compile import Plan
from protrain_compile.collective_times import CollectiveTimes
from protrain_compile.cost_model import Prediction, simulate
from protrain_compile.errors import ProfileError
from protrain_compile.links import Links
from protrain_compile.lowering import Choice, lower
from protrain_compile.plan import MIN_BUFFERS
from protrain_compile.profile import CollectiveCost, Profile
from protrain_compile.rank_shape import divided, sharding_choices, sharding_mixes
from protrain_compile.shards import SHARDINGS, World, allowed_sharding
from protrain_compile.solver import search
from protrain_compile.step_jobs import step_jobs
from protrain_compile.step_shape import StepShape
from protrain_compile.time_bounds import TimeBounds
from protrain_compile.timeline import MAX_STEPS, simulate_jobs, speeds

FAST = Links("fast", 1e9, 0.0, 1e9, 0.0)
STACK = Stack(blocks=6, launches=0)
PSI = 6 * 100 * MB + 2 * 50 * MB
"""Bytes of the parameters of STACK."""


def linked(stack: Stack, links: Links, **hardware: Any) -> Profile:
    return stack.profile(links=links, **hardware)


def predict(world: World, residency: Any, sharding: Any, links: Links = FAST, **fields: Any) -> Prediction:
    shape = dataclasses.replace(STACK.shape(), world=world, **fields)
    lives = (residency,) * len(shape.chunks)
    divides = tuple(allowed_sharding(each, sharding) for each in lives)
    plan = Plan(policies=("keep",) * 6, residency=lives, sharding=divides, buffers=MIN_BUFFERS)
    return simulate(shape, linked(STACK, links), plan)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_traffic_is_that_of_zero(ranks: int) -> None:
    share = PSI // ranks * (ranks - 1)
    kept = (2 * 100 + 50) * MB // ranks * (ranks - 1)  # the forward leaves its last chunks in the buffers
    for residency, sharding in (("persistent", "states"), ("persistent", "gradients"), ("split", "gradients")):
        found = predict(World(ranks), residency, sharding).traffic_bytes
        assert found == {"all_gather": share, "reduce_scatter": share}
    for residency in ("persistent", "offloaded"):
        found = predict(World(ranks), residency, "parameters").traffic_bytes
        assert found == {"all_gather": 2 * share - kept, "reduce_scatter": share}
    assert predict(World(), "offloaded", "parameters").traffic_bytes == {}


def test_what_is_whole_communicates_once_for_all_micro_batches() -> None:
    share = PSI // 2
    kept = (2 * 100 + 50) * MB // 2
    for sharding, gathered, reduced in (
        ("states", share // 4, share // 4),
        ("gradients", share // 4, share),
        ("parameters", 2 * share - kept, share),
    ):
        found = predict(World(2), "persistent", sharding, micro_batches=4).traffic_bytes
        assert found == {"all_gather": gathered, "reduce_scatter": reduced}


def test_only_gradients_that_wait_on_the_device_are_added_up() -> None:
    """The shard of another chunk's mean leaves for the host from where it was reduced."""
    shape = dataclasses.replace(STACK.shape(), world=World(2))
    profile = linked(STACK, FAST)
    times = {}
    for residency, sharding in (("persistent", "parameters"), ("offloaded", "parameters"), ("split", "gradients")):
        chunk = divided(shape, (sharding,) * 8).chunks[1]  # type: ignore[arg-type]
        times[residency] = TimeBounds(shape, profile, speeds(profile.hardware)).durations.reduce(chunk, residency)
    added = 2 * 50 * MB / profile.hardware.device_gb_per_s / 1e6
    assert times["persistent"] == pytest.approx(times["offloaded"] + added)
    assert times["split"] == times["offloaded"] > 0


def test_ranks_of_unequal_nodes() -> None:
    """The fullest node's ranks share its host; the emptiest node's ports carry the ring."""
    world = World(3, 1, 2)
    assert world.node_ranks == 2
    links = Links("x", 100.0, 0.0, 10.0, 0.0)
    times = CollectiveTimes(STACK.profile(links=links).hardware, world)
    chunk = divided(dataclasses.replace(STACK.shape(), world=world), ("gradients",) * 8).chunks[1]
    assert times.gather_ms(chunk) == pytest.approx(100 * MB * 2 / 3 / 10 / 1e6)


def test_bytes_of_a_rank() -> None:
    """Parameters, gradients and states of ZeRO's three stages, and the host's share, but for padding."""
    for ranks in (2, 4):
        found = {each: predict(World(ranks), "persistent", each).device_bytes for each in SHARDINGS}
        for kinds in found.values():
            assert kinds["states"] == pytest.approx(5 * PSI / ranks, rel=1e-4)
        assert found["states"]["parameters"] == found["gradients"]["parameters"] == pytest.approx(PSI, rel=1e-4)
        assert found["parameters"]["parameters"] == pytest.approx(PSI / ranks, rel=1e-4)
        assert found["states"]["gradients"] == pytest.approx(PSI * (1 + 1 / ranks), rel=1e-4)
        assert found["gradients"]["gradients"] == pytest.approx(PSI / ranks, rel=1e-4)
        assert [found[each]["chunk buffers"] // (MIN_BUFFERS * 100 * MB) for each in SHARDINGS] == [0, 1, 1]
        whole, shard = (predict(World(n), "offloaded", "parameters").host_bytes for n in (1, ranks))
        assert shard == pytest.approx(whole / ranks, rel=1e-4)


def test_a_world_of_one_is_the_step_itself() -> None:
    shape = STACK.shape()
    assert sharding_choices(shape, Plan.uniform(sharding="parameters")) == []
    assert divided(shape, ("parameters",) * 8) is shape
    found = search(shape, STACK.profile(), device_bytes=6_000 * MB, host_bytes=None)
    assert found.plan.sharding is None


def test_some_chunks_hold_whole_parameters_where_all_do_not_fit() -> None:
    """Between a plan that recomputes to hold all of them, and one that waits for links: a mix of both is faster."""
    stack = Stack(blocks=8, saved_mb=100, forward_ms=0.5, backward_ms=1.0, launches=0)
    shape = dataclasses.replace(stack.shape(), world=World(2))
    profile, bytes_ = linked(stack, Links("slow", 50.0, 0.0, 50.0, 0.0)), 2_726 * MB
    levels = [
        search(shape, profile, device_bytes=bytes_, host_bytes=None, given=Plan(uniform_sharding=each)).prediction
        for each in ("gradients", "parameters")
    ]
    found = search(shape, profile, device_bytes=bytes_, host_bytes=None)
    assert found.prediction.step_ms < 0.93 * min(each.step_ms for each in levels)
    assert found.prediction.peak_bytes <= bytes_
    assert found.plan.sharding is not None
    resident = [found.plan.sharding[i] for i, each in enumerate(found.plan.residency or ()) if each == "persistent"]
    assert set(resident) == {"gradients", "parameters"}
    assert simulate(shape, profile, found.plan) == found.prediction
    roomy = search(shape, profile, device_bytes=None, host_bytes=None)
    assert set(roomy.plan.sharding or ()) == {"gradients"}


def test_mixes_of_sharding() -> None:
    shape = dataclasses.replace(STACK.shape(), world=World(2))
    found = sharding_mixes(shape, None)
    assert [mix.count("gradients") for mix in found] == [6, 4, 2]
    assert found[1] == ("parameters", "gradients") * 4
    assert sharding_mixes(shape, Plan(uniform_sharding="parameters")) == []
    assert sharding_mixes(shape, Plan(sharding=("parameters",) * 8)) == []
    assert sharding_mixes(STACK.shape(), None) == []


def test_more_ranks_are_no_slower_and_need_no_more_where_links_are_free() -> None:
    for residency, sharding in (("persistent", "gradients"), ("persistent", "parameters"), ("offloaded", "parameters")):
        found = [predict(World(ranks), residency, sharding) for ranks in (2, 4, 8, 64)]
        times, peaks = [each.step_ms for each in found], [each.peak_bytes for each in found]
        hosts = [each.host_bytes for each in found]
        assert times == sorted(times, reverse=True)
        assert peaks == sorted(peaks, reverse=True)
        assert hosts == sorted(hosts, reverse=True)


def test_slow_links_bound_a_step() -> None:
    """Collectives take turns: 10 ms for 100 MB of which half arrives."""
    slow = Links("slow", 5.0, 0.0, 5.0, 0.0)
    found = predict(World(2), "persistent", "gradients", slow)
    assert found.step_ms == pytest.approx(2 * PSI / MB / 10, rel=0.05)
    assert found.collectives_ms > 0.4 * found.step_ms
    assert found.exposed_copies_ms == found.exposed_updates_ms == 0
    parts = (found.compute_ms, found.exposed_launches_ms, found.collectives_ms)
    assert sum(parts) == pytest.approx(found.step_ms, rel=1e-6)
    once = predict(World(2), "persistent", "states", slow, micro_batches=4)
    assert once.collectives_ms < found.collectives_ms / 3
    assert once.step_ms < 0.7 * found.step_ms


def test_reduces_hide_behind_the_next_block() -> None:
    """The update of a chunk on the device does not wait for its own reduce_scatter, but for the last one's end."""
    links = Links("half of a block's backward", 12.5, 0.0, 12.5, 0.0)  # 4 ms for a block's chunk
    found = predict(World(2), "persistent", "gradients", links)
    assert found.collectives_ms < 3 * 4.0


def test_hybrid_sharding_spares_the_slow_links() -> None:
    links = Links("slow between nodes", 400.0, 5.0, 1.0, 10.0)
    flat, hybrid = (predict(world, "persistent", "parameters", links) for world in (World(16, 1, 2), World(8, 2, 2)))
    assert hybrid.step_ms < 0.6 * flat.step_ms
    assert flat.device_bytes["states"] < hybrid.device_bytes["states"]


def test_measured_collectives_count_before_links() -> None:
    measured = tuple(
        CollectiveCost(kind, size * MB, 2, ms)
        for kind in ("all_gather", "reduce_scatter")
        for size, ms in ((50, 3.0), (100, 5.0))
    )
    shape = divided(dataclasses.replace(STACK.shape(), world=World(2)), ("gradients",) * 8)
    bounds = TimeBounds(shape, linked(STACK, FAST, collectives=measured), speeds(STACK.profile().hardware))
    gathers = [bounds.durations.gather(chunk, in_buffer=True) for chunk in shape.chunks]
    assert gathers == pytest.approx([3.0, *[5.0] * 6, 3.0])


def test_rings_by_hand() -> None:
    links = Links("x", 100.0, 10.0, 20.0, 30.0)
    assert links.ring_ms(4e8, 4) == pytest.approx(3.0 + 0.03)
    assert links.ring_ms(4e8, 1) == 0.0
    assert links.ring_ms(4e8, 8, node_members=4) == pytest.approx(3.5 / 0.8 + 7 * 0.03)
    assert links.ring_ms(4e8, 16, node_members=8) == pytest.approx(3.75 + 15 * 0.03)


def test_link_tables() -> None:
    assert Links.load("h200").source.startswith("Nothing here was measured")
    with pytest.raises(ProfileError, match="'abacus': no such file, and the package has h200"):
        Links.load("abacus")
    with pytest.raises(ProfileError, match="inside_gb_per_s must be above 0"):
        Links("x", 0.0, 1.0, 1.0, 1.0)


def any_case(draw: random.Random) -> tuple[StepShape, Profile, Choice]:
    stack = random_stack(draw, draw.randint(1, 4))
    links = Links("made up", draw.choice((5.0, 400.0)), 5.0, draw.choice((5.0, 50.0)), 10.0)
    shape = dataclasses.replace(stack.shape(), world=draw.choice((World(2), World(4, 1, 2), World(2, 2, 2))))
    shape = divided(shape, tuple(draw.choice(SHARDINGS) for _ in shape.chunks))  # type: ignore[misc]
    policies = "".join(draw.choice("kr") for _ in shape.block_names)
    rest = draw.choice(("offloaded", "split"))
    choice = prefix(shape, draw.randint(0, len(shape.chunks)), policies, draw.randint(3, 6), rest)
    return shape, stack.profile(links=links, **random_hardware(draw)), choice


def test_between_bounds_and_the_serial_sum() -> None:
    """No step is faster than its bounds or its longest chain of jobs, or slower than one job after another."""
    draw = random.Random(7)
    for _ in range(40):
        shape, profile, choice = any_case(draw)
        jobs = step_jobs(shape, profile, choice, lower(shape, choice))
        rates = speeds(profile.hardware)
        found = simulate_jobs(jobs, rates)
        path = critical_path(jobs, MAX_STEPS) - critical_path(jobs, MAX_STEPS // 2)
        assert found.step_ms >= path / (MAX_STEPS // 2) - 1e-6
        slowest = [min(each[stream] for each in rates) for stream in range(3)]
        serial = sum(job.ms / (slowest[job.stream - 1] if 1 <= job.stream <= 3 else 1.0) for job in jobs.jobs)
        assert found.step_ms <= serial + max(job.launched_ms for job in jobs.jobs) + 1e-6
        bounds = TimeBounds(shape, profile, rates)
        assert found.step_ms >= bounds.shared_ms(choice.residency, choice.buffers, choice.policies) - 1e-6
        assert found.step_ms >= bounds.compute_ms(choice.policies, choice.residency) - 1e-6
        assert found.step_ms >= bounds.cycle_ms(choice.policies, choice.residency) - 1e-6
        parts = (found.compute_ms, found.copies_ms, found.updates_ms, found.launches_ms, found.collectives_ms)
        assert min(parts) >= 0
