"""Agreement: what the ranks of a prepared model must have in common before one of its graphs runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterable

from protrain_compile.plan import Plan
from protrain_compile.planner import Budgets
from protrain_compile.profile import CollectiveCost
from protrain_compile.runtime.collective_rates import measure_collectives
from protrain_compile.runtime.ranks import Ranks
from protrain_compile.schedule import Schedule
from protrain_compile.schedule_digest import collective_lines

BUDGETS = "the memory budgets"
PLAN = "the plan of rank 0"
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
        self._lines: set[tuple[str, ...]] = set()
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
        return dataclasses.replace(own, device_bytes=_least(device), host_bytes=_least(host))

    def measure(self) -> None:
        """Measure the collectives, once, with all ranks."""
        if self._ranks is not None and not self.collectives:
            self.collectives = measure_collectives(self._ranks)

    def plan(self, own: Plan, graph: Hashable) -> Plan:
        """Return the plan that all ranks agreed on for a graph: rank 0's, told when the graph is first met.

        Args:
            own: What this rank would follow.
            graph: What tells graphs apart.

        Raises:
            RankError: If another rank has no plan.
        """
        if self._ranks is None:
            return own
        if graph not in self._plans:
            self._plans[graph] = Plan.from_json(self._ranks.exchange(own.to_json(), PLAN)[0])
        return self._plans[graph]

    def refuse_plan(self, error: Exception, graph: Hashable) -> None:
        """Tell the ranks that are about to agree on a graph's plan that this one has none."""
        if self._ranks is not None and self.is_new(graph):
            self._ranks.refuse(str(error), PLAN)

    def allows(self, schedule: Schedule) -> bool:
        """Whether a rank may follow a schedule alone: the others do not see what is between its collectives."""
        return self._ranks is None or tuple(collective_lines(schedule)) in self._lines

    def check(self, schedule: Schedule) -> None:
        """Check that every rank has this schedule's chunks and collectives.

        Raises:
            RankError: On every rank, if they differ.
        """
        lines = tuple(collective_lines(schedule))
        if self._ranks is not None and lines not in self._lines:
            self._ranks.agree(lines, "the schedule")
            self._lines.add(lines)


def _least(sizes: Iterable[int | None]) -> int | None:
    return min((each for each in sizes if each is not None), default=None)
