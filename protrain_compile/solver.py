"""The search: the fastest plan that fits, and the smallest budget where none does.

Branch and bound over ``plan_space``. A *group* is a choice of policies and residency; its leaves are the numbers of
buffers. What is looked at next is always what may still be best, by bounds that get dearer only for what survives::

    group    busy, shared (time_bounds)      in no time
             cycle (time_bounds)             when it comes first
             undisturbed (timeline)          when a leaf turned out slower than the group's bound
    leaf     simulate (timeline)             the exact time

Times within ``SAME_SHARE`` of each other count as equal: the plan with less memory wins, which keeps room for what no
model knows. Up to ``SURE`` simulations the result is the best of the whole space in this order, which a test compares
with brute force. Beyond, for deep models that copies and updates bound, two assumptions save most of the work, and a
test measures the regret: more buffers are not slower, so a group is judged by its plan with the most, and the fewest
that are as fast are found by halving; and the bounds of neighbouring groups are off alike.

With ranks each level of sharding is searched by itself, the one that communicates least first; another takes its place
where it is faster by more than ``STAY_SHARE``, or alone fits.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

from protrain_compile.byte_text import format_size
from protrain_compile.cost_model import Prediction, rates_of, simulate
from protrain_compile.errors import BudgetError, PlanError
from protrain_compile.lowering import Choice, lower
from protrain_compile.plan import MIN_BUFFERS, Plan, Policy
from protrain_compile.plan_space import PlanSpace, Policies, Residencies
from protrain_compile.profile import Profile
from protrain_compile.rank_shape import divided, sharding_choices
from protrain_compile.step_jobs import step_jobs
from protrain_compile.step_shape import StepShape
from protrain_compile.time_bounds import TimeBounds
from protrain_compile.timeline import repeated_ms, undisturbed_ms

SAME_SHARE = 0.002
"""A tenth of what predictions are allowed to be off, rounded down: finer differences mean nothing."""

STAY_SHARE = 0.03
"""What predictions are allowed to be off: a model that fits stays on the device, all kept, unless moving it is faster
by more than this."""

SURE = 16
"""Simulations before assumptions count. At 96 blocks, bounds alone would leave a thousand."""

NEAR_SHARE = 0.06
"""How far away a neighbour may be whose bound is off alike: in blocks and chunks that differ, of their number."""

Key = tuple[int, int]
"""What is minimised: the time's cell (see ``time_cell``), then the peak in bytes."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """The plan that was found.

    Attributes:
        plan: The policy of every block, the residency of every chunk, and the buffers.
        prediction: What it costs.
        simulated: How many plans were simulated.
    """

    plan: Plan
    prediction: Prediction
    simulated: int


def search(
    shape: StepShape, profile: Profile, *, device_bytes: int | None, host_bytes: int | None, given: Plan | None = None
) -> Solution:
    """Return the best plan within the budgets.

    Args:
        shape: The step.
        profile: What it costs.
        device_bytes: The device memory that may be allocated; None for no limit.
        host_bytes: The host memory that chunks may take; None for no limit.
        given: What the user decided already: its policies, residency and buffers, where set, stay.

    Raises:
        BudgetError: If no plan fits; it names the smallest budget for which there is one.
        PlanError: If ``given`` does not fit the shape.
    """
    choices = sharding_choices(shape, given)
    if not choices:
        return _search_one(shape, profile, device_bytes, host_bytes, given)
    best: Solution | None = None
    errors: list[BudgetError | PlanError] = []
    for sharding in choices:
        try:
            found = _search_one(divided(shape, sharding), profile, device_bytes, host_bytes, given)
        except (BudgetError, PlanError) as error:
            errors.append(error)
            continue
        if best is None or found.prediction.step_ms * (1 + STAY_SHARE) < best.prediction.step_ms:
            best = found
    if best is None:
        raise _least(errors)
    return best


def _least(errors: Sequence[BudgetError | PlanError]) -> BudgetError | PlanError:
    """Return the refusal that asks for least, of those that lack what the last one lacks."""
    budgets = [error for error in errors if isinstance(error, BudgetError)]
    alike = [error for error in budgets if error.budget == budgets[-1].budget]
    return min(alike, key=lambda error: error.needed_bytes, default=errors[-1])


def _search_one(
    shape: StepShape, profile: Profile, device_bytes: int | None, host_bytes: int | None, given: Plan | None
) -> Solution:
    """Return the best plan with the sharding that ``shape`` has."""
    found = Search(PlanSpace(shape, profile, given), device_bytes, host_bytes)
    choice = found.run()
    if choice is None:
        raise budget_error(found.space, device_bytes, host_bytes)
    choice = found.swap_where_faster(found.prefer_resident(choice))
    plan = found.space.plan(choice)
    return Solution(plan, simulate(shape, profile, plan), found.simulated)


def time_cell(ms: float) -> int:
    """Return the cell of a time: times in one cell differ by less than ``SAME_SHARE``."""
    return math.floor(math.log(ms) / math.log1p(SAME_SHARE)) if ms > 0 else -(10**9)


@dataclasses.dataclass
class _Group:
    """Policies and a residency, or policies alone with all residencies.

    Attributes:
        policies: Per block.
        residency: Per chunk; None for all.
        least_ms: A bound on the time of all its plans.
        bounds: How many kinds of bounds were taken.
        judged: Whether it was decided under assumptions.
    """

    policies: Policies
    residency: Residencies | None
    least_ms: float
    bounds: int = 0
    judged: bool = False

    def __post_init__(self) -> None:
        """Remember the bound that neighbours are compared by."""
        self.first_ms = self.least_ms


class Search:
    """One search."""

    def __init__(self, space: PlanSpace, device_bytes: int | None, host_bytes: int | None) -> None:
        self.space = space
        self.device_bytes = device_bytes if device_bytes is not None else math.inf
        self.host_bytes = host_bytes if host_bytes is not None else math.inf
        self._rates = rates_of(space.shape, space.profile)
        self.bounds = TimeBounds(space.shape, space.profile, self._rates)
        self._times: dict[Choice, float] = {}
        self._order = itertools.count()
        self._waiting: list[tuple[Key, int, _Group, int]] = []
        self._residencies: list[tuple[Residencies, float, int]] = []
        self._seen: list[tuple[_Place, float]] = []

    def run(self) -> Choice | None:
        """Return the best choice; None if none fits."""
        best: tuple[Key, float] | None = None
        chosen: Choice | None = None
        self._begin()
        while self._waiting and (best is None or self._waiting[0][0] < best[0]):
            key, _, group, buffers = heapq.heappop(self._waiting)
            if not buffers or group.residency is None:
                self._expand(group)
                continue
            choice = Choice(group.policies, group.residency, buffers)
            bound = self._key(group, choice)
            if bound > key:
                self._wait(bound, group, buffers)
                continue
            judged = best is not None and self.simulated >= SURE
            if best is not None and judged:
                better = self._judge(group, choice, best[0][0])
                if better is None:
                    continue
                choice = better
            ms = self._simulate(choice)
            found = ((time_cell(ms), self.space.peak_bytes(choice)), ms)
            if best is None or found < best:
                best, chosen = found, choice
            if found[0] > key and not judged:
                self._undisturbed(group, group.residency)
        return chosen

    def prefer_resident(self, choice: Choice) -> Choice:
        """Return the choice that moves and recomputes nothing, where it fits and is about as fast; else ``choice``."""
        everything = self.space.residencies[-1]
        fewest = min(self.space.buffer_counts(everything), default=0)
        resident = Choice(self.space.policy_patterns[0], everything, max(choice.buffers, fewest))
        moves = set(resident.residency) - {"persistent"} or set(resident.policies) - {"keep"}
        if moves or self.space.peak_bytes(resident) > self.device_bytes:
            return choice
        return resident if self._simulate(resident) <= self._simulate(choice) * (1 + STAY_SHARE) else choice

    def swap_where_faster(self, choice: Choice) -> Choice:
        """Return a plan that swaps in place of recomputing, where it is faster and compute hides the copies.

        Hidden: within ``STAY_SHARE`` of the same plan with all that is swapped kept on the device.
        """
        if "recompute" not in choice.policies:
            return choice
        best, best_ms = choice, self._simulate(choice)
        for policies in self.space.swap_patterns:
            other = dataclasses.replace(choice, policies=policies)
            limit = best_ms * (1 - SAME_SHARE)
            if self.bounds.compute_ms(policies, choice.residency) >= limit or not self._within_budgets(other):
                continue
            ms = self._simulate(other)
            if ms < limit and ms <= self._simulate(_all_kept(other)) * (1 + STAY_SHARE):
                best, best_ms = other, ms
        return best

    def _within_budgets(self, choice: Choice) -> bool:
        on_host = self.space.host_bytes(choice.residency, choice.policies)
        return self.space.peak_bytes(choice) <= self.device_bytes and on_host <= self.host_bytes

    def _begin(self) -> None:
        """Wait for all residencies of each pattern of policies: only what may be best is looked at closer."""
        self._residencies = [
            (residency, self.bounds.shared_ms(residency, counts[-1]), counts[0])
            for residency in self.space.residencies
            if (counts := self.space.buffer_counts(residency))
        ]
        for policies in self.space.policy_patterns if self._residencies else ():
            least = min(max(s, self.bounds.compute_ms(policies, r)) for r, s, _ in self._residencies)
            self._wait((_bound_cell(least), 0), _Group(policies, None, least), 0)

    def _split(self, policies: Policies) -> None:
        """Replace the residencies of some policies by those that fit."""
        for residency, shared, fewest in self._residencies:
            least = self.space.peak_bytes(Choice(policies, residency, fewest))
            if least <= self.device_bytes and self.space.host_bytes(residency, policies) <= self.host_bytes:
                most = self.space.buffer_counts(residency)[-1]
                shared = self.bounds.shared_ms(residency, most, policies)
                ms = max(shared, self.bounds.compute_ms(policies, residency))
                self._wait((_bound_cell(ms), least), _Group(policies, residency, ms), 0)

    def _wait(self, key: Key, group: _Group, buffers: int) -> None:
        heapq.heappush(self._waiting, (key, next(self._order), group, buffers))

    def _expand(self, group: _Group) -> None:
        """Replace a group by itself under a better bound, or by its parts."""
        if group.residency is None:
            self._split(group.policies)
            return
        counts = self.space.buffer_counts(group.residency)
        choice = Choice(group.policies, group.residency, counts[0])
        if not group.bounds:
            group.bounds = 1
            cycle = self.bounds.cycle_ms(group.policies, group.residency)
            if cycle > group.least_ms:
                group.least_ms = group.first_ms = cycle
                self._wait((_bound_cell(cycle), self.space.peak_bytes(choice)), group, 0)
                return
        for buffers in counts:
            leaf = dataclasses.replace(choice, buffers=buffers)
            if self.space.peak_bytes(leaf) > self.device_bytes:
                break
            self._wait(self._key(group, leaf), group, buffers)

    def _key(self, group: _Group, leaf: Choice) -> Key:
        """Return the best that a leaf may be."""
        ms = max(group.least_ms, self.bounds.shared_ms(leaf.residency, leaf.buffers, leaf.policies))
        return _bound_cell(ms), self.space.peak_bytes(leaf)

    def _simulate(self, choice: Choice) -> float:
        """Return the time of a choice, which is simulated once."""
        if choice not in self._times:
            shape, profile = self.space.shape, self.space.profile
            jobs = step_jobs(shape, profile, choice, lower(shape, choice))
            self._times[choice] = repeated_ms(jobs, self._rates)
        return self._times[choice]

    @property
    def simulated(self) -> int:
        """How many plans were simulated."""
        return len(self._times)

    def _judge(self, group: _Group, leaf: Choice, best_cell: int) -> Choice | None:
        """Return the choice that a group stands or falls by, once; None where it is not expected to be any better."""
        if group.judged:
            return None
        group.judged = True
        place = _where(leaf)
        near, ratio = min(((_distance(place, each), off) for each, off in self._seen), default=(math.inf, 0.0))
        is_near = near <= NEAR_SHARE * len(leaf.residency + leaf.policies)
        if is_near and time_cell(group.first_ms * ratio * (1 - SAME_SHARE)) > best_cell:
            return None
        counts = [b for b in self.space.buffer_counts(leaf.residency) if self._fits(leaf, b)]
        ms = self._simulate(dataclasses.replace(leaf, buffers=counts[-1]))
        self._seen.append((place, ms / max(group.first_ms, 1e-9)))
        cell = time_cell(ms)
        if cell > best_cell:
            return None
        few, enough = -1, len(counts) - 1
        while enough - few > 1:
            middle = (few + enough) // 2
            same = time_cell(self._simulate(dataclasses.replace(leaf, buffers=counts[middle]))) <= cell
            few, enough = (few, middle) if same else (middle, enough)
        return dataclasses.replace(leaf, buffers=counts[enough])

    def _fits(self, leaf: Choice, buffers: int) -> bool:
        return self.space.peak_bytes(dataclasses.replace(leaf, buffers=buffers)) <= self.device_bytes

    def _undisturbed(self, group: _Group, residency: Residencies) -> None:
        """Bound a group's plans by one with buffers for everything, in which nothing slows anything down."""
        if group.bounds == 2:
            return
        group.bounds = 2
        choice = Choice(group.policies, residency, len(residency) + MIN_BUFFERS)
        shape, profile = self.space.shape, self.space.profile
        jobs = step_jobs(shape, profile, choice, lower(shape, choice), chunk_launches=False)
        group.least_ms = max(group.least_ms, undisturbed_ms(jobs))


