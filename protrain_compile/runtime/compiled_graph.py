"""CompiledGraph: what the backend returns for one captured graph.

A call arrives with arguments in the order of the graph's placeholders. The Parameters among them are the *binding*:
after a graph break one compiled ``Block.forward`` serves every block, and two models of one class share one compiled
graph, so nothing about parameters is baked in. Each binding has a schedule; a context remembers the one its forward ran
with::

    forward(args)   binding of args -> schedule.graphs["forward"] -> outputs + token
    backward(args)  token -> context -> context.schedule.graphs["backward"] -> gradients
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

import passes  # either package may be imported first
from passes.interface import PassRecord
from protrain_compile import compat
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.byte_text import format_size
from protrain_compile.chunks import ChunkBinding
from protrain_compile.cost_model import Prediction
from protrain_compile.errors import ProtrainError, RankError
from protrain_compile.guards import ManagedParameter
from protrain_compile.managed import ManagedModel
from protrain_compile.options import Options
from protrain_compile.plan import Plan
from protrain_compile.planner import choose_loss
from protrain_compile.program import InputKind, Program, fake_value
from protrain_compile.runtime.context import Context, ContextTable
from protrain_compile.runtime.planning import Call, Planned, Planning, running
from protrain_compile.runtime.swap import SwapSpace, make_swap_space
from protrain_compile.schedule import Schedule
from protrain_compile.sizes import make_zeros, size_bytes, sizes_at

log = logging.getLogger("protrain_compile.runtime")


@dataclasses.dataclass(eq=False)
class Binding:
    """The Parameters that one caller passes, held weakly, the schedule that serves them, and who manages them.

    ``sizes`` are the symbolic sizes that the schedule was planned for: calls of smaller ones need no more memory.
    """

    parameters: tuple[weakref.ref[Any], ...]
    schedule: Schedule
    managed: ManagedModel | None = None
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a captured graph comes from: its order among the model's graphs, and the graph break that ended it."""

    break_reason: str = ""
    break_place: str = ""


