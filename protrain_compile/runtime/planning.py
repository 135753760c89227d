"""Planning at run time: gathers what the planner needs to know when a compiled graph is first called with parameters.

::

    step_shape    from the graph's Program, and the chunks that the model has or will have
    budgets       of the device (``device_budget``) and the host, less what the model holds already
    profiles      estimated, or measured on the device once; the templates of a graph serve all its bindings
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from protrain_compile.artefacts import ArtefactSet
from protrain_compile.byte_text import format_needed, format_size
from protrain_compile.cost_model import Prediction, simulate
from protrain_compile.errors import BudgetError, PlanError
from protrain_compile.lowering import Choice
from protrain_compile.managed import ManagedModel
from protrain_compile.memory_model import host_bytes, standing_bytes, total
from protrain_compile.options import Options
from protrain_compile.packing import lay_out, training_of
from protrain_compile.plan import Loss, Plan
from protrain_compile.planner import (
    Budgets,
    Decision,
    Fixed,
    choose_loss,
    complete,
    decide,
    decide_with_loss,
    is_decided,
    loss_forms,
)
from protrain_compile.profile import Format, HardwareProfile, Profile
from protrain_compile.profiler.estimate import estimate_profile
from protrain_compile.profiler.measure import profile_program
from protrain_compile.profiler.update_rates import FORMATS
from protrain_compile.program import InputKind, Program, fake_value
from protrain_compile.rank_shape import divided
from protrain_compile.runtime.device_budget import DeviceBudget, DeviceMemoryError, Usage, measure_budget
from protrain_compile.runtime.device_memory import PeakWatch, watch_of
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.shape_reader import step_shape
from protrain_compile.sizes import size_bytes, sizes_at
from protrain_compile.step_shape import StepShape
from protrain_compile.updates.formats import StateFormat

log = logging.getLogger("protrain_compile.planning")

STAND_IN = "h200"
"""The hardware profile whose rates an estimate uses; only its bytes are believed, and they depend on no rate."""

UNSEEN_SHARE = 0.5
"""Of the budget, what an evaluation may take that comes before any training: activations of a step are unknown then."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What one call of a compiled graph binds.

    Attributes:
        places: Index of the managed parameter, by position among the arguments.
        first_uses: Positions that each segment uses, in execution order.
        read_as: Data type in which the graph reads each of the positions.
        managed: Who manages the parameters; None for a model that is not prepared.
        sizes: The values of symbolic sizes, in the order of the arguments that they are.
        together: Whether all ranks plan it now: the smallest budget of all counts then.
    """

    places: Mapping[int, int]
    first_uses: Sequence[Sequence[int]]
    read_as: Mapping[int, torch.dtype]
    managed: ManagedModel | None = None
    sizes: tuple[int, ...] = ()
    together: bool = False


class Planned:
    """What was decided for one schedule, and its watch while it runs.

    Args:
        decision: The plan and its prediction.
        budget: The device memory of this process.
        device: The device.
        limit_bytes: What the step may take on the device; None where nothing bounds it.
    """

    def __init__(
        self, decision: Decision, budget: DeviceBudget, device: torch.device, limit_bytes: int | None = None
    ) -> None:
        self.decision = decision
        self.budget = budget
        self.device = device
        self.limit_bytes = limit_bytes
        self.watch: PeakWatch | None = None
        if decision.measured and decision.prediction is not None:
            self.watch = watch_of(device, decision.prediction.peak_bytes + budget.other_bytes, budget.reserve_bytes)

    @property
    def lacking_bytes(self) -> int:
        """The budget that the step would need, if it exceeds what it may take; 0 if it does not."""
        if self.prediction is None or self.limit_bytes is None or self.prediction.peak_bytes <= self.limit_bytes:
            return 0
        return self.prediction.peak_bytes + self.budget.other_bytes

    @property
    def prediction(self) -> Prediction | None:
        """What a step is predicted to cost."""
        return self.decision.prediction

    def explain(self, error: BaseException) -> DeviceMemoryError:
        """Return the error that says in numbers what ran out."""
        assert self.prediction is not None
        now = Usage.now(self.device) if self.device.type == "cuda" else None
        return self.budget.explain(error, self.prediction.peak_bytes + self.budget.other_bytes, now)


@contextlib.contextmanager
def running(planned: Planned | None, *, begins: bool, ends: bool) -> Iterator[None]:
    """Watch a graph of a planned schedule while it runs, and say in numbers what ran out where memory does.

    Args:
        planned: What was decided for the schedule; None for one that the user forced.
        begins: Whether a step begins with the graph.
        ends: Whether a step ends with it.
    """
    watch = planned.watch if planned is not None else None
    if watch is not None and begins:
        watch.begin()
    try:
        yield
    except torch.OutOfMemoryError as error:
        if planned is None or planned.prediction is None or isinstance(error, DeviceMemoryError):
            raise
        raise planned.explain(error) from error
    if watch is not None and ends:
        watch.end()


class Planning:
    """Plans the bindings of one compiled graph."""

    def __init__(self, program: Program, options: Options, artefacts: ArtefactSet) -> None:
        self._program = program
        self._options = options
        self._artefacts = artefacts
        self.device = program.device

    def is_bounded(self, managed: ManagedModel | None = None) -> bool:
        """Whether anything bounds the memory of a step."""
        prepared = managed is not None and managed.preparation.memory_budget is not None
        return self._options.memory_budget is not None or prepared or self.device.type == "cuda"

    def plan(self, call: Call) -> Planned:
        """Return the plan of a call, for the sizes that it has.

        Raises:
            BudgetError: If no plan fits; nothing has been allocated.
            PlanError: If the plan that the user gave does not fit the model.
        """
        with sizes_at(self._program.symbol_values(call.sizes)):
            return self._plan(call)

    def _plan(self, call: Call) -> Planned:
        managed = call.managed
        given = self._given(managed)
        unbounded = Planned(Decision(given or Plan.uniform()), DeviceBudget(None), self.device)
        if not call.together and not self.is_bounded(managed):
            return unbounded
        if call.together and managed is not None and self.device.type == "cuda":
            managed.agreement.measure()  # before the budget: the ranks' connections take memory too
        forms, fixed = loss_forms(self._program, given), _fixed(managed)
        shape = self.shape(call, given, forms[0])
        budget = self._budget(shape, managed, fixed)
        are_given = self._options.memory_budget is not None
        are_given |= managed is not None and managed.preparation.memory_budget is not None
        budgets = Budgets(self._device_bytes(budget, managed), self._host_bytes(shape, managed, fixed), are_given)
        if call.together and managed is not None:
            budgets = managed.agreement.budgets(budgets)
        if budgets.device_bytes is None:
            return unbounded
        measure = functools.partial(self.measure, managed)

        def decide_form(form: Loss, is_compared: bool) -> Decision:
            one = shape if form == forms[0] else self.shape(call, given, form)
            # A measured time and an estimated one, of another machine's rates, tell nothing about each other.
            return decide(one, budgets, given, measure if is_compared else self.estimate, measure, fixed)

        try:
            decision = decide_with_loss(forms, decide_form)
        except BudgetError as error:
            if managed is not None or self._options.memory_budget is not None:
                raise _with_others(error, budget, self._share(managed)) from None
            decision = self._all_recomputed(shape, error)
        is_held = are_given or not is_decided(shape, given, fixed)
        return Planned(decision, budget, self.device, budgets.device_bytes if is_held else None)

    def _given(self, managed: ManagedModel | None) -> Plan | None:
        return self._options.plan or (managed.preparation.plan if managed is not None else None)

    def check_given(self, managed: ManagedModel | None) -> None:
        """Refuse a plan for chunks where parameters are in none; say where a loss has no sliced form.

        Raises:
            PlanError: If the user's plan concerns chunks, and the model is not prepared.
        """
        given = self._given(managed)
        if given is None:
            return
        if managed is None and given.concerns_chunks and self._trainable_bytes():
            raise PlanError(
                "plan: residency, sharding, buffers and chunk_bytes are about the chunks of a prepared model, and this "
                "one is not: call protrain_compile.prepare before torch.compile, or leave them out"
            )
        outputs = map(fake_value, self._program.results[: self._program.num_outputs])
        has_loss = any(isinstance(each, torch.Tensor) and each.dim() == 0 for each in outputs)
        if given.loss == "sliced" and has_loss and "sliced" not in loss_forms(self._program, None):
            log.warning(
                "plan: loss='sliced', but no loss of %s can be computed in slices (its logits are needed whole, or it "
                "is no cross-entropy over a last projection): it is computed whole",
                self._program.name,
            )

    def shape(self, call: Call, given: Plan | None, loss: Loss) -> StepShape:
        """Return the step of a call in numbers, with the loss computed in one form."""
        managed = call.managed
        if managed is None:
            return step_shape(self._program, loss=loss)
        layout = managed.layout
        if layout is None:
            uses = [[call.places[i] for i in used if i in call.places] for used in call.first_uses]
            read_as = {call.places[i]: dtype for i, dtype in call.read_as.items()}
            ranks = managed.preparation.ranks
            size = None if given is None else given.chunk_bytes
            layout = lay_out(managed.specs, uses, read_as, size, 1 if ranks is None else ranks.size)
        training = training_of(layout, call.places, managed.specs, managed.preparation, managed.book)
        return step_shape(self._program, training, loss)

    def estimate(self) -> Profile:
        """Return what the templates cost, estimated."""
        return estimate_profile(self._program, HardwareProfile.load(STAND_IN), self._options.compile)

    def measure(self, managed: ManagedModel | None = None) -> Profile:
        """Return what the templates cost on the device; on the CPU, whose memory nobody lacks, an estimate."""
        if self.device.type == "cuda":
            profile = profile_program(self._program, self._artefacts, formats=_formats(managed))
        else:
            profile = self.estimate()
        if managed is None or not managed.agreement.collectives:
            return profile
        hardware = dataclasses.replace(profile.hardware, collectives=managed.agreement.collectives)
        return dataclasses.replace(profile, hardware=hardware)

    def _budget(self, shape: StepShape, managed: ManagedModel | None, fixed: Fixed | None) -> DeviceBudget:
        if managed is None:
            given, device = self._options.memory_budget, self.device
            coming = 2 * self._trainable_bytes()
            return measure_budget(device, given, total(shape.held_bytes), coming if self._program.differentiable else 0)
        bounds = (managed.preparation.memory_budget, self._options.memory_budget)
        given = min((each for each in bounds if each is not None), default=None)
        if fixed is None:
            held = total(shape.held_bytes) + managed.unpacked_bytes()
        else:
            held = total(standing_bytes(*_as_packed(shape, fixed)))
        return measure_budget(managed.preparation.device, given, held)

    def _trainable_bytes(self) -> int:
        """Return the bytes of parameters that an optimizer of the user's own updates: Adam has two states of each."""
        program = self._program
        return size_bytes(
            fake_value(node)
            for node, source in zip(program.primals, program.inputs, strict=True)
            if source.kind is InputKind.PARAMETER and source.trainable
        )

    def _device_bytes(self, budget: DeviceBudget, managed: ManagedModel | None) -> int | None:
        usable = budget.usable_bytes
        return None if usable is None else int(usable * self._share(managed))

    def _share(self, managed: ManagedModel | None) -> float:
        """Return what of the usable memory the call may have."""
        first = managed is not None and managed.layout is None
        return UNSEEN_SHARE if first and not self._program.differentiable else 1.0

    @staticmethod
    def _host_bytes(shape: StepShape, managed: ManagedModel | None, fixed: Fixed | None) -> int | None:
        """Return the host memory for chunks and swapped values; of a packed model its chunks have theirs already."""
        if managed is None:
            return HostBudget().available_bytes()
        if fixed is not None:
            room = managed.swap_room_bytes()
            return None if room is None else room + total(host_bytes(*_as_packed(shape, fixed)))
        return managed.preparation.host_free_bytes()

    def values_bytes(self, call: Call) -> int:
        """Return the bytes of all values of a call's step, which tell long sequences from short ones."""
        with sizes_at(self._program.symbol_values(call.sizes)):
            return sum(life.size_bytes for life in self.shape(call, None, "whole").lives)

    def follow(self, call: Call, planned: Planned, plan: Plan) -> Planned:
        """Return what was planned with another plan in place of this rank's own, and what that one costs."""
        decision = planned.decision
        if plan == decision.plan:
            return planned
        prediction = None
        if decision.prediction is not None:
            with sizes_at(self._program.symbol_values(call.sizes)):
                shape = self.shape(call, plan, choose_loss(self._program, plan))
                profile = self.measure(call.managed) if decision.measured else self.estimate()
                prediction = simulate(shape, profile, complete(shape, plan, _fixed(call.managed)))
        followed = Decision(plan, prediction, decision.measured)
        return Planned(followed, planned.budget, self.device, planned.limit_bytes)

    def follow_alone(self, call: Call, planned: Planned, plan: Plan) -> Planned:
        """Return the same for a rank whose own plan for larger sizes the other ranks could not follow.

        Raises:
            BudgetError: If the sizes do not fit by the plan that all ranks have.
        """
        followed = self.follow(call, planned, plan)
        if needed := followed.lacking_bytes:
            raise BudgetError(
                f"memory_budget: these sizes take {format_needed(needed)} by the plan that all ranks have, and what "
                "takes less would communicate otherwise than they do: raise it, or begin with the largest sizes",
                needed,
            )
        log.warning("a plan for these sizes would communicate otherwise than the other ranks do: the old one stays")
        return followed

    def predict(self, call: Call, plan: Plan) -> Prediction:
        """Return what a step of ``plan`` costs; on the device, its templates are profiled if they are not yet.

        Raises:
            PlanError: If the plan does not fit the model.
        """
        with sizes_at(self._program.symbol_values(call.sizes)):
            shape = self.shape(call, plan, choose_loss(self._program, plan))
            return simulate(shape, self.measure(call.managed), complete(shape, plan, _fixed(call.managed)))

    def _all_recomputed(self, shape: StepShape, error: BudgetError) -> Decision:
        """Return the plan that takes least, for a model whose budget nobody set: it may fit all the same."""
        log.warning("%s; every block is recomputed, which may not be enough", error)
        return Decision(Plan.uniform("recompute").fit(shape.block_names))


