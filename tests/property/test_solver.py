"""The search finds what brute force finds, for random shapes, machines and budgets; and says what a budget lacks."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.made_shapes import MB, Finer, Stack, prefix, random_hardware, random_stack

from protrain_compile import Plan
from protrain_compile.byte_text import format_needed
from protrain_compile.cost_model import rates_of, simulate
from protrain_compile.errors import BudgetError
from protrain_compile.links import Links
from protrain_compile.lowering import Choice, late_chunks
from protrain_compile.plan import POLICIES
from protrain_compile.plan_space import PlanSpace, swap_interval
from protrain_compile.profile import Profile
from protrain_compile.rank_shape import divided, sharding_choices, sharding_mixes
from protrain_compile.roles import SWAPS
from protrain_compile.shards import World
from protrain_compile.solver import STAY_SHARE, Key, Solution, fits, search, time_cell
from protrain_compile.step_shape import CallShape, StepShape
from protrain_compile.time_bounds import TimeBounds

seeds = st.integers(0, 10**6)


def read_late(shape: StepShape) -> StepShape:
    """Return a shape whose first block reads the last chunk in its backward, long after that one's gradient."""
    segments = list(shape.segments)
    calls = {**segments[1].calls}
    calls["backward"] = dataclasses.replace(
        calls["backward"], chunks=(*calls["backward"].chunks, len(shape.chunks) - 1)
    )
    segments[1] = dataclasses.replace(segments[1], calls=calls)
    return dataclasses.replace(shape, segments=tuple(segments))


def draw_case(seed: int) -> tuple[StepShape, Profile, random.Random]:
    draw = random.Random(seed)
    stack = random_stack(draw, draw.randint(1, 3))
    shape = stack.shape()
    if draw.random() < 0.2:
        shape = read_late(shape)
    return shape, stack.profile(**random_hardware(draw)), draw


def everything(shape: StepShape, profile: Profile, given: Plan | None = None) -> list[tuple[Key, float, int, Plan]]:
    """Simulate every plan of the space: key, time, host bytes, plan."""
    space = PlanSpace(shape, profile, given)
    found = []
    for choice in space.choices():
        plan = space.plan(choice)
        prediction = simulate(shape, profile, plan)
        assert prediction.peak_bytes == space.peak_bytes(choice)
        key = time_cell(prediction.step_ms), prediction.peak_bytes
        found.append((key, prediction.step_ms, prediction.host_bytes, plan))
    return found


def budgets(plans: list[tuple[Key, float, int, Plan]], draw: random.Random) -> tuple[int, int]:
    """Return budgets at, just below, and anywhere between what plans need."""
    peaks, hosts = sorted(key[1] for key, *_ in plans), sorted(host for _, _, host, _ in plans)
    device = draw.choice((draw.choice(peaks), draw.choice(peaks) - 1, draw.randint(peaks[0], peaks[-1])))
    return device, draw.choice((hosts[-1], draw.choice(hosts), draw.randint(hosts[0], hosts[-1])))


def search_within(shape: StepShape, profile: Profile, device: int, host: int, *, feasible: bool) -> Solution | None:
    """Return what is found, which keeps the budgets; None where nothing fits, and the search says so."""
    if not feasible:
        with pytest.raises(BudgetError):
            search(shape, profile, device_bytes=device, host_bytes=host)
        return None
    found = search(shape, profile, device_bytes=device, host_bytes=host)
    assert found.prediction.peak_bytes <= device
    assert found.prediction.host_bytes <= host
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@example(6000936)  # needs 45 of 98 plans
@given(seeds)
def test_equals_brute_force(seed: int) -> None:
    shape, profile, draw = draw_case(seed)
    plans = everything(shape, profile)
    device, host = budgets(plans, draw)
    fitting = [each for each in plans if each[0][1] <= device and each[2] <= host]
    found = search_within(shape, profile, device, host, feasible=bool(fitting))
    if found is None:
        return
    assert found.simulated <= len(plans) + 2
    best = min(fitting, key=lambda each: each[:2])
    if set(SWAPS) & set(found.plan.policies or ()):
        assert found.prediction.step_ms < best[1]
    elif set(found.plan.policies or ()) != {"keep"} or set(found.plan.residency or ()) != {"persistent"}:
        assert (time_cell(found.prediction.step_ms), found.prediction.peak_bytes) == best[0]
    else:
        assert found.prediction.step_ms <= best[1] * (1 + STAY_SHARE)


