"""The search: the fastest plan that fits, and the smallest budget where none does.

Branch and bound over ``plan_space``, by the figures of ``plan_rows``. A *group* is a choice of policies and residency;
its leaves are the numbers of buffers. What is looked at next is always what may still be best, by bounds that get
dearer only for what survives::

    group    busy, shared (time_bounds)      in no time
             cycle (time_bounds)             when it comes first
    leaf     halves (time_bounds)            before it is simulated
             simulate (timeline)             the exact time

Times within ``SAME_SHARE`` of each other count as equal: the plan with less memory wins, which keeps room for what no
model knows. Up to ``SURE`` simulations, more of shallow models, the result is the best of the whole space in this
order, which a test compares with brute force. Beyond, for deep models that copies and updates bound, assumptions save
most of the work, and a test measures the regret: more buffers are not slower, so a group is judged by its plan with the
most (where that is as fast as the best, by the one with the most that takes less), and the fewest that are as fast are
found by halving; and what was simulated lets expect something of others (``expectations``).

With ranks each level of sharding is searched by itself, the one that communicates least first; another takes its place
where it is faster by more than ``STAY_SHARE``, or alone fits. Then mixes of two levels, in which only what is faster by
as much is looked for.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from protrain_compile.budget_refusal import budget_error
from protrain_compile.cost_model import Prediction, rates_of, simulate
from protrain_compile.errors import BudgetError, PlanError
from protrain_compile.expectations import Expectations
from protrain_compile.lowering import Choice, lower
from protrain_compile.plan import Plan, Policy
from protrain_compile.plan_rows import Group, Pattern, PlanRows
from protrain_compile.plan_space import PlanSpace
from protrain_compile.profile import Profile
from protrain_compile.rank_shape import divided, sharding_choices, sharding_mixes
from protrain_compile.roles import RECOMPUTES
from protrain_compile.step_jobs import step_jobs
from protrain_compile.step_shape import StepShape
from protrain_compile.time_bounds import TimeBounds
from protrain_compile.timeline import repeated_ms

SAME_SHARE = 0.002
"""A tenth of what predictions are allowed to be off, rounded down: finer differences mean nothing."""

STAY_SHARE = 0.03
"""What predictions are allowed to be off: a model that fits stays on the device, all kept, unless moving it is faster
by more than this."""

SURE = 12
"""Plans that are simulated, or ruled out just before, until assumptions count. At 96 blocks, bounds alone would leave a
thousand."""

SURE_SEGMENTS = 400
"""Segments in these plans, if more: a shallow model takes as much time for more plans, and some need sixty."""

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
    for sharding in sharding_mixes(shape, given) if _may_gain(best.plan) else ():
        space = PlanSpace(divided(shape, sharding), profile, given)
        below_ms = best.prediction.step_ms / (1 + STAY_SHARE)
        best = _found(Search(space, device_bytes, host_bytes), below_ms) or best
    return best


def _may_gain(plan: Plan) -> bool:
    """Whether another sharding may be faster: memory is short, or parameters are gathered more often than updated."""
    return not plan.keeps_all or "parameters" in (plan.sharding or ())


def fits(
    shape: StepShape,
    profile: Profile,
    *,
    device_bytes: int | None,
    host_bytes: int | None,
    given: Plan | None = None,
) -> bool:
    """Return whether ``search`` finds a plan, which takes far less than to find the best; see there for arguments."""
    device = math.inf if device_bytes is None else device_bytes
    host = math.inf if host_bytes is None else host_bytes
    for each in [divided(shape, sharding) for sharding in sharding_choices(shape, given)] or [shape]:
        rows = PlanRows(PlanSpace(each, profile, given), TimeBounds(each, profile, rates_of(each, profile)))
        if any(rows.groups(pattern, device, host) for pattern in reversed(rows.patterns)):
            return True
    return False


def _least(errors: Sequence[BudgetError | PlanError]) -> BudgetError | PlanError:
    """Return the refusal that asks for least, of those that lack what the last one lacks."""
    budgets = [error for error in errors if isinstance(error, BudgetError)]
    alike = [error for error in budgets if error.budget == budgets[-1].budget]
    return min(alike, key=lambda error: error.needed_bytes, default=errors[-1])


def _search_one(
    shape: StepShape, profile: Profile, device_bytes: int | None, host_bytes: int | None, given: Plan | None
) -> Solution:
    """Return the best plan with the sharding that ``shape`` has."""
    one = Search(PlanSpace(shape, profile, given), device_bytes, host_bytes)
    found = _found(one)
    if found is None:
        raise budget_error(one.space, one.rows, device_bytes, host_bytes)
    return found


def _found(search: Search, below_ms: float = math.inf) -> Solution | None:
    """Return what a search finds; None if nothing fits and takes less than ``below_ms``."""
    choice = search.run(below_ms)
    if choice is None:
        return None
    space = search.space
    plan = space.plan(search.swap_where_faster(search.prefer_resident(choice)))
    prediction = simulate(space.shape, space.profile, plan)
    return Solution(plan, prediction, search.simulated) if prediction.step_ms < below_ms else None


def time_cell(ms: float) -> int:
    """Return the cell of a time: times in one cell differ by less than ``SAME_SHARE``."""
    return math.floor(math.log(ms) / math.log1p(SAME_SHARE)) if ms > 0 else -(10**9)


NONE_YET: Key = (1 << 62, 0)
"""Worse than any."""


class Search:
    """One search."""

    def __init__(self, space: PlanSpace, device_bytes: int | None, host_bytes: int | None) -> None:
        self.space = space
        self.device_bytes = device_bytes if device_bytes is not None else math.inf
        self.host_bytes = host_bytes if host_bytes is not None else math.inf
        self._rates = rates_of(space.shape, space.profile)
        self.bounds = TimeBounds(space.shape, space.profile, self._rates)
        self.rows = PlanRows(space, self.bounds)
        self._times: dict[Choice, float] = {}
        self._ruled_out: dict[Choice, float] = {}
        self._order = itertools.count()
        self._waiting: list[tuple[Key, int, Pattern | Group, int]] = []
        self._expected = Expectations()
        self._sure = max(SURE, SURE_SEGMENTS // len(space.shape.segments))
        self._best: Key = NONE_YET

    @property
    def simulated(self) -> int:
        """How many plans were simulated."""
        return len(self._times)

    def run(self, below_ms: float = math.inf) -> Choice | None:
        """Return the best choice; None if none fits and takes less than ``below_ms``.

        Where everything stays on the device if it is not clearly slower, only what is clearly faster is looked for.
        """
        best_ms, chosen = math.inf, self._resident()
        if chosen is not None:
            self._best = (time_cell(self._simulate(chosen) / (1 + STAY_SHARE)) + 1, 0)
        if below_ms < math.inf:
            chosen = chosen if chosen is not None and self._simulate(chosen) < below_ms else None
            self._best = min(self._best, (time_cell(below_ms), 0))
        for pattern in self.rows.patterns:
            self._wait((_bound_cell(self.rows.least_ms(pattern)), 0), pattern)
        while self._waiting and self._waiting[0][0] < self._best:
            key, _, group, buffers = heapq.heappop(self._waiting)
            if isinstance(group, Pattern):
                self._split(group)
                continue
            if self._judges and self._is_hopeless(group):
                continue
            if not buffers:
                self._expand(group)
                continue
            if self._key(group, buffers) > key:
                self._wait(self._key(group, buffers), group, buffers)
                continue
            better = self._judge(group) if self._judges else buffers
            if not better:
                continue
            ms = self._time(group, better)
            found = (time_cell(ms), group.peak_bytes(better))
            if (found, ms) < (self._best, best_ms):
                self._best, best_ms, chosen = found, ms, group.choice(better)
        return chosen

    @property
    def _judges(self) -> bool:
        """Whether assumptions count."""
        return self._best != NONE_YET and self.simulated + len(self._ruled_out) >= self._sure

    def _resident(self) -> Choice | None:
        """Return the choice that moves and recomputes nothing, where it fits and the user did not decide otherwise."""
        residency = self.space.residencies[-1]
        fewest = min(self.space.buffer_counts(residency), default=0)
        found = Choice(self.space.policy_patterns[0], residency, fewest)
        moves = set(found.residency) - {"persistent"} or set(found.policies) - {"keep"}
        return None if moves or not self._fits(found) else found

    def prefer_resident(self, choice: Choice) -> Choice:
        """Return the choice that moves and recomputes nothing, where it fits and is about as fast; else ``choice``."""
        found = self._resident()
        if found is None or self._simulate(found) > self._simulate(choice) * (1 + STAY_SHARE):
            return choice
        return found

    def swap_where_faster(self, choice: Choice) -> Choice:
        """Return a plan that swaps in place of recomputing, where it is faster and compute hides the copies.

        Hidden: within ``STAY_SHARE`` of the same plan with all that is swapped kept on the device.
        """
        if set(choice.policies).isdisjoint(RECOMPUTES):
            return choice
        best, best_ms = choice, self._simulate(choice)
        for ladder in self.space.swap_ladders:
            others = [dataclasses.replace(choice, policies=each) for each in ladder]
            for other in self._from_first_that_fits([each for each in others if self._computes_within(each, best_ms)]):
                limit = best_ms * (1 - SAME_SHARE)
                if not self._computes_within(other, best_ms) or not self._within_budgets(other):
                    break
                if self.bounds.halves_ms(other.residency, other.buffers, other.policies) >= limit:
                    break
                ms = self._simulate(other)
                if ms >= limit or ms > self._simulate(_all_kept(other)) * (1 + STAY_SHARE):
                    break
                best, best_ms = other, ms
        return best

    def _computes_within(self, choice: Choice, ms: float) -> bool:
        """Whether a choice may be faster than ``ms``, by what it computes."""
        return self.bounds.compute_ms(choice.policies, choice.residency) < ms * (1 - SAME_SHARE)

    def _from_first_that_fits(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """Return the choices, each of which takes less memory than the one before, from the first that fits on."""
        if not choices or not self._fits(choices[-1]):
            return ()
        return choices[_first(len(choices), lambda i: self._fits(choices[i])) :]

    def _fits(self, choice: Choice) -> bool:
        return self.space.peak_bytes(choice) <= self.device_bytes

    def _within_budgets(self, choice: Choice) -> bool:
        on_host = self.space.host_bytes(choice.residency, choice.policies)
        return self._fits(choice) and on_host <= self.host_bytes

    def _wait(self, key: Key, group: Pattern | Group, buffers: int = 0) -> None:
        if key < self._best:
            heapq.heappush(self._waiting, (key, next(self._order), group, buffers))

    def _split(self, pattern: Pattern) -> None:
        """Replace policies by their groups that fit."""
        for group in self.rows.groups(pattern, self.device_bytes, self.host_bytes):
            self._wait((_bound_cell(group.least_ms), group.peak_bytes(group.counts[0])), group)

    def _expand(self, group: Group) -> None:
        """Replace a group by itself under a better bound, or by its plans; where assumptions count, by the best."""
        if not group.bounds:
            group.bounds = 1
            cycle = self.bounds.cycle_ms(group.pattern.policies, group.row.residency)
            if cycle > group.least_ms:
                group.least_ms, group.first_ms, group.bound_by = cycle, cycle, "cycle"
                self._wait((_bound_cell(cycle), group.peak_bytes(group.counts[0])), group)
                return
        counts = group.counts
        if self._judges:
            cell = _bound_cell(group.bound_ms(counts[-1]))
            counts = counts[_first(len(counts), lambda i: _bound_cell(group.bound_ms(counts[i])) <= cell) :][:1]
        for buffers in counts:
            self._wait(self._key(group, buffers), group, buffers)

    def _key(self, group: Group, buffers: int) -> Key:
        """Return the best that a plan may be."""
        return _bound_cell(group.bound_ms(buffers)), group.peak_bytes(buffers)

    def _simulate(self, choice: Choice) -> float:
        """Return the time of a choice, which is simulated once."""
        if choice not in self._times:
            shape, profile = self.space.shape, self.space.profile
            jobs = step_jobs(shape, profile, choice, lower(shape, choice))
            self._times[choice] = repeated_ms(jobs, self._rates)
        return self._times[choice]

    def _time(self, group: Group, buffers: int) -> float:
        """Return the time of a plan, or a bound that rules its group out; and remember what it says of others."""
        choice = group.choice(buffers)
        known = self._times.get(choice) or self._ruled_out.get(choice)
        if known is None:
            known = self.bounds.halves_ms(choice.residency, buffers, choice.policies)
            if self._rules_out(group, known):
                self._ruled_out[choice] = known
            else:
                known = self._simulate(choice)
            self._expected.note(group, buffers, known)
        return known

    def _rules_out(self, group: Group, ms: float) -> bool:
        """Whether no plan of a group is any better if they take ``ms`` or longer."""
        best, peak = self._best
        cell = _bound_cell(ms)
        return cell > best or (cell == best and not group.below(peak + 1))

    def _is_hopeless(self, group: Group) -> bool:
        """Whether a group is not expected to be any better, by what is known of its residency."""
        best, peak = self._best
        cell = time_cell(self._expected.least_ms(group, group.counts[-1]) * (1 - SAME_SHARE))
        return cell > best or (cell == best and not group.below(peak))

    def _judge(self, group: Group) -> int:
        """Return the buffers that a group stands or falls by, once; 0 where it is not expected to be any better."""
        if group.judged:
            return 0
        group.judged = True
        best, peak = self._best
        expected = max(self._expected.judged_ms(group), self._expected.least_ms(group, group.counts[-1]))
        if time_cell(expected * (1 - SAME_SHARE)) > best:
            return 0
        counts, less = group.counts, group.below(peak)
        if time_cell(expected) >= best:  # no faster, so it must take less
            counts = less
        if not counts or time_cell(self._expected.least_ms(group, counts[-1])) > best:
            return 0
        ms = self._time(group, counts[-1])
        if counts == group.counts:
            self._expected.note_judged(group, ms)
        cell = time_cell(ms)
        if cell == best:
            counts = less
        if cell > best or not counts or self._cell(group, counts[-1]) > best:
            return 0
        if self._cell(group, counts[0]) <= cell:  # as often as not
            return counts[0]
        return counts[_first(len(counts), lambda i: self._cell(group, counts[i]) <= cell)]

    def _cell(self, group: Group, buffers: int) -> int:
        """Return the cell of a plan's time, or of its bound where the bound is past all that matters."""
        bound = _bound_cell(max(group.bound_ms(buffers), self._expected.least_ms(group, buffers)))
        return bound if bound > self._best[0] else time_cell(self._time(group, buffers))


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first of ``count`` numbers from which on ``holds``, which it does for the last."""
    return bisect.bisect_left(range(count - 1), True, key=holds)


def _all_kept(choice: Choice) -> Choice:
    """Return the choice with all that is swapped kept."""
    kept: dict[Policy, Policy] = {"swap": "keep", "swap_products": "recompute_pointwise"}
    return dataclasses.replace(choice, policies=tuple(kept.get(each, each) for each in choice.policies))


def _bound_cell(ms: float) -> int:
    """Return the cell of a bound, which rounding must not lift above the time that it bounds."""
    return time_cell(ms * (1 - 1e-9))