def _with_others(error: BudgetError, budget: DeviceBudget, share: float) -> BudgetError:
    """Return the error with all that the budget which it asks for is for: what others hold, and what comes later."""
    if error.budget != "memory_budget" or (not budget.other_bytes and share == 1.0):
        return error
    needed = math.ceil(error.needed_bytes / share) + budget.other_bytes
    others = f"{format_size(budget.other_bytes)} that others hold or will (the optimizer of a model without prepare)"
    later = f"as much again for training, which has not begun ({share:.0%} are for an evaluation before it)"
    parts = ([others] if budget.other_bytes else []) + ([later] if share < 1.0 else [])
    return BudgetError(f"{error}. With {', and '.join(parts)}, memory_budget must be {format_needed(needed)}", needed)


def _as_packed(shape: StepShape, fixed: Fixed) -> tuple[StepShape, Choice]:
    """Return the step of this rank, and what of a choice its chunks are."""
    own = shape if fixed.sharding is None else divided(shape, fixed.sharding)
    return own, Choice((), fixed.residency, fixed.buffers)


def _formats(managed: ManagedModel | None) -> tuple[Format, ...]:
    """Return how states of a model are stored; without one of ours nothing is updated, and any will do."""
    specs = managed.specs if managed is not None else ()
    used = {StateFormat.of(spec.dtype).name.lower() for spec in specs if spec.trainable}
    return tuple(format for format in FORMATS if format in used) or FORMATS[:1]


def _fixed(managed: ManagedModel | None) -> Fixed | None:
    if managed is None or managed.layout is None:
        return None
    return Fixed(managed.packed.store.spec.residency, managed.buffers, managed.sharding)