KEPT: dict[str, Any] = {"swap": "keep", "swap_products": "recompute_pointwise"}
WORLDS = (World(2), World(4), World(8, 1, 2), World(2, 2, 2))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seeds)
def test_equals_brute_force_with_ranks(seed: int) -> None:
    """In every level and mix of sharding; of them, none is faster by more than what predictions may be off."""
    shape, profile, draw = draw_case(seed)
    links = Links("made up", draw.choice((20.0, 400.0)), 5.0, draw.choice((5.0, 50.0)), 10.0)
    profile = dataclasses.replace(profile, hardware=dataclasses.replace(profile.hardware, links=links))
    shape = dataclasses.replace(shape, world=draw.choice(WORLDS), micro_batches=draw.choice((1, 4)))
    uniform, mixes = sharding_choices(shape, None), sharding_mixes(shape, None)
    assert (len(uniform), len(mixes)) == (2 if shape.micro_batches == 1 else 3, min(3, len(shape.chunks) - 1))
    levels = {each: everything(divided(shape, each), profile) for each in (*uniform, *mixes)}
    device, host = budgets([plan for plans in levels.values() for plan in plans], draw)
    fitting = {each: [p for p in plans if p[0][1] <= device and p[2] <= host] for each, plans in levels.items()}
    found = search_within(shape, profile, device, host, feasible=any(fitting.values()))
    if found is None:
        return
    least = min(min(ms for _, ms, *_ in plans) for plans in fitting.values() if plans)
    assert found.prediction.step_ms <= least * (1 + STAY_SHARE) ** 2 * 1.002
    assert found.plan.residency is not None
    assert found.plan.fit_sharding(found.plan.residency) == found.plan.sharding
    assert simulate(shape, profile, found.plan) == found.prediction
    if set(SWAPS) & set(found.plan.policies or ()) or set(found.plan.residency) == {"persistent"}:
        return
    key = time_cell(found.prediction.step_ms), found.prediction.peak_bytes
    assert key in [min(each[:2] for each in plans)[0] for plans in fitting.values() if plans]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seeds)
