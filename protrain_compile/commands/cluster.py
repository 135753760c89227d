"""Arguments that say how many ranks train a model and how they are connected, and what is told of them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from protrain_compile.commands.arguments import at_least
from protrain_compile.commands.outlook import Machine, Step
from protrain_compile.errors import BudgetError, OptionError
from protrain_compile.links import DEFAULT, Links
from protrain_compile.report.units import format_bytes, format_ms
from protrain_compile.shards import ALONE, World
from protrain_compile.solver import Solution


def add_ranks(parser: Any) -> None:
    """Add the arguments."""
    parser.add_argument("--ranks", type=at_least(1), default=1, metavar="N", help="ranks, a device each (1)")
    parser.add_argument("--nodes", type=at_least(1), default=1, metavar="M", help="machines that they are on (1)")
    parser.add_argument("--links", metavar="FILE", help=f"a link table, or {DEFAULT} (the default)")


def worlds_of(parsed: argparse.Namespace) -> tuple[World, ...]:
    """Return the ways in which the ranks may share a model: all divide it, or, on several nodes, those of a node.

    Raises:
        OptionError: If the ranks do not spread evenly over the nodes.
    """
    ranks, nodes = parsed.ranks, parsed.nodes
    if ranks % nodes:
        raise OptionError(f"--ranks={ranks} do not spread evenly over --nodes={nodes}")
    flat = World(ranks, 1, nodes)
    return (flat,) if nodes == 1 or ranks == nodes else (flat, World(ranks // nodes, nodes, nodes))


def linked(machine: Machine, parsed: argparse.Namespace) -> Machine:
    """Return the machine with the links that the arguments name, in place of what was measured of its collectives.

    Raises:
        ProfileError: If there is no such table.
    """
    if parsed.links is None:
        return machine
    hardware = dataclasses.replace(machine.hardware, links=Links.load(parsed.links), collectives=())
    return dataclasses.replace(machine, hardware=hardware)


@dataclasses.dataclass(frozen=True)
class Alone:
    """What one rank by itself would do, within the same budgets.

    Attributes:
        step_ms: Time of its step; None if no plan fits.
    """

    step_ms: float | None

    @classmethod
    def of(cls, step: Step, machine: Machine) -> Alone:
        """Plan the step for one rank."""
        try:
            return cls(step.plan(dataclasses.replace(machine, worlds=(ALONE,))).prediction.step_ms)
        except BudgetError:
            return cls(None)

    def efficiency(self, solution: Solution) -> float | None:
        """Return what part of one rank's speed each rank has; None where one rank alone cannot train the model."""
        return None if self.step_ms is None else self.step_ms / solution.prediction.step_ms


def rank_lines(world: World, solution: Solution, alone: Alone, tokens_per_s: float | None) -> list[str]:
    """Return what is told of the ranks."""
    prediction, kept = solution.prediction, alone.efficiency(solution)
    gathered, reduced = (prediction.traffic_bytes.get(each, 0) for each in ("all_gather", "reduce_scatter"))
    against = "one rank alone does not fit" if kept is None else f"each has {kept:.0%} of the speed of one rank alone"
    if alone.step_ms is not None:
        against += f" (step {format_ms(alone.step_ms)})"
    tokens = f"{tokens_per_s:,.0f} tokens/s a rank, {tokens_per_s * world.size:,.0f} in all; " if tokens_per_s else ""
    return [
        f"ranks     {world_text(world)}",
        f"speed     {tokens}{against}",
        f"traffic   a rank receives {format_bytes(gathered)} by all_gather and {format_bytes(reduced)} by "
        "reduce_scatter in a step",
    ]


def world_text(world: World) -> str:
    """Return ``64 on 8 nodes; chunks divided among the 8 of a node, replicated across nodes: mesh (8, 8)``."""
    nodes = f"{world.size} on {world.nodes} node{'s' if world.nodes > 1 else ''}"
    if world.replicas == 1:
        return f"{nodes}; chunks divided among all"
    mesh = f"mesh ({world.replicas}, {world.ranks})"
    return f"{nodes}; chunks divided among the {world.ranks} of a node, replicated across nodes: {mesh}"


def ranks_dict(world: World, solution: Solution, alone: Alone, tokens_per_s: float | None) -> dict[str, Any]:
    """Return the same as JSON-ready data."""
    return {
        "ranks": world.size,
        "nodes": world.nodes,
        "divided_among": world.ranks,
        "tokens_per_s_of_all": tokens_per_s * world.size if tokens_per_s else None,
        "one_rank_step_ms": alone.step_ms,
        "efficiency": alone.efficiency(solution),
        "traffic_bytes": dict(solution.prediction.traffic_bytes),
    }