def _all_kept(choice: Choice) -> Choice:
    """Return the choice with all that is swapped kept."""
    keep: Policy = "keep"
    return dataclasses.replace(choice, policies=tuple(keep if each == "swap" else each for each in choice.policies))


_Place = tuple[int, int, str]


def _where(choice: Choice) -> _Place:
    """Return where a group lies in the space: blocks kept, chunks persistent, the residency of the others."""
    rest = choice.residency[-1] if choice.residency else ""
    return choice.policies.count("keep"), choice.residency.count("persistent"), rest


def _distance(one: _Place, other: _Place) -> float:
    return abs(one[0] - other[0]) + abs(one[1] - other[1]) if one[2] == other[2] else math.inf


def _bound_cell(ms: float) -> int:
    """Return the cell of a bound, which rounding must not lift above the time that it bounds."""
    return time_cell(ms * (1 - 1e-9))


# ---- where nothing fits --------------------------------------------------------------------------------------------


def budget_error(space: PlanSpace, device_bytes: int | None, host_bytes: int | None) -> BudgetError | PlanError:
    """Return the error for budgets in which no plan of ``space`` fits."""
    needs = _needs(space)
    if not needs:
        return PlanError("plan: buffers are too few for the chunks that one call uses; give more")
    in_host = [each for each in needs if host_bytes is None or each[1] <= host_bytes]
    on_device = [each for each in needs if device_bytes is None or each[0] <= device_bytes]
    name = space.shape.name
    if on_device and host_bytes is not None:
        needed = min(each[1] for each in on_device)
        other = f", or memory_budget to {format_size(min(each[0] for each in in_host))}" if in_host else ""
        return BudgetError(
            f"host_memory_budget: {format_size(host_bytes)} is too small for what {name} has to keep on the host "
            f"(parameters and optimizer states that the device has no room for): raise it to {format_size(needed)}"
            f"{other}; or let other programs leave more host memory free",
            needed,
            "host_memory_budget",
        )
    assert device_bytes is not None
    peak, _, choice = min(in_host or needs, key=lambda each: each[0])
    prediction = simulate(space.shape, space.profile, space.plan(choice))
    largest = sorted(prediction.device_bytes.items(), key=lambda each: -each[1])[:2]
    parts = " and ".join(f"{kind} ({format_size(size)})" for kind, size in largest)
    return BudgetError(
        f"memory_budget: {format_size(device_bytes)} is too small to train {name} at this batch; the smallest that "
        f"works is {format_size(peak)}, mostly {parts}, at its peak in the {prediction.peak_at}: "
        f"{_advice(largest[0][0])}",
        peak,
    )


def _needs(space: PlanSpace) -> list[tuple[int, int, Choice]]:
    """Return device bytes and host bytes of every group's smallest plan."""
    found = []
    for residency in space.residencies:
        counts = space.buffer_counts(residency)
        for policies in space.policy_patterns if counts else ():
            choice = Choice(policies, residency, counts[0])
            found.append((space.peak_bytes(choice), space.host_bytes(residency, policies), choice))
    return found


ADVICE = {
    "activations": "use a smaller batch or shorter sequences, with gradient accumulation to make up for it",
    "inside calls": "use a smaller batch or shorter sequences: one block, or the loss, needs this much at once",
    "inputs": "use a smaller batch",
    "chunk buffers": "give a smaller chunk_bytes in the plan",
}


def _advice(kind: str) -> str:
    return ADVICE.get(kind, "let the plan keep fewer chunks on the device, or use a larger one")