def test_the_smallest_budget_is_exact(seed: int) -> None:
    shape, profile, _ = draw_case(seed)
    with pytest.raises(BudgetError, match="memory_budget") as caught:
        search(shape, profile, device_bytes=MB, host_bytes=None)
    needed = caught.value.needed_bytes
    assert needed == min(key[1] for key, *_ in everything(shape, profile))
    assert fits(shape, profile, device_bytes=needed, host_bytes=None)
    assert not fits(shape, profile, device_bytes=needed - 1, host_bytes=None)
    assert search(shape, profile, device_bytes=needed, host_bytes=None).prediction.peak_bytes == needed
    with pytest.raises(BudgetError, match="smallest that works") as caught:
        search(shape, profile, device_bytes=needed - 1, host_bytes=None)
    assert caught.value.needed_bytes == needed


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds)
def test_both_budgets_are_named_where_both_are_too_small(seed: int) -> None:
    shape, profile, _ = draw_case(seed)
    plans = everything(shape, profile)
    needed = min((key[1], host) for key, _, host, _ in plans)
    least = min(host for _, _, host, _ in plans)
    with pytest.raises(BudgetError, match=r"memory_budget: .*; the smallest that works is") as caught:
        search(shape, profile, device_bytes=needed[0] - 1, host_bytes=least - 1)
    assert caught.value.needed_bytes == needed[0]
    assert f"It takes {format_needed(needed[1])} on the host, too: raise host_memory_budget" in str(caught.value)
    search(shape, profile, device_bytes=needed[0], host_bytes=needed[1])


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds)
def test_more_memory_is_not_slower(seed: int) -> None:
    shape, profile, _ = draw_case(seed)
    peaks = sorted({key[1] for key, *_ in everything(shape, profile)})
    steps = [peaks[len(peaks) * i // 8] for i in range(8)] + [peaks[-1]]
    times = [search(shape, profile, device_bytes=b, host_bytes=None).prediction.step_ms for b in steps]
    for before, after in itertools.pairwise(times):
        assert after <= before * (1 + STAY_SHARE) * 1.002


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds, st.sampled_from(["policies", "residency", "buffers"]))
def test_what_is_given_stays(seed: int, part: str) -> None:
    shape, profile, draw = draw_case(seed)
    blocks, chunks = len(shape.block_names), len(shape.chunks)
    wanted = Plan(
        policies=tuple(draw.choice(POLICIES) for _ in range(blocks)) if part == "policies" else None,
        residency=tuple(draw.choice(("persistent", "offloaded", "split")) for _ in range(chunks))
        if part == "residency"
        else None,
        buffers=draw.randint(3, 6) if part == "buffers" else None,
    )
    found = search(shape, profile, device_bytes=None, host_bytes=None, given=wanted)
    assert getattr(found.plan, part) == getattr(wanted, part)
    best = min(everything(shape, profile, wanted), key=lambda each: each[:2])
    assert found.prediction.step_ms <= best[1] * (1 + STAY_SHARE) * 1.002


def test_a_chunk_read_late() -> None:
    """Its gradients wait for the buffer's last reader, and so do values: memory is not separable there."""
    stack = Stack(blocks=3)
    assert late_chunks(read_late(stack.shape())) == (4,)
    assert late_chunks(stack.shape()) == ()


def test_swap_where_compute_hides_it() -> None:
    """Just below what keeping all needs, swapping costs nothing; with a slow link it is not even looked at."""
    stack = Stack(blocks=12, chunk_mb=1, ends_mb=1, saved_mb=400, forward_ms=6.0, backward_ms=12.0)
    shape, profile = stack.shape(), stack.profile()
    assert swap_interval(shape, profile) == 2
    keep = simulate(shape, profile, Plan.uniform("keep"))
    found = search(shape, profile, device_bytes=keep.peak_bytes - 500 * MB, host_bytes=None)
    assert found.plan.policies is not None
    assert "swap" in found.plan.policies
    assert "recompute" not in found.plan.policies
    assert found.prediction.step_ms <= 1.03 * keep.step_ms
    assert found.prediction.host_kinds["activations"] > 0
    slow = stack.profile(link=5.0, both=5.0, beside=5.0)
    assert swap_interval(shape, slow) == 0
    again = search(shape, slow, device_bytes=keep.peak_bytes - 500 * MB, host_bytes=None)
    assert again.plan.policies is not None
    assert "swap" not in again.plan.policies


def test_swap_and_recompute_are_interleaved() -> None:
    """Where keep and swap do not fit, blocks between swapped ones are recomputed."""
    stack = Stack(blocks=12, chunk_mb=1, ends_mb=1, saved_mb=400, forward_ms=6.0, backward_ms=12.0)
    shape, profile = stack.shape(), stack.profile()
    recompute = simulate(shape, profile, Plan.uniform("recompute"))
    found = search(shape, profile, device_bytes=recompute.peak_bytes + 500 * MB, host_bytes=None)
    assert found.plan.policies is not None
    assert set(found.plan.policies) >= {"swap", "recompute"}
    assert found.prediction.step_ms < 0.9 * recompute.step_ms


@pytest.mark.parametrize("eighth", [1, 2, 4, 6])
def test_swap_products_is_as_good_as_brute_force(eighth: int) -> None:
    """Where whole blocks take too long to leave, what pointwise operations are made from does not."""
    made = (Finer("recompute_products", 50, 4.5), Finer("recompute_pointwise", 160, 2.0))
    stack = Stack(blocks=12, chunk_mb=1, ends_mb=1, saved_mb=880, forward_ms=6.0, backward_ms=12.0, finer=made)
    shape, profile = stack.shape(), stack.profile(link=25.0, both=25.0, beside=25.0)
    assert (swap_interval(shape, profile), swap_interval(shape, profile, "swap_products")) == (6, 2)
    most, least = (simulate(shape, profile, Plan.uniform(each)) for each in ("keep", "recompute"))
    device = least.peak_bytes + (most.peak_bytes - least.peak_bytes) * eighth // 8
    found = search(shape, profile, device_bytes=device, host_bytes=None)
    without = min(
        ms for key, ms, *_ in everything(shape, profile, Plan(uniform_residency="persistent")) if key[1] <= device
    )
    assert found.plan.policies is not None
    assert found.prediction.step_ms < without
    assert found.prediction.peak_bytes <= device
    best = without
    for policies in itertools.chain(*PlanSpace(shape, profile).swap_ladders):
        other = simulate(shape, profile, dataclasses.replace(found.plan, policies=policies))
        stay = tuple(KEPT.get(each, each) for each in policies)
        kept = simulate(shape, profile, dataclasses.replace(found.plan, policies=stay))
        if other.peak_bytes <= device and other.step_ms <= kept.step_ms * (1 + STAY_SHARE):
            best = min(best, other.step_ms)
    assert found.prediction.step_ms <= best * 1.01
    if eighth <= 2:
        assert "swap_products" in found.plan.policies


def test_the_host_budget_is_named() -> None:
    stack = Stack(blocks=3)
    shape, profile = stack.shape(), stack.profile()
    device = min(key[1] for key, *_ in everything(shape, profile)) + 100 * MB
    with pytest.raises(BudgetError, match="host_memory_budget") as caught:
        search(shape, profile, device_bytes=device, host_bytes=MB)
    assert caught.value.budget == "host_memory_budget"
    needed = caught.value.needed_bytes
    assert search(shape, profile, device_bytes=device, host_bytes=needed).prediction.host_bytes == needed
    assert fits(shape, profile, device_bytes=device, host_bytes=needed)
    assert not fits(shape, profile, device_bytes=device, host_bytes=needed - 1)
    with pytest.raises(BudgetError, match="or memory_budget to"):
        search(shape, profile, device_bytes=device, host_bytes=needed - 1)


def test_one_call_that_uses_many_chunks() -> None:
    """A call that needs four chunks at once gets at least four buffers, though three are the rule."""
    stack = Stack(blocks=6)
    shape = stack.shape()
    segments = list(shape.segments)
    calls = {**segments[3].calls, "forward": CallShape((1, 2, 3, 4), 0)}
    segments[3] = dataclasses.replace(segments[3], calls=calls)
    shape = dataclasses.replace(shape, segments=tuple(segments))
    given_plan = Plan.uniform("recompute", "offloaded")
    found = search(shape, stack.profile(), device_bytes=None, host_bytes=None, given=given_plan)
    assert found.plan.buffers is not None
    assert found.plan.buffers >= 4


def test_a_model_that_fits_stays_resident() -> None:
    stack = Stack(blocks=4)
    found = search(stack.shape(), stack.profile(), device_bytes=None, host_bytes=None)
    assert set(found.plan.residency or ()) == {"persistent"}
    assert found.plan.policies == ("keep",) * 4


def test_a_model_that_is_not_prepared() -> None:
    """Only policies are planned: as many blocks are kept as fit."""
    stack = Stack(blocks=4)
    lives = tuple(life for life in stack.shape().lives if not life.collects)
    segments = tuple(
        dataclasses.replace(each, calls={role: dataclasses.replace(c, chunks=()) for role, c in each.calls.items()})
        for each in stack.shape().segments
    )
    shape = dataclasses.replace(stack.shape(), chunks=(), lives=lives, segments=segments)
    whole = search(shape, stack.profile(), device_bytes=None, host_bytes=None)
    assert whole.plan.residency is None
    assert whole.plan.policies == ("keep",) * 4
    part = search(shape, stack.profile(), device_bytes=whole.prediction.peak_bytes - 1, host_bytes=None)
    assert part.plan.policies is not None
    assert 0 < part.plan.policies.count("keep") < 4


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seeds)
def test_mixes_of_neighbours_are_enough(seed: int) -> None:
    """Any policies for any blocks are at most one block's recompute faster than the mixes that are looked at."""
    draw = random.Random(seed)
    stack = dataclasses.replace(random_stack(draw, 4), workspace_mb=0)
    shape, profile = stack.shape(), stack.profile()
    space = PlanSpace(shape, profile, Plan(uniform_residency="persistent"))
    times = TimeBounds(shape, profile, rates_of(shape, profile))
    resident, names = space.residencies[0], [each.role for each in stack.recomputes]

    def cost(policies: Any) -> tuple[int, float]:
        return space.peak_bytes(Choice(policies, resident, 3)), times.compute_ms(policies, resident)

    offered = [cost(each) for each in space.policy_patterns]
    for peak, ms in map(cost, itertools.product(("keep", *names), repeat=stack.blocks)):
        fitting = [each for size, each in offered if size <= max(peak, offered[-1][0])]
        assert min(fitting) <= ms + stack.forward_ms + 1e-9


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("forward_ms", "most"), [(10.0, 20), (0.5, 50)])
def test_few_plans_are_simulated(clips: bool, forward_ms: float, most: int) -> None:
    """What keeps the search fast, without looking at a clock: of some 150,000 plans it simulates few.

    Where copies and updates bind, many plans take the same time, whatever their policies.
    """
    finer = Finer("recompute_products", 5, 0.7 * forward_ms), Finer("recompute_pointwise", 28, 0.08 * forward_ms)
    stack = Stack(blocks=48, clips=clips, forward_ms=forward_ms, backward_ms=2 * forward_ms, finer=finer)
    assert len(PlanSpace(stack.shape(), stack.profile()).policy_patterns) == 3 * 48 + 1
    shape, profile = stack.shape(), stack.profile(both=42.0, beside=20.0, beside_copies=4.0)
    for cap in (3_000, 6_000, 12_000):
        assert search(shape, profile, device_bytes=cap * MB, host_bytes=None).simulated <= most


