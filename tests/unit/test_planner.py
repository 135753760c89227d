"""The greedy residency and the number of buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
from support.made_shapes import MB, Stack, prefix

from passes.pack_chunks import pack_chunks
from protrain_compile import Plan, PlanError
from protrain_compile.byte_text import format_size
from protrain_compile.chunks import ChunkLayout, ParameterSpec, Residency
from protrain_compile.cost_model import simulate
from protrain_compile.errors import BudgetError, VerifierError
from protrain_compile.plan import MIN_BUFFERS, Loss
from protrain_compile.planner import (
    DEFAULT_BUFFERS,
    Budgets,
    Decision,
    Fixed,
    choose_residency,
    complete,
    decide,
    decide_with_loss,
    default_buffers,
    is_decided,
    verify_fit,
)
from protrain_compile.profile import Profile
from protrain_compile.shards import Sharding, World
from protrain_compile.solver import Solution


def layout_of(chunks: int) -> ChunkLayout:
    """Return chunks of 1,024 bytes."""
    specs = [ParameterSpec(f"p{i}", (256,), torch.float32, True) for i in range(chunks)]
    return pack_chunks(specs, [[i] for i in range(chunks)], 1024)


def states(chunk: object) -> int:
    return 3 * 1024


def test_the_plan_decides() -> None:
    layout = layout_of(3)
    assert choose_residency(layout, Plan.uniform(residency="split"), 1, states) == ("split",) * 3
    wanted = ("offloaded", "persistent", "split")
    assert choose_residency(layout, Plan(uniform_policy="keep", residency=wanted), 1, states) == wanted
    with pytest.raises(PlanError, match="residency of 3 chunks, but this model has 2"):
        choose_residency(layout_of(2), Plan(uniform_policy="keep", residency=wanted), 1, states)


def test_all_persistent_where_they_fit() -> None:
    layout = layout_of(8)
    assert set(choose_residency(layout, None, None, states)) == {"persistent"}
    assert set(choose_residency(layout, None, 2 * 8 * 4096, states)) == {"persistent"}


def test_persistent_from_the_front() -> None:
    layout = layout_of(8)
    found = choose_residency(layout, None, 2 * (DEFAULT_BUFFERS * 1024 + 3 * 4096), states)
    assert found == ("persistent",) * 3 + ("offloaded",) * 5
    assert set(choose_residency(layout, None, 0, states)) == {"offloaded"}


@pytest.mark.parametrize(("offloaded", "wanted"), [(0, MIN_BUFFERS), (2, MIN_BUFFERS), (9, DEFAULT_BUFFERS)])
def test_buffers(offloaded: int, wanted: int) -> None:
    residency: tuple[Residency, ...] = ("offloaded",) * offloaded + ("persistent",) * (10 - offloaded)
    assert default_buffers(residency) == wanted


def test_buffers_of_gathered_chunks() -> None:
    lives: tuple[Residency, ...] = ("persistent",) * 10
    assert default_buffers(lives, ("parameters",) * 10) == DEFAULT_BUFFERS
    assert default_buffers(lives, ("gradients",) * 10) == MIN_BUFFERS


def decided(budget_mb: int | None, given: Plan | None = None, fixed: Fixed | None = None) -> Plan:
    """Return what two ranks decide for a made-up model of 500 MB of parameters."""
    stack = Stack(blocks=4)
    shape = dataclasses.replace(stack.shape(), world=World(2))
    budgets = Budgets(None if budget_mb is None else budget_mb * MB)
    return decide(shape, budgets, given, stack.profile, stack.profile, fixed).plan


def test_ranks_divide_what_memory_asks_for() -> None:
    resident = decided(10_000)
    assert set(resident.sharding or ()) == {"gradients"}
    assert set(resident.residency or ()) == {"persistent"}
    assert decided(None) == resident
    tight = decided(1_000)
    assert tight.residency is not None
    assert tight.sharding == tight.fit_sharding(tight.residency)
    assert tight != resident


def test_ranks_keep_what_is_given_or_fixed() -> None:
    divided: tuple[Sharding, ...] = ("parameters", *("gradients",) * 5)
    lives: tuple[Residency, ...] = ("persistent",) * 6
    for budget in (None, 2_500, 10_000):
        given = decided(budget, Plan(residency=lives, sharding=divided))
        assert (given.residency, given.sharding) == (lives, divided)
        fixed = decided(budget, fixed=Fixed(lives, 3, divided))
        assert (fixed.residency, fixed.buffers, fixed.sharding) == (lives, 3, divided)


def test_what_ranks_divide_is_open_where_chunks_stay_on_the_device() -> None:
    shape = dataclasses.replace(Stack(blocks=2).shape(), world=World(2))
    assert is_decided(shape, Plan.uniform("keep", "offloaded"), None)
    assert not is_decided(shape, Plan.uniform("keep", "persistent"), None)
    assert is_decided(shape, Plan.uniform("keep", "persistent", sharding="gradients"), None)
    assert is_decided(Stack(blocks=2).shape(), Plan.uniform("keep", "persistent"), None)


BOTH: tuple[Loss, ...] = ("whole", "sliced")


def decision(step_ms: float, peak_bytes: int, policy: str = "r") -> Decision:
    """Return a decision of two blocks with this prediction."""
    stack = Stack(blocks=2)
    choice = prefix(stack.shape(), 4, 2 * policy, 3)
    plan = Plan(policies=choice.policies, residency=choice.residency, buffers=choice.buffers)
    prediction = simulate(stack.shape(), stack.profile(), plan)
    return Decision(plan, dataclasses.replace(prediction, step_ms=step_ms, peak_bytes=peak_bytes))


def test_a_loss_is_sliced_where_that_makes_the_step_faster() -> None:
    """Memory that the logits do not take keeps a block."""
    found = {"whole": decision(100.0, 10), "sliced": decision(90.0, 10)}
    assert decide_with_loss(BOTH, lambda form, _: found[form]).plan.loss == "sliced"
    found = {"whole": decision(90.0, 10), "sliced": decision(100.0, 5)}
    assert decide_with_loss(BOTH, lambda form, _: found[form]).plan.loss == "whole"


def test_of_equal_times_the_loss_with_less_memory_wins() -> None:
    found = {"whole": decision(100.0, 10), "sliced": decision(100.01, 5)}
    assert decide_with_loss(BOTH, lambda form, _: found[form]).plan.loss == "sliced"


def test_a_model_that_fits_is_not_sliced() -> None:
    """The second form is not even looked at."""
    found = {"whole": decision(100.0, 10, "k")}
    assert decide_with_loss(BOTH, lambda form, _: found[form]).plan.loss == "whole"


def test_a_plan_that_fits_by_far_is_not_sliced() -> None:
    """Its times are an estimate's, which are not compared with anything."""
    found = {"whole": dataclasses.replace(decision(100.0, 10), fits_by_far=True)}
    assert decide_with_loss(BOTH, lambda form, _: found[form]).plan.loss == "whole"


