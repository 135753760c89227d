"""What is decided for one step: from a StepShape, budgets and a Profile to a Plan.

In this order::

    a whole plan was given                        that one
    nothing bounds memory, or everything fits     everything resident and kept: an estimate says so, nothing is profiled
    by far
    else                                          profile the templates, then search

Numbers only: what they are is gathered by ``runtime.planning`` for a model that runs, and by ``commands.plan`` for one
that is only planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from protrain_compile.byte_text import format_needed, format_size
from protrain_compile.chunks import Chunk, ChunkLayout, Residency
from protrain_compile.cost_model import Prediction, simulate
from protrain_compile.errors import BudgetError, VerifierError
from protrain_compile.plan import LOSSES, MIN_BUFFERS, Loss, Plan
from protrain_compile.profile import Profile
from protrain_compile.program import Program
from protrain_compile.rank_shape import sharding_levels
from protrain_compile.row_loop import loop_of, row_loops
from protrain_compile.shards import Sharding, allowed_sharding
from protrain_compile.solver import search, time_cell
from protrain_compile.step_shape import StepShape

DEFAULT_BUFFERS = 4
"""One more than the least, so that a copy that is late does not stop compute at once."""

SHARE_FOR_CHUNKS = 0.5
"""Of the free device memory, where nothing is known of activations yet: the rest is left to them."""

SLICED_LOGITS_BYTES = 256 << 20
"""Logits from this size on are sliced by default: a loop over smaller ones would save little of any device's memory."""