class CompiledGraph:
    """One captured graph with its artefacts, schedules, bindings and contexts."""

    _numbers = itertools.count()

    def __init__(
        self,
        program: Program,
        options: Options,
        origin: Origin,
        records: Sequence[PassRecord],
        announce: Callable[[CompiledGraph, Schedule], None],
    ) -> None:
        start = time.perf_counter()
        self.number = next(self._numbers)
        self.program = program
        self.origin = origin
        self.records = tuple(records)
        self.contexts = ContextTable()
        self._options = options
        self._artefacts = ArtefactSet(options.compile)
        self._announce = announce
        self._schedules: dict[Any, Schedule] = {}
        self._swap: SwapSpace | None = None
        self._planning = Planning(program, options, self._artefacts)
        self._planned: dict[Schedule, Planned] = {}
        self._told_of_tangents = False
        self._bindings: dict[tuple[int, ...], Binding] = {}
        self._parameter_positions = [i for i, source in enumerate(program.inputs) if source.kind is InputKind.PARAMETER]
        self._symbol_positions = [i for i, source in enumerate(program.inputs) if source.kind is InputKind.SYMBOL]
        self._frozen_positions = [
            i for i in self._parameter_positions if program.inputs[i].frozen and not program.inputs[i].managed
        ]
        self.default = self.schedule_for(options.plan or Plan.uniform())
        self.build_s = time.perf_counter() - start

    def schedule_for(self, plan: Plan, binding: Binding | None = None) -> Schedule:
        """Return the schedule that carries out ``plan`` for a binding; artefacts that it needs are compiled.

        Raises:
            PlanError: If the plan does not fit this graph's blocks or the model's chunks.
        """
        schedule = self._write(plan, binding)
        if binding is not None and binding.managed is not None:
            binding.managed.agreement.check(schedule, self._identity(binding))
        return schedule

    def _write(self, plan: Plan, binding: Binding | None) -> Schedule:
        fitted = plan.fit(self.program.block_names)
        fitted = dataclasses.replace(fitted, loss=choose_loss(self.program, fitted))
        chunks = self._chunks(plan, binding) if binding is not None and binding.managed is not None else None
        key = (fitted, None if chunks is None else chunks.key)
        if key not in self._schedules:
            schedule = Schedule(self.program, fitted, self._artefacts, chunks=chunks)
            self.records += passes.schedule_pipeline(print_after=self._options.print_after).run(schedule)
            self._artefacts.compile()
            self._schedules[key] = schedule
        return self._schedules[key]

    def _chunks(self, plan: Plan, binding: Binding) -> ChunkBinding:
        assert binding.managed is not None
        call = self._call(binding)
        return binding.managed.bind(call.places, call.first_uses, plan, call.read_as)

    def _call(self, binding: Binding) -> Call:
        places = {}
        for position, ref in zip(self._parameter_positions, binding.parameters, strict=True):
            parameter = ref()
            if isinstance(parameter, ManagedParameter):
                places[position] = parameter._index
        position_of = {node: i for i, node in enumerate(self.program.primals)}
        first_uses = [[position_of[n] for n in segment.inputs if n in position_of] for segment in self.program.segments]
        read_as = {i: self.program.inputs[i].travels or self.program.primals[i].meta["val"].dtype for i in places}
        return Call(places, first_uses, read_as, binding.managed, binding.sizes)

    @property
    def plans_when_called(self) -> bool:
        """Whether there is something to plan, which is done when parameters are known."""
        managed = any(source.managed for source in self.program.inputs)
        return managed or (self._planning.is_bounded() and self._options.plan is None)

    def planned(self, schedule: Schedule) -> Planned | None:
        """Return what was planned for a schedule; None for one that the user forced."""
        return self._planned.get(schedule)

    def predict(self, binding: Binding) -> Prediction:
        """Return what a step of a binding costs by the schedule in use."""
        return self._planning.predict(self._call(binding), binding.schedule.plan)

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
        binding = self._bind(arguments)
        self._check_frozen(arguments)
        schedule = binding.schedule
        planned = self._planned.get(schedule)
        needed = schedule.backward_inputs
        primals = [_unattached(arguments[i]) for i in needed.primals]
        watched = [_unattached(arguments[i]) for i in needed.kept_arguments if i is not None]
        swap = self._swap_space(schedule, binding.managed)
        sizes = [arguments[i] for i in self._symbol_positions]
        with torch.no_grad(), running(planned, begins=True, ends=False), _settling(swap):
            results = list(schedule.graphs["forward"].forward(_with_executors(binding.managed, swap, arguments)))
        split = len(results) - needed.num_kept
        # An output will own the token, and the token this context: hold the memory of outputs, not the outputs.
        outputs = [None if i is None else results[i].detach() for i in needed.kept_outputs]
        kept = [
            value if i is None else value.detach()
            for value, i in zip(results[split:], needed.kept_outputs, strict=True)
        ]
        context = Context(schedule, primals, kept, [*outputs, *watched], binding.managed, swap, sizes)
        del results[split:]
        results.append(self.contexts.open(context))
        return results

    def backward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the backward of the forward whose token comes first in ``arguments``; the tangents follow."""
        context = self.contexts.find(arguments[0])
        schedule, managed, swap = context.schedule, context.managed, context.swap
        keep = compat.keeps_graph()
        boxed = context.arguments(keep=keep)
        boxed += self._tangents(arguments[1:], context)
        arguments.clear()
        if swap is not None:
            boxed.insert(0, swap)
        graph = schedule.graphs["backward"]
        with torch.no_grad(), running(self._planned.get(schedule), begins=False, ends=True), _settling(swap):
            if managed is None:
                return graph.forward(boxed)  # type: ignore[no-any-return]
            managed.begin_backward(context, keep=keep)
            boxed.insert(0, managed.packed)
            try:
                return graph.forward(boxed)  # type: ignore[no-any-return]
            except BaseException:
                managed.backward_raised()
                raise

    def _tangents(self, given: Sequence[Any], context: Context) -> list[Any]:
        """Return the tangents that the backward takes; zeros for those that autograd does not have.

        Those that the backward is planned without may be None: all of them, or none.
        """
        absent = self.program.absent_tangents
        come = [given[i] for i in absent if given[i] is not None]
        may_lack = frozenset[int]() if come else absent
        tangents = self.program.tangents
        if come:
            self._tell_of(come, context.schedule)
        with sizes_at(self.program.symbol_values(context.sizes)):
            return [
                make_zeros(fake_value(tangents[i])) if given[i] is None and i not in may_lack else given[i]
                for i in context.schedule.backward_inputs.tangents
            ]

    def _tell_of(self, tangents: Sequence[torch.Tensor], schedule: Schedule) -> None:
        """Say once that tangents came which a plan for a budget does not count."""
        planned = self._planned.get(schedule)
        if self._told_of_tangents or planned is None or planned.decision.prediction is None:
            return
        self._told_of_tangents = True
        log.warning(
            "something was computed from what %s returns besides its loss: its gradient takes %s, which the plan does "
            "not count; if memory runs out, set memory_budget lower by as much",
            self.program.name,
            format_size(size_bytes(tangents)),
        )

    def inference(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the forward without a backward."""
        binding = self._bind(arguments)
        graph = binding.schedule.graphs["inference"]
        with torch.no_grad(), running(self._planned.get(binding.schedule), begins=True, ends=True):
            return graph.forward(_with_executors(binding.managed, None, arguments))  # type: ignore[no-any-return]

    def _swap_space(self, schedule: Schedule, managed: ManagedModel | None) -> SwapSpace | None:
        """Return where ``schedule`` swaps to, with room for one forward; None if it does not swap."""
        if not schedule.swapped_bytes:
            return None
        if managed is None and self._swap is None:
            self._swap = make_swap_space(self.program.device)
        space = managed.swap_space() if managed is not None else self._swap
        assert space is not None
        space.reserve(schedule.swapped_bytes)
        return space

    def _bind(self, arguments: Sequence[Any]) -> Binding:
        key = tuple([id(arguments[i]) for i in self._parameter_positions])
        binding = self._bindings.get(key)
        if binding is None:
            return self._new_binding(key, arguments)
        if self._symbol_positions and binding.schedule in self._planned:
            self._plan_sizes(binding, arguments)
        return binding

    def _check_frozen(self, arguments: Sequence[Any]) -> None:
        """Refuse a parameter that was frozen when the graph was captured: its gradient would be lost without a word.

        PyTorch 2.11 does not capture a graph anew when ``requires_grad`` changes; newer versions do.
        """
        for position in self._frozen_positions:
            if arguments[position].requires_grad:
                raise ProtrainError(
                    f"{self.program.inputs[position].name} was frozen when the model was compiled and requires a "
                    "gradient now: call torch._dynamo.reset() after requires_grad_(True), to have it compiled anew"
                )

    def _new_binding(self, key: tuple[int, ...], arguments: Sequence[Any]) -> Binding:
        # A dead Parameter's id may be reused: its binding goes with it.
        drop = self._dropper(key)
        given = [arguments[i] for i in self._parameter_positions]
        managers = {parameter._home for parameter in given if isinstance(parameter, ManagedParameter)}
        if len(managers) > 1:
            raise ProtrainError("one compiled call uses parameters of two prepared models; compile and call them apart")
        binding = Binding(tuple(weakref.ref(parameter, drop) for parameter in given), self.default)
        if managers:
            managed = managers.pop()
            assert isinstance(managed, ManagedModel)
            binding.managed = managed
        self._planning.check_given(binding.managed)
        if self.plans_when_called:
            binding.sizes = tuple(arguments[i] for i in self._symbol_positions)
            self._plan(binding)
        self._bindings[key] = binding
        return binding

    def _plan(self, binding: Binding) -> None:
        """Decide and write the schedule of a new binding; those of a model that is not prepared share one."""
        shared = next((each for each in self._planned if each.chunks is None), None)
        if binding.managed is None and shared is not None and not binding.sizes:
            binding.schedule = shared
            return
        managed = binding.managed
        planned = self._plan_with_others(binding, managed) if managed else self._planning.plan(self._call(binding))
        before, binding.schedule = binding.schedule, self.schedule_for(planned.decision.plan, binding)
        self._planned[binding.schedule] = planned
        if binding.schedule is not before or len(self._planned) == 1:
            self._announce(self, binding.schedule)

    def _plan_with_others(self, binding: Binding, managed: ManagedModel) -> Planned:
        """Plan for a prepared model: all its ranks together at first, later each alone as far as the others allow."""
        agreement, graph = managed.agreement, self._identity(binding)
        call = dataclasses.replace(self._call(binding), together=agreement.is_new(graph))
        try:
            planned = self._planning.plan(call)
        except RankError:
            raise
        except Exception as error:
            agreement.refuse_plan(error, graph)
            raise
        plan = planned.decision.plan
        values_bytes = self._planning.values_bytes(call) if call.together else 0
        agreed = agreement.plan(
            plan, graph, values_bytes, lambda other: self._planning.follow(call, planned, other).lacking_bytes
        )
        if call.together or plan == agreed or planned.prediction is None:
            return self._planning.follow(call, planned, agreed)
        if agreement.allows(self._write(plan, binding), graph):
            return planned
        return self._planning.follow_alone(call, planned, agreed)

    def _identity(self, binding: Binding) -> Hashable:
        """Return what tells this graph and its parameters from others on every rank, whatever the sizes of a call.

        A rank may have captured it anew for other sizes: only what no size changes counts.
        """
        places = tuple(sorted(self._call(binding).places.values()))
        return self.program.block_names, self.program.differentiable, places, self.origin.break_place

    def _plan_sizes(self, binding: Binding, arguments: Sequence[Any]) -> None:
        """Plan anew where a call is larger than any before; the plan is then for the largest of every size."""
        sizes = tuple(arguments[i] for i in self._symbol_positions)
        if any(new > known for new, known in zip(sizes, binding.sizes, strict=True)):
            known, binding.sizes = binding.sizes, tuple(map(max, sizes, binding.sizes))
            try:
                self._plan(binding)
            except BaseException:
                binding.sizes = known
                raise

    def _dropper(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        bindings = self._bindings

        def drop(_: Any) -> None:
            bindings.pop(key, None)

        return drop


def _unattached(value: Any) -> Any:
    """Return ``value``; of the result of differentiable operations, its memory and version without its history."""
    return value.detach() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _with_executors(managed: ManagedModel | None, swap: SwapSpace | None, arguments: list[Any]) -> list[Any]:
    """Return the arguments of a schedule graph: who carries its operations out comes first. Empties ``arguments``."""
    if managed is not None:
        managed.begin_forward()
    executors = [each for each in (managed.packed if managed is not None else None, swap) if each is not None]
    boxed = [*executors, *arguments]
    arguments.clear()
    return boxed


@contextlib.contextmanager
def _settling(swap: SwapSpace | None) -> Iterator[None]:
    """Settle copies that an exception leaves under way."""
    try:
        yield
    except BaseException:
        if swap is not None:
            swap.settle()
        raise