def test_times_of_two_forms_are_of_one_kind() -> None:
    """The first form is measured where it does not fit by far; so the second must be, though it might fit by far."""
    asked = {}

    def decide_form(form: Loss, is_compared: bool) -> Decision:
        asked[form] = is_compared
        return decision(100.0, 10)

    decide_with_loss(BOTH, decide_form)
    assert asked == {"whole": False, "sliced": True}


def test_a_loss_that_fits_in_slices_only() -> None:
    def decide_form(form: Loss, is_compared: bool) -> Decision:
        if form == "whole":
            raise BudgetError("too little", 20)
        return decision(100.0, 10)

    assert decide_with_loss(BOTH, decide_form).plan.loss == "sliced"


def test_the_smallest_budget_of_all_forms_is_named() -> None:
    def decide_form(form: Loss, is_compared: bool) -> Decision:
        raise BudgetError("too little", 20 if form == "whole" else 15)

    with pytest.raises(BudgetError) as caught:
        decide_with_loss(BOTH, decide_form)
    assert caught.value.needed_bytes == 15


def test_a_refusal_lets_go_of_the_model_at_once() -> None:
    """Not when the garbage collector comes by: the user who caught it may be about to prepare another one."""

    class Model:
        pass

    def refused() -> weakref.ref[Model]:
        model = Model()

        def decide_form(form: Loss, is_compared: bool) -> Decision:
            raise BudgetError(f"too little for {model}", 20)

        with contextlib.suppress(BudgetError):
            decide_with_loss(BOTH, decide_form)
        return weakref.ref(model)

    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_a_plan_that_was_found_fits_by_the_simulation() -> None:
    """Whatever the search thinks: here it is told of another budget than the user's."""
    shape, profile = Stack().shape(), Stack().profile()
    least = simulate(shape, profile, Plan.uniform("recompute", "offloaded"))
    room = Budgets(least.peak_bytes + 50_000_000, least.host_bytes)
    found = decide(shape, room, None, lambda: profile, lambda: profile)
    assert found.prediction is not None
    verify_fit(found.prediction, room)
    peak, host = found.prediction.peak_bytes, found.prediction.host_bytes
    with pytest.raises(VerifierError, match=rf"after search: the simulated peak in the .* is {peak:,} bytes, and the"):
        verify_fit(found.prediction, Budgets(peak - 1))
    with pytest.raises(VerifierError, match="after search: simulated host memory is"):
        verify_fit(found.prediction, Budgets(None, host - 1))


