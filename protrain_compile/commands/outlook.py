"""What training a model would be like on a machine that is not at hand: its step in numbers, searched and simulated.

A step depends on the batch almost linearly: two traces give the step of every batch, and so the largest that fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from protrain_compile.chunks import ChunkLayout, ParameterSpec
from protrain_compile.commands.deepen import SHALLOW, NotRepeatableError, deepen
from protrain_compile.commands.models import ModelSource
from protrain_compile.commands.trace import TracedModel, adamw_book, trace_model
from protrain_compile.errors import BudgetError
from protrain_compile.packing import Preparation, lay_out, training_of
from protrain_compile.plan import Loss, Plan
from protrain_compile.planner import Decision, decide_with_loss, loss_forms
from protrain_compile.profile import HardwareProfile, Profile
from protrain_compile.profiler.estimate import estimate_profile
from protrain_compile.rank_shape import sharding_levels
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.shape_reader import step_shape
from protrain_compile.shards import ALONE, World
from protrain_compile.solver import STAY_SHARE, Solution, fits, search
from protrain_compile.step_shape import Life, StepShape

SIZES = ("size_bytes", "block_bytes", "segment_bytes", "swapped_bytes", "products_bytes")
"""What a life takes, in its units."""

LARGEST_BATCH = 1 << 20
"""Where looking for a larger batch ends."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a model is planned for.

    Attributes:
        hardware: Rates, of a whole machine: ranks share it.
        device_bytes: Device memory that a step may use.
        host_bytes: Host memory that a model may take, on each rank.
        worlds: The ways in which ranks may share the model; the first divides it the most.
    """

    hardware: HardwareProfile
    device_bytes: int
    host_bytes: int
    worlds: tuple[World, ...] = (ALONE,)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        source: The model.
        batch: Rows of a batch.
        seq: Tokens of a row.
        dtype: Of the parameters; None leaves it to the model.
        loss: How the loss is computed; None leaves it to the planner.
        unfused: Whether it is known that devices have no fused kernel for its attention.
    """

    source: ModelSource
    batch: int
    seq: int
    dtype: torch.dtype | None = None
    loss: Loss | None = None
    unfused: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a workload in numbers.

    Attributes:
        shapes: Its operations and bytes, by how the loss is computed; the plainest form first.
        profile: Its estimated times.
        layout: The model's chunks.
        unfused: Whether devices have no fused kernel for its attention.
    """

    shapes: Mapping[Loss, StepShape]
    profile: Profile
    layout: ChunkLayout
    unfused: bool = False

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(spec.numel for spec in self.layout.parameters)

    def plan(self, machine: Machine) -> Solution:
        """Return the best plan.

        Raises:
            BudgetError: If none fits.
        """
        return self.plan_in_world(machine)[0]

    def plan_in_world(self, machine: Machine) -> tuple[Solution, World]:
        """Return the best plan, and the world that it is for; another than the first has to be clearly faster.

        Raises:
            BudgetError: If none fits.
        """
        best: tuple[Solution, World] | None = None
        for world in machine.worlds:
            try:
                found = self._search(machine, world)
            except BudgetError:
                if best is None:
                    raise
                continue
            if best is None or found.prediction.step_ms * (1 + STAY_SHARE) < best[0].prediction.step_ms:
                best = found, world
        assert best is not None
        return best

    def fits(self, machine: Machine) -> bool:
        """Whether there is a plan in the world that divides the model the most; what mostly takes least comes first."""
        return any(self._fits(machine, loss) for loss in reversed(list(self.shapes)))

    def _fits(self, machine: Machine, loss: Loss) -> bool:
        shape, profile = self._in(machine, machine.worlds[0], loss)
        levels = tuple(Plan(uniform_sharding=level) for level in reversed(sharding_levels(shape))) or (None,)
        bounds = {"device_bytes": machine.device_bytes, "host_bytes": machine.host_bytes}
        return any(fits(shape, profile, **bounds, given=level) for level in levels)

    def _in(self, machine: Machine, world: World, loss: Loss) -> tuple[StepShape, Profile]:
        shape = dataclasses.replace(self.shapes[loss], world=world)
        return shape, dataclasses.replace(self.profile, hardware=machine.hardware.share(world.node_ranks))

    def _search(self, machine: Machine, world: World) -> Solution:
        found: dict[Loss, Solution] = {}

        def decide_form(loss: Loss, _: bool) -> Decision:
            shape, profile = self._in(machine, world, loss)
            found[loss] = search(shape, profile, device_bytes=machine.device_bytes, host_bytes=machine.host_bytes)
            return Decision(found[loss].plan, found[loss].prediction)

        plan = decide_with_loss(tuple(self.shapes), decide_form).plan
        assert plan.loss is not None
        return dataclasses.replace(found[plan.loss], plan=plan)


def trace_workload(workload: Workload) -> TracedModel:
    """Trace a model; of a deep one whose blocks are alike, a few blocks.

    Raises:
        OptionError: If the model cannot be built.
        TraceError: If it cannot be traced.
    """
    source, preparation = workload.source, _preparation()
    size = (workload.batch, workload.seq, workload.dtype)
    if source.depth is not None and source.depth > SHALLOW:
        shallow = trace_model(*source.build(*size, SHALLOW), preparation, unfused=workload.unfused)
        whole, _ = source.build(*size, None)
        specs = [ParameterSpec(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in whole.named_parameters()]
        try:
            return deepen(shallow, specs, adamw_book(whole), source.depth)
        except NotRepeatableError:
            torch._dynamo.reset()
    return trace_model(*source.build(*size, None), preparation, unfused=workload.unfused)


def _preparation() -> Preparation:
    return Preparation(torch.device("cpu"), None, HostBudget(), 1, None, None)


def step_of(workload: Workload, hardware: HardwareProfile, ranks: int = 1) -> Step:
    """Return one step of a workload, nothing run, in chunks that divide among ``ranks``.

    See ``trace_workload`` for errors.
    """
    torch._dynamo.reset()
    traced = trace_workload(workload)
    layout = lay_out(traced.specs, traced.first_uses, traced.read_as, ranks=ranks)
    training = training_of(layout, traced.places, traced.specs, _preparation(), traced.book)
    profile = estimate_profile(traced.program, hardware)
    templates = tuple(dataclasses.replace(template, nodes=()) for template in profile.templates)
    forms = loss_forms(traced.program, Plan(loss=workload.loss))
    shapes = {form: step_shape(traced.program, training, form) for form in forms}
    return Step(shapes, dataclasses.replace(profile, templates=templates), layout, traced.unfused)


def largest_batch(workload: Workload, step: Step, machine: Machine) -> int | None:
    """Return the largest batch that fits, 0 if none does; None if steps of two batches differ in more than size."""
    batch = max(2, workload.batch)

    def sized(rows: int) -> Step:
        return step_of(
            dataclasses.replace(workload, batch=rows, unfused=step.unfused), machine.hardware, machine.worlds[0].size
        )

    first = step if batch == workload.batch else sized(batch)
    second = sized(2 * batch)

    def does_fit(rows: int) -> bool:
        return between(first, second, (rows - batch) / batch).fits(machine)

    try:
        return largest(does_fit, batch, LARGEST_BATCH)
    except NotAlikeError:
        return None


def largest(fits: Callable[[int], bool], start: int, end: int) -> int:
    """Return the largest number up to ``end`` that fits, where all smaller ones do; 0 if 1 does not."""
    low, high = 0, start
    while high <= end and fits(high):
        low, high = high, 2 * high
    high = min(high, end + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class NotAlikeError(Exception):
    """Two steps differ in more than their sizes."""


def between(first: Step, second: Step, share: float) -> Step:
    """Return the step that lies ``share`` of the way from one to the other, which may be below 0 or above 1.

    Raises:
        NotAlikeError: If the steps differ in more than bytes and times.
    """
    ours, theirs = ({loss: _alike(shape) for loss, shape in step.shapes.items()} for step in (first, second))
    shapes, profile = _mixed(ours, theirs, share), _mixed(first.profile, second.profile, share)
    return dataclasses.replace(first, shapes=shapes, profile=profile)


def _alike(shape: StepShape) -> StepShape:
    """Return a shape whose lives do not tell whether they would be staged: that changes with their size."""
    found: dict[Life, Life] = {}
    nothing: dict[str, Any] = dict.fromkeys(SIZES, 0)
    for life in shape.lives:
        key = dataclasses.replace(life, **nothing, staged=False, products_staged=False)
        sums: dict[str, Any] = {name: getattr(life, name) + getattr(found.get(key, key), name) for name in SIZES}
        found[key] = dataclasses.replace(key, **sums)
    return dataclasses.replace(shape, lives=tuple(found.values()))


def _mixed(first: Any, second: Any, share: float, name: str = "") -> Any:
    """Mix two values of one structure: bytes, times and launches linearly; all else must be equal."""
    if first == second:
        return first
    if type(first) is not type(second):
        raise NotAlikeError
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        mixed = {each: _mixed(getattr(first, each), getattr(second, each), share, each) for each in names}
        return dataclasses.replace(first, **mixed)
    if isinstance(first, Mapping) and first.keys() == second.keys():
        return {key: _mixed(first[key], second[key], share, name) for key in first}
    if isinstance(first, tuple) and len(first) == len(second):
        return tuple(_mixed(a, b, share, name) for a, b in zip(first, second, strict=True))
    if not name.endswith(("bytes", "ms", "launches")) or not isinstance(first, int | float):
        raise NotAlikeError
    value = first + (second - first) * share
    if name != "workspace_bytes":  # which is below 0 where memory of what dies in a call serves what it makes
        value = max(0.0, value)
    return math.ceil(value) if isinstance(first, int) else value