FITS_BY_FAR = 0.75
"""Share of the budget up to which an estimated peak is believed. Workspace is the part that is only estimated, and the
values between calls, which are exact, are the larger part."""


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Bytes that a step may use.

    Attributes:
        device_bytes: On the device; None where nothing bounds it.
        host_bytes: On the host; None where nothing bounds it.
        are_given: Whether the user set ``memory_budget``: a Plan by hand is then held to it.
    """

    device_bytes: int | None
    host_bytes: int | None = None
    are_given: bool = False


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What a packed model cannot change any more: where its chunks live, its chunk buffers, what ranks divide."""

    residency: tuple[Residency, ...]
    buffers: int
    sharding: tuple[Sharding, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan without gaps, and what it is predicted to cost.

    Attributes:
        plan: The policy of every block; for a prepared model the residency of every chunk, and the buffers.
        prediction: What a step costs; None where nothing bounds memory.
        measured: Whether the prediction's times come from measurements on the device.
        fits_by_far: Whether memory is so plentiful that an estimate says so.
    """

    plan: Plan
    prediction: Prediction | None = None
    measured: bool = False
    fits_by_far: bool = False


def decide(
    shape: StepShape,
    budgets: Budgets,
    given: Plan | None,
    estimate: Callable[[], Profile],
    measure: Callable[[], Profile],
    fixed: Fixed | None = None,
) -> Decision:
    """Return the plan of a step.

    Args:
        shape: The step.
        budgets: What it may use.
        given: What the user wants, or None; what it leaves open is decided.
        estimate: Returns an estimated profile, of which bytes alone are used, where nothing is compared with the plan.
        measure: Returns the profile to search with.
        fixed: What was decided for an earlier shape of the same model.

    Raises:
        BudgetError: If no plan fits; it names the smallest budget that would do. Or if ``given`` is a whole plan that
            takes more than a budget that the user set.
        PlanError: If ``given`` does not fit the model.
    """
    resident = complete(shape, given, fixed)
    if budgets.device_bytes is None:
        return Decision(resident)
    profile = estimate()
    prediction = simulate(shape, profile, resident)
    fits_by_far = prediction.peak_bytes <= FITS_BY_FAR * budgets.device_bytes
    if fits_by_far or (is_decided(shape, given, fixed) and not budgets.are_given):
        return Decision(resident, prediction, _is_measured(profile), fits_by_far)
    profile = measure()
    if is_decided(shape, given, fixed):
        prediction = simulate(shape, profile, resident)
        _check_given(shape, prediction, budgets.device_bytes)
        return Decision(resident, prediction, _is_measured(profile))
    wanted = constraint(given, fixed)
    solution = search(shape, profile, device_bytes=budgets.device_bytes, host_bytes=budgets.host_bytes, given=wanted)
    verify_fit(solution.prediction, budgets)
    return Decision(solution.plan.fit(shape.block_names), solution.prediction, _is_measured(profile))


def _is_measured(profile: Profile) -> bool:
    return all(template.measured for template in profile.templates)


def _check_given(shape: StepShape, prediction: Prediction, device_bytes: int) -> None:
    """Refuse a whole plan by hand that takes more than the budget."""
    peak = prediction.peak_bytes
    if peak > device_bytes:
        raise BudgetError(
            f"memory_budget: {format_size(device_bytes)} is too small for the plan that was given for {shape.name}, "
            f"whose peak, in the {prediction.peak_at}, is predicted to be {format_needed(peak)}: raise it, or leave "
            "parts of the plan open",
            peak,
        )


def verify_fit(prediction: Prediction, budgets: Budgets) -> None:
    """Check that what a search found fits the budgets by the simulation (DESIGN 7, invariant 4).

    Raises:
        VerifierError: If it does not: the search and the simulation disagree.
    """
    for name, found, limit in (
        (f"the simulated peak in the {prediction.peak_at}", prediction.peak_bytes, budgets.device_bytes),
        ("simulated host memory", prediction.host_bytes, budgets.host_bytes),
    ):
        if limit is not None and found > limit:
            raise VerifierError(f"after search: {name} is {found:,} bytes, and the budget {limit:,}")


def complete(shape: StepShape, given: Plan | None, fixed: Fixed | None = None) -> Plan:
    """Return ``given`` with its gaps filled: keep, persistent, and enough buffers to copy ahead."""
    plan = (given or Plan.uniform()).fit(shape.block_names)
    if not shape.chunks:
        return plan
    resident: Residency = "persistent"
    residency = plan.fit_chunks(len(shape.chunks)) or (resident,) * len(shape.chunks)
    sharding = plan.sharding
    if shape.world.size > 1:
        least = sharding_levels(shape)[0]
        sharding = plan.fit_sharding(residency) or tuple(allowed_sharding(each, least) for each in residency)
        plan = dataclasses.replace(plan, uniform_sharding=None)
    buffers = plan.buffers or default_buffers(residency, sharding)
    if fixed is not None:
        residency, buffers, sharding = fixed.residency, fixed.buffers, fixed.sharding
    return dataclasses.replace(plan, residency=residency, uniform_residency=None, buffers=buffers, sharding=sharding)


def is_decided(shape: StepShape, given: Plan | None, fixed: Fixed | None) -> bool:
    """Whether nothing is left open."""
    if given is None or (given.policies is None and given.uniform_policy is None):
        return False
    if not shape.chunks or fixed is not None:
        return True
    residency = given.fit_chunks(len(shape.chunks))
    if residency is None:
        return False
    may_divide = shape.world.size > 1 and "persistent" in residency
    return not may_divide or given.fit_sharding(residency) is not None


def constraint(given: Plan | None, fixed: Fixed | None) -> Plan | None:
    """Return what the search may not change."""
    if fixed is None:
        return given
    plan = given or Plan()
    plan = dataclasses.replace(plan, residency=fixed.residency, uniform_residency=None, buffers=fixed.buffers)
    return dataclasses.replace(plan, sharding=fixed.sharding, uniform_sharding=None) if fixed.sharding else plan


def default_buffers(residency: tuple[Residency, ...], sharding: tuple[Sharding, ...] | None = None) -> int:
    """Return how many standard chunk buffers there are where nobody says: enough to copy or gather ahead."""
    divided = [each == "parameters" for each in sharding or ()] or [False] * len(residency)
    moving = sum(lives == "offloaded" or each for lives, each in zip(residency, divided, strict=True))
    return max(MIN_BUFFERS, min(DEFAULT_BUFFERS, moving))


def choose_residency(
    layout: ChunkLayout, plan: Plan | None, free_bytes: int | None, state_bytes: Callable[[Chunk], int]
) -> tuple[Residency, ...]:
    """Return the residency of every chunk where no step is known: the Plan's, or by a greedy rule.

    Chunks are persistent from the front while they fit into half of the free device memory. From it ``prepare`` tells
    about how much host memory a model will need.

    Args:
        layout: The chunks.
        plan: The Plan that the user gave, or None.
        free_bytes: Free device memory; None if nothing bounds it.
        state_bytes: Bytes of a chunk's states and gradients.

    Raises:
        PlanError: If the Plan is for another number of chunks.
    """
    given = plan.fit_chunks(len(layout.chunks)) if plan is not None else None
    if given is not None:
        return given
    persistent: Residency = "persistent"
    everything = (persistent,) * len(layout.chunks)
    if free_bytes is None:
        return everything
    room = int(free_bytes * SHARE_FOR_CHUNKS)
    costs = [chunk.size_bytes + state_bytes(chunk) for chunk in layout.chunks]
    if sum(costs) <= room:
        return everything
    room -= DEFAULT_BUFFERS * layout.largest_bytes
    chosen: list[Residency] = []
    for cost in costs:
        fits = cost <= room
        room -= cost if fits else 0
        chosen.append("persistent" if fits else "offloaded")
    return tuple(chosen)


def choose_loss(program: Program, plan: Plan) -> Loss:
    """Return how the loss is computed: as the Plan says, or in slices where whole logits would be large."""
    if plan.loss is not None:
        return plan.loss
    sliced = [program.templates[program.sliced[i]] for i in set(program.template_of) if i in program.sliced]
    loops = [loop_of(node) for template in sliced for node in row_loops(template.joint.graph)]
    return "sliced" if any(loop.wide_bytes >= SLICED_LOGITS_BYTES for loop in loops) else "whole"


def loss_forms(program: Program, given: Plan | None) -> tuple[Loss, ...]:
    """Return the ways to compute the loss among which a step's plan is chosen, the plainest first.

    A plan that gives the policies is followed, with the loss that it has without a budget.
    """
    if given is not None and (given.loss, given.policies, given.uniform_policy) != (None, None, None):
        return (choose_loss(program, given),)
    return LOSSES if any(index in program.sliced for index in program.template_of) else LOSSES[:1]


def decide_with_loss(forms: Sequence[Loss], decide_form: Callable[[Loss, bool], Decision]) -> Decision:
    """Return the best decision over the forms of the loss; a later form only where memory is short without it.

    Args:
        forms: The forms to choose from.
        decide_form: Returns the decision for a form, and is told whether its times will be compared with those of
            another; its plan need not name the form.

    Raises:
        BudgetError: If no plan fits in any form; it names the smallest budget of all.
    """
    best: Decision | None = None
    refused: BudgetError | None = None
    for form in forms:
        try:
            found = decide_form(form, form != forms[0])
        except BudgetError as error:
            refused = error if refused is None else min(refused, error, key=lambda each: each.needed_bytes)
            continue
        found = dataclasses.replace(found, plan=dataclasses.replace(found.plan, loss=form))
        if best is None or _is_better(found, best):
            best = found
        if best.fits_by_far or best.plan.keeps_all:
            break
    if best is None:
        assert refused is not None
        try:
            raise refused
        finally:
            del refused  # this frame is in its traceback: a circle that would keep the caller's model alive
    return best


def _is_better(decision: Decision, other: Decision) -> bool:
    """Whether a decision is faster, or as fast with less memory."""
    ours, theirs = decision.prediction, other.prediction
    if ours is None or theirs is None:
        return False
    cells = time_cell(ours.step_ms), time_cell(theirs.step_ms)
    return (cells[0], ours.peak_bytes) < (cells[1], theirs.peak_bytes)