def test_every_search_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, profile = Stack().shape(), Stack().profile()
    resident = complete(shape, None)

    def careless(*_: object, **__: object) -> Solution:
        return Solution(resident, simulate(shape, profile, resident), 1)

    monkeypatch.setattr("protrain_compile.planner.search", careless)
    with pytest.raises(VerifierError, match="after search: the simulated peak"):
        decide(shape, Budgets(1), None, lambda: profile, lambda: profile)


class Deciding:
    """``decide`` for a made-up model; counts how often the device was asked."""

    def __init__(self) -> None:
        self.stack = Stack(blocks=4)
        self.shape = self.stack.shape()
        self.measured = 0

    def measure(self) -> Profile:
        self.measured += 1
        return self.stack.profile()

    def decide(self, budget_mb: float | None, given: Plan | None = None, *, are_given: bool = False) -> Decision:
        budgets = Budgets(None if budget_mb is None else int(budget_mb * MB), are_given=are_given)
        return decide(self.shape, budgets, given, self.stack.profile, self.measure)

    @property
    def resident_mb(self) -> float:
        found = self.decide(10**6).prediction
        assert found is not None
        return found.peak_bytes / MB


def is_resident(plan: Plan) -> bool:
    return set(plan.policies or ()) == {"keep"} and set(plan.residency or ()) == {"persistent"}


def test_what_fits_by_far_stays_and_nothing_is_measured() -> None:
    case = Deciding()
    for budget in (None, 1.4 * case.resident_mb):
        assert is_resident(case.decide(budget).plan)
    assert case.measured == 0
    assert is_resident(case.decide(1.01 * case.resident_mb).plan)
    assert case.measured == 1, "near the budget an estimate is not believed"


def test_what_does_not_fit_moves() -> None:
    case = Deciding()
    found = case.decide(0.5 * case.resident_mb)
    assert case.measured == 1
    assert "offloaded" in (found.plan.residency or ())
    assert found.prediction is not None
    assert found.prediction.peak_bytes <= 0.5 * case.resident_mb * MB


def test_a_whole_plan_is_followed_up_to_a_budget_that_was_set() -> None:
    case = Deciding()
    given = Plan.uniform("keep", "persistent")
    for budget, are_given in ((None, False), (0.5 * case.resident_mb, False), (case.resident_mb + 1, True)):
        assert is_resident(case.decide(budget, given, are_given=are_given).plan)
    with pytest.raises(BudgetError, match="the plan that was given") as caught:
        case.decide(case.resident_mb - 1, given, are_given=True)
    assert caught.value.needed_bytes == pytest.approx(case.resident_mb * MB)
    for size in (case.resident_mb - 1, case.resident_mb):
        assert format_size(int(size * MB)) in str(caught.value)


def test_what_was_measured_is_told() -> None:
    """Also of a whole plan, and of one that fits by far: the printed times and the watch over the peak need it."""
    case = Deciding()
    profile = case.stack.profile()
    templates = tuple(dataclasses.replace(each, measured=True) for each in profile.templates)
    measured = dataclasses.replace(profile, templates=templates)
    keep, tight = Plan.uniform("keep", "persistent"), Budgets(int(1.1 * case.resident_mb * MB), are_given=True)
    for given, budgets, estimate, expected in (
        (keep, tight, profile, (True, False)),
        (None, tight, profile, (True, False)),
        (None, Budgets(10**18), profile, (False, True)),
        (None, Budgets(10**18), measured, (True, True)),
    ):
        found = decide(case.shape, budgets, given, lambda known=estimate: known, lambda: measured)  # type: ignore[misc]
        assert (found.measured, found.fits_by_far) == expected


def test_a_budget_that_is_too_small() -> None:
    case = Deciding()
    with pytest.raises(BudgetError, match="the smallest that works is") as caught:
        case.decide(10)
    needed = caught.value.needed_bytes
    found = case.decide(needed / MB)
    assert found.prediction is not None
    assert found.prediction.peak_bytes == needed
