"""CompiledGraph: what the backend returns for one captured graph.

A call arrives with arguments in the order of the graph's placeholders. The Parameters among them are the *binding*:
after a graph break one compiled ``Block.forward`` serves every block, and two models of one class share one compiled
graph, so nothing about parameters is baked in. Each binding has a schedule; a context remembers the one its forward ran
with::

    forward(args)   binding of args -> schedule.graphs["forward"] -> outputs + token
    backward(args)  token -> context -> context.schedule.graphs["backward"] -> gradients
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from passes import PassRecord, schedule_pipeline
from protrain_compile import compat
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.options import Options
from protrain_compile.plan import Plan
from protrain_compile.program import InputKind, Program
from protrain_compile.runtime.context import Context, ContextTable
from protrain_compile.schedule import Schedule

log = logging.getLogger("protrain_compile.runtime")


@dataclasses.dataclass(eq=False)
class Binding:
    """The Parameters that one caller passes, held weakly, and the schedule that serves them."""

    parameters: tuple[weakref.ref[Any], ...]
    schedule: Schedule


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a captured graph comes from: its order among the model's graphs, and the graph break that ended it."""

    break_reason: str = ""
    break_place: str = ""


class CompiledGraph:
    """One captured graph with its artefacts, schedules, bindings and contexts."""

    _numbers = itertools.count()

    def __init__(self, program: Program, options: Options, origin: Origin, records: Sequence[PassRecord]) -> None:
        start = time.perf_counter()
        self.number = next(self._numbers)
        self.program = program
        self.origin = origin
        self.records = tuple(records)
        self.contexts = ContextTable()
        self._options = options
        self._artefacts = ArtefactSet(options.compile)
        self._schedules: dict[Plan, Schedule] = {}
        self._bindings: dict[tuple[int, ...], Binding] = {}
        self._parameter_positions = [i for i, source in enumerate(program.inputs) if source.kind is InputKind.PARAMETER]
        self.default = self.schedule_for(options.plan)
        self.build_s = time.perf_counter() - start

    def schedule_for(self, plan: Plan) -> Schedule:
        """Return the schedule that carries out ``plan``; artefacts that it needs are compiled.

        Raises:
            PlanError: If the plan does not fit this graph's blocks.
        """
        fitted = plan.fit(self.program.block_names)
        if fitted not in self._schedules:
            schedule = Schedule(self.program, fitted, self._artefacts)
            self.records += schedule_pipeline(print_after=self._options.print_after).run(schedule)
            self._artefacts.compile()
            self._schedules[fitted] = schedule
        return self._schedules[fitted]

    @property
    def compiled_artefacts(self) -> int:
        """How many artefacts were compiled so far."""
        return self._artefacts.compiled_count

    def bindings_of(self, tensors: Iterable[torch.Tensor]) -> list[Binding]:
        """Return the bindings that hold any of ``tensors``."""
        wanted = {id(tensor) for tensor in tensors}
        return [
            binding
            for binding in self._bindings.values()
            if any((each := ref()) is not None and id(each) in wanted for ref in binding.parameters)
        ]

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward; return its outputs and the token that keeps its context alive."""
        schedule = self._bind(arguments).schedule
        needed = schedule.backward_inputs
        primals = [arguments[i] for i in needed.primals]
        with torch.no_grad():
            results = list(schedule.graphs["forward"].forward(arguments))
        split = len(results) - needed.num_kept
        context = Context(schedule, primals, results[split:])
        del results[split:]
        results.append(self.contexts.open(context))
        return results

    def backward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the backward of the forward whose token comes first in ``arguments``; the tangents follow."""
        context = self.contexts.find(arguments[0])
        schedule = context.schedule
        boxed = context.arguments(keep=compat.keeps_graph())
        boxed += [arguments[1 + i] for i in schedule.backward_inputs.tangents]
        arguments.clear()
        with torch.no_grad():
            return schedule.graphs["backward"].forward(boxed)  # type: ignore[no-any-return]

    def inference(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the forward without a backward."""
        with torch.no_grad():
            return self._bind(arguments).schedule.graphs["inference"].forward(arguments)  # type: ignore[no-any-return]

    def _bind(self, arguments: Sequence[Any]) -> Binding:
        key = tuple([id(arguments[i]) for i in self._parameter_positions])
        binding = self._bindings.get(key)
        if binding is None:
            # A dead Parameter's id may be reused: its binding goes with it.
            drop = self._dropper(key)
            parameters = tuple(weakref.ref(arguments[i], drop) for i in self._parameter_positions)
            binding = self._bindings[key] = Binding(parameters, self.default)
        return binding

    def _dropper(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        bindings = self._bindings

        def drop(_: Any) -> None:
            bindings.pop(key, None)

        return drop
