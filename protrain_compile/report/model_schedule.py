"""``schedule(model)``: the schedules that a compiled model runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from protrain_compile.cost_model import Prediction
from protrain_compile.errors import ProtrainError
from protrain_compile.managed import ManagedModel
from protrain_compile.options import parse_plan
from protrain_compile.plan import Plan
from protrain_compile.profiler.measure import profile_program
from protrain_compile.report.profile_table import render_profile
from protrain_compile.report.registry import live_graphs
from protrain_compile.report.render import render, to_dict
from protrain_compile.report.units import format_bytes
from protrain_compile.runtime.compiled_graph import Binding, CompiledGraph
from protrain_compile.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Part:
    """One compiled graph of a model, and the bindings through which the model runs it."""

    graph: CompiledGraph
    bindings: tuple[Binding, ...]

    @property
    def schedule(self) -> Schedule:
        """The schedule in use."""
        return self.bindings[0].schedule


@dataclasses.dataclass(frozen=True)
class ModelSchedule:
    """All compiled graphs of one model, in the order in which they were compiled.

    A model without graph breaks has one for training and one for inference once both were called; every graph break
    adds pieces, and new input shapes may add more.
    """

    parts: tuple[Part, ...]

    @property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        """The graphs that run, by name: ``forward``, ``backward``, ``inference``; further pieces end in ``.1``, ..."""
        found: dict[str, fx.GraphModule] = {}
        for part in self.parts:
            for name, module in part.schedule.graphs.items():
                number = sum(each.partition(".")[0] == name for each in found)
                found[f"{name}.{number}" if number else name] = module
        return found

    @property
    def plan(self) -> Plan:
        """The plan in use, of the first graph that has blocks (else of the first graph)."""
        with_blocks = (part for part in self.parts if part.schedule.plan.policies)
        return next(with_blocks, self.parts[0]).schedule.plan

    def use(self, plan: Plan | str | Mapping[str, Any]) -> None:
        """Run this model by ``plan`` from the next forward on; contexts that are alive keep theirs.

        Raises:
            PlanError: If the plan does not fit one of the model's graphs; then nothing changes.
        """
        wanted = parse_plan(plan)
        chosen = [
            (binding, part.graph.schedule_for(wanted, binding)) for part in self.parts for binding in part.bindings
        ]
        for binding, schedule in chosen:
            binding.schedule = schedule

    def predict(self) -> tuple[Prediction, ...]:
        """Return what a step of the plan in use costs, graph by graph; on a GPU its templates are profiled first.

        On the CPU, bytes are what they are there, and times those of the machine whose rates come with the package.
        """
        return tuple(part.graph.predict(part.bindings[0]) for part in self.parts)

    def render(self, *, full: bool = False) -> str:
        """Return the printed schedules; ``full`` prints every block."""
        texts = [render(part.graph, part.schedule, full=full) for part in self.parts]
        breaks = [part for part in self.parts if part.graph.origin.break_reason]
        if breaks:
            calls = sum(len(part.bindings) for part in self.parts)
            texts.insert(
                0,
                f"protrain: {len(self.parts)} graphs, bound {calls} times, {len(breaks)} of them ending at a graph "
                "break: values that cross a break stay in memory until their backward, whatever the plan",
            )
        managers = {binding.managed for part in self.parts for binding in part.bindings if binding.managed is not None}
        texts += [_moved_line(managed) for managed in managers]
        return "\n".join(texts)

    def profile(self, *, refresh: bool = False) -> str:
        """Return what every part and ATen node costs on the model's device, as tables.

        What was not measured before is measured now, one block's data on the device at a time; ``refresh`` measures all
        anew.
        """
        texts = []
        for part in self.parts:
            program, artefacts = part.graph.program, part.schedule.artefacts
            texts.append(render_profile(program, profile_program(program, artefacts, nodes=True, refresh=refresh)))
        return "\n\n".join(texts)

    def to_json(self) -> str:
        """Return plans, segments and operations of all graphs as JSON text."""
        return json.dumps({"graphs": [to_dict(part.graph, part.schedule) for part in self.parts]}, indent=1)


def _moved_line(managed: ManagedModel) -> str:
    """Return what a prepared model's residency has moved so far; demand fetches are breaches of a graph's contract."""
    counters = managed.packed.counters
    return (
        f"moved     {format_bytes(counters.fetched_bytes)} fetched, {format_bytes(counters.offloaded_bytes)} "
        f"offloaded, {counters.misses} demand fetches so far; updates {managed.packed.mode} in the last backward"
    )


def schedule(model: torch.nn.Module) -> ModelSchedule:
    """Return the schedules that a compiled model runs.

    Args:
        model: What ``torch.compile(model, backend="protrain")`` returned, or the module that it was given.

    Raises:
        ProtrainError: If the model was not called yet, or was compiled by another backend.
        TypeError: If ``model`` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"schedule: model must be the compiled torch.nn.Module, got {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    parts = []
    for graph in sorted(live_graphs, key=lambda each: each.number):
        bindings = graph.bindings_of(tensors)
        if bindings:
            parts.append(Part(graph, tuple(bindings)))
    if not parts:
        raise ProtrainError(
            "schedule: this model has not run under the protrain backend yet: call "
            'torch.compile(model, backend="protrain") and run one forward'
        )
    return ModelSchedule(tuple(parts))
