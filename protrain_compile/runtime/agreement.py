"""Agreement: what the ranks of a prepared model must have in common before one of its graphs runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Sequence

from protrain_compile.byte_text import format_needed
from protrain_compile.errors import BudgetError
from protrain_compile.plan import Plan
from protrain_compile.planner import Budgets
from protrain_compile.profile import CollectiveCost
from protrain_compile.runtime.collective_rates import measure_collectives
from protrain_compile.runtime.ranks import Ranks, least_known
from protrain_compile.schedule import Schedule
from protrain_compile.schedule_digest import collective_lines

BUDGETS = "the memory budgets"
PLAN = "the plan of all ranks"
"""What ranks wait for, as messages say it."""


class Agreement:
    """Plans and schedules that all ranks follow.

    A rank may compile a graph anew alone, for another length: nobody is asked again about what was agreed. It may also
    plan anew alone, with its own memory, as long as the collectives stay those that were agreed (``allows``).

    Attributes:
        collectives: What was measured of the ranks' collectives.

    Args:
        ranks: The ranks; None for one, which agrees with itself.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._plans: dict[Hashable, Plan] = {}
        self._lines: dict[Hashable, set[tuple[str, ...]]] = {}
        self.collectives: tuple[CollectiveCost, ...] = ()

    def is_new(self, graph: Hashable) -> bool:
        """Whether all ranks are about to agree on a graph's plan."""
        return self._ranks is not None and graph not in self._plans

    def budgets(self, own: Budgets) -> Budgets:
        """Return the smallest budgets of all ranks.

        Raises:
            RankError: If another rank has none.
        """
        assert self._ranks is not None
        every = self._ranks.exchange(json.dumps([own.device_bytes, own.host_bytes]), BUDGETS)
        device, host = zip(*map(json.loads, every), strict=True)
        return dataclasses.replace(own, device_bytes=least_known(device), host_bytes=least_known(host))

    def measure(self) -> None:
        """Measure the collectives, once, with all ranks."""
        if self._ranks is not None and not self.collectives:
            self.collectives = measure_collectives(self._ranks)

    def plan(self, own: Plan, graph: Hashable, values_bytes: int, lacks: Callable[[Plan], int] = lambda _: 0) -> Plan:
        """Return the plan that all ranks agreed on for a graph when it was first met.

        It is that of the rank whose step has the most values: planned for the smallest budgets of all, it fits the
        others too. Where it does not after all (sizes may differ in several ways), the next that fits all.

        Args:
            own: What this rank would follow.
            graph: What tells graphs apart.
            values_bytes: Bytes of all values of this rank's step.
            lacks: Returns the budget that this rank would need for a plan that does not fit it; 0 if it fits.

        Raises:
            BudgetError: On every rank, if no rank's plan fits all.
            RankError: If another rank has no plan.
        """
        if self._ranks is None:
            return own
        if graph not in self._plans:
            every = map(json.loads, self._ranks.exchange(json.dumps([values_bytes, own.to_json()]), PLAN))
            texts = dict.fromkeys(text for _, text in sorted(every, key=lambda each: -each[0]))  # first of equal ones
            self._plans[graph] = self._first_that_fits([Plan.from_json(text) for text in texts], graph, lacks)
        return self._plans[graph]

    def _first_that_fits(self, plans: Sequence[Plan], graph: Hashable, lacks: Callable[[Plan], int]) -> Plan:
        assert self._ranks is not None
        if len(plans) == 1:
            return plans[0]  # every rank found it within its own budgets
        needed = []
        for plan in plans:
            try:
                own = lacks(plan)
            except Exception as error:
                self.refuse_plan(error, graph)
                raise
            needed.append(max(map(int, self._ranks.exchange(str(own), PLAN))))
            if not needed[-1]:
                return plan
        raise BudgetError(
            "memory_budget: the ranks' first batches differ in size so that no rank's plan fits all; it must be at "
            f"least {format_needed(min(needed))} on every rank, or the first batches of one size",
            min(needed),
        )

    def refuse_plan(self, error: Exception, graph: Hashable) -> None:
        """Tell the ranks that are about to agree on a graph's plan that this one has none."""
        if self._ranks is not None and self.is_new(graph):
            self._ranks.refuse(str(error), PLAN)

    def allows(self, schedule: Schedule, graph: Hashable) -> bool:
        """Whether a rank may follow a schedule alone: the others do not see what is between its collectives."""
        return self._ranks is None or tuple(collective_lines(schedule)) in self._lines.get(graph, ())

    def check(self, schedule: Schedule, graph: Hashable) -> None:
        """Check that every rank has this schedule's chunks and collectives.

        Raises:
            RankError: On every rank, if they differ.
        """
        lines, agreed = tuple(collective_lines(schedule)), self._lines.setdefault(graph, set())
        if self._ranks is not None and lines not in agreed:
            self._ranks.agree(lines, "the schedule")
            agreed.add(lines)