@pytest.mark.parametrize("seed", range(6))
def test_the_regret_of_expectations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more plans are left than are simulated, the one that is found is as good as with all of them."""
    draw = random.Random(seed)
    stack = dataclasses.replace(random_stack(draw, 8), forward_ms=0.5, backward_ms=1.0, landings=4)
    shape, profile = stack.shape(), stack.profile(both=40.0, beside=20.0, beside_copies=3.0)
    device = PlanSpace(shape, profile).peak_bytes(prefix(shape, 4, "rrrrkkkk"))
    found = search(shape, profile, device_bytes=device, host_bytes=None)
    monkeypatch.setattr("protrain_compile.solver.SURE", 10**9)
    best = search(shape, profile, device_bytes=device, host_bytes=None)
    assert found.simulated <= best.simulated
    assert found.prediction.step_ms <= best.prediction.step_ms * 1.01


@pytest.mark.parametrize("seed", range(12))
def test_the_regret_at_any_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for machines and models of any proportion."""
    draw = random.Random(seed)
    stack = random_stack(draw, draw.randint(5, 10))
    shape, profile = stack.shape(), stack.profile(**random_hardware(draw))
    blocks, share = len(shape.block_names), draw.choice((0.1, 0.3, 0.6))
    device = PlanSpace(shape, profile).peak_bytes(prefix(shape, int(share * blocks), "r" * blocks))
    found = search(shape, profile, device_bytes=device, host_bytes=None)
    monkeypatch.setattr("protrain_compile.solver.SURE", 10**9)
    best = search(shape, profile, device_bytes=device, host_bytes=None)
    assert found.prediction.step_ms <= best.prediction.step_ms * 1.01
