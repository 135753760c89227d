"""The template profile: runs every compiled part of every template, one template's data on the device at a time.

For each template (``TemplateRun``)::

    inputs      random                                 the parameters of one segment, never the model's
    forward     (inputs)           timed               its last run's saved values are kept
    recomputes  (inputs, saved)    timed
    backward    (inputs, saved, tangents)   timed      then once more, saved values and tangents (but
                                                   those that autograd holds) dying, for its memory
    drop everything

A model far larger than the device can be profiled, as only one segment's data is ever there. The saved values come from
the forward, so that what a backward indexes or masks with is valid.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from protrain_compile import compat
from protrain_compile.artefacts import Artefact, ArtefactSet
from protrain_compile.options import CompileMode
from protrain_compile.profile import ArtefactCost, HardwareProfile, TemplateProfile
from protrain_compile.profiler.estimate import dying_inputs, estimate_template
from protrain_compile.profiler.footprint import workspace_bytes
from protrain_compile.profiler.inputs import make_inputs, make_value
from protrain_compile.profiler.kernels import kernels_of, launches_of
from protrain_compile.profiler.meter import BUDGET_MS, Meter, Timing, lasting_ms, make_meter, time_call
from protrain_compile.program import Parts, Program, Template
from protrain_compile.roles import Role
from protrain_compile.sizes import size_bytes

log = logging.getLogger("protrain_compile.profiler")


HEAT_MS = 2000.0
"""What timing under sustained load may take for one program (see ``meter.lasting_ms``). An H200 is at its lasting clock
within a second."""

LEAST_SHARE = 0.02
"""Of a step's time, what a template must take to be timed under sustained load."""


def measure_template(
    template: Template, artefacts: ArtefactSet, hardware: HardwareProfile, share: float = 0.0
) -> TemplateProfile:
    """Return what the parts of ``template`` cost on the device that it was captured for.

    Args:
        template: The template; its parts are compiled if they are not yet.
        artefacts: Compiles and holds the parts.
        hardware: Says how long one launch takes, and replaces what cannot be measured.
        share: Of a step's time, about what the template takes: its part of the time spent under sustained load.

    A template whose data does not fit on the device is estimated, with a warning.
    """
    compile_parts(template, artefacts)
    device = template_device(template)
    with measuring(device):
        try:
            heat_ms = HEAT_MS * share if device.type == "cuda" and share >= LEAST_SHARE else 0.0
            run = TemplateRun(template, artefacts, hardware, make_meter(device), heat_ms)
            return TemplateProfile(run.parts(), measured=True)
        except torch.OutOfMemoryError:
            log.warning("%s does not fit on %s: its time is estimated, not measured", template.name, device)
            return estimate_template(template, hardware, artefacts.mode)


def compile_parts(template: Template, artefacts: ArtefactSet) -> None:
    """Compile the parts of ``template`` that are not compiled yet."""
    assert template.parts is not None
    for role in template.parts.graphs():
        artefacts.handle(template, role)
    artefacts.compile()


def template_device(template: Template) -> torch.device:
    """Return the device on which the template's values lie: the first accelerator among them, else the CPU."""
    devices = {value.device for node in template.joint.graph.nodes if isinstance(value := node.meta.get("val"), Tensor)}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


@contextlib.contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Run real operations without autograd, wherever called; leave random states and allocator as they were.

    During a first call AOTAutograd watches every operation through a mode in Python, which takes longer than a launch.
    """
    cuda = device.type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.without_dispatch_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([device] if cuda else []))
        if cuda:
            stack.enter_context(torch.cuda.device(device))
            stack.callback(torch.cuda.empty_cache)
        yield


class TemplateRun:
    """One template's data on the device, and the calls of its parts."""

    def __init__(
        self,
        template: Template,
        artefacts: ArtefactSet,
        hardware: HardwareProfile,
        meter: Meter,
        heat_ms: float = 0.0,
    ) -> None:
        assert template.parts is not None
        self.heat_ms = heat_ms
        self.template, self.artefacts, self.hardware, self.meter = template, artefacts, hardware, meter
        self.of: Parts = template.parts
        placeholders = template.joint.graph.find_nodes(op="placeholder")
        primals = placeholders[: len(template.input_roles)]
        self.tangent_nodes = placeholders[len(template.input_roles) :]
        self.inputs = make_inputs(primals)

    def parts(self) -> dict[Role, ArtefactCost]:
        """Return the cost of every part."""
        lasting = self._lasting_ms()
        return {role: self._cost(role, lasting) for role in self.of.graphs()}

    def _cost(self, role: Role, lasting: Mapping[Role, float]) -> ArtefactCost:
        timing = self._time(role, 0.0 if role in lasting else BUDGET_MS)
        saved, tangents = self._made_for(role)
        boxed = self._bind(role, saved, tangents)
        held = [tangents[index] for index in self.of.held_tangents] if role == "backward" else []
        if role == "backward":
            del saved, tangents  # the list alone holds the others: they die inside
        module = self._artefact(role).graph
        ms = lasting.get(role, timing.ms)
        cost = ArtefactCost(ms, self._workspace(role, module, boxed), self._launches(module, timing))
        del held
        return cost

    def _time(self, role: Role, budget_ms: float) -> Timing:
        """Time a part alone; what its runs share is dropped on return."""
        saved, tangents = self._made_for(role)
        return time_call(self.meter, lambda: self._run(role, saved, tangents), budget_ms)

    def _lasting_ms(self) -> dict[Role, float]:
        """Time all parts in turn under sustained load; nothing where none is wanted, or there is no room for all."""
        if not self.heat_ms:
            return {}
        try:
            roles = list(self.of.graphs())
            saved, tangents = self._made_for("backward")
            calls = [functools.partial(self._run, role, saved, tangents) for role in roles]
            return dict(zip(roles, lasting_ms(self.meter, calls, self.heat_ms), strict=True))
        except torch.OutOfMemoryError:
            log.info("no room for all parts of %s at once: each is timed alone", self.template.name)
            return {}

    def _run(self, role: Role, saved: list[Any], tangents: list[Any]) -> None:
        self._artefact(role)(self._bind(role, saved, tangents), stream="compute")

    def _made_for(self, role: Role) -> tuple[list[Any], list[Any]]:
        """Return new saved values and tangents, as far as a part takes them."""
        if role == "forward":
            return [], []
        results = self._artefact("forward")(self._bind("forward", [], []), stream="compute")
        saved = list(results[self.of.num_outputs :])
        absent = self.of.absent_tangents
        return saved, [None if i in absent else make_value(node, 1000 + i) for i, node in enumerate(self.tangent_nodes)]

    def _bind(self, role: Role, saved: list[Any], tangents: list[Any]) -> list[Any]:
        """Return the arguments of a part."""
        if role == "forward":
            return [self.inputs[i] for i in self.of.forward_inputs]
        refs = self.of.backward_inputs if role == "backward" else self.of.recomputes[role].inputs
        values = {"input": self.inputs, "saved": saved, "tangent": tangents}
        return [values[ref.kind][ref.index] for ref in refs]

    def _artefact(self, role: Role) -> Artefact:
        return self.artefacts.handle(self.template, role)

    def _workspace(self, role: Role, module: fx.GraphModule, boxed: list[Any]) -> int:
        results, peak = self.meter.peak_bytes(lambda: self._artefact(role)(boxed, stream="compute"))
        if peak is None:
            return _modelled_workspace(role, self.of, module, self.artefacts.mode)
        return peak - _made_bytes(results, self.inputs)

    def _launches(self, module: fx.GraphModule, timing: Timing) -> int:
        if self.meter.device.type == "cpu":
            return launches_of(kernels_of(module, fused=self.artefacts.mode == "inductor"))
        return round(timing.launch_ms * 1e3 / self.hardware.launch_us)


def _modelled_workspace(role: Role, parts: Parts, module: fx.GraphModule, mode: CompileMode) -> int:
    dying = dying_inputs(parts) if role == "backward" else ()
    return workspace_bytes(module, fused=mode == "inductor", dying=dying)


def _made_bytes(results: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Return the bytes of the results' storages that are no input's."""
    held = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
    made = [v for v in results if isinstance(v, Tensor) and v.untyped_storage().data_ptr() not in held]
    return size_bytes(made)


def measure_templates(
    program: Program, artefacts: ArtefactSet, hardware: HardwareProfile
) -> tuple[TemplateProfile, ...]:
    """Return the TemplateProfile of every template of ``program``, in order; see :func:`measure_template`."""
    shares = template_shares(program, artefacts.mode, hardware)
    return tuple(
        measure_template(template, artefacts, hardware, share)
        for template, share in zip(program.templates, shares, strict=True)
    )


def template_shares(program: Program, mode: CompileMode, hardware: HardwareProfile) -> list[float]:
    """Return about what share of a step's time each template takes; a sliced loss as much as the whole one."""
    uses = collections.Counter(program.template_of)
    told = [estimate_template(template, hardware, mode).parts.values() for template in program.templates]
    times = [uses[index] * sum(cost.ms for cost in costs) for index, costs in enumerate(told)]
    whole = sum(times)
    for index, sliced in program.sliced.items():
        times[sliced] = times[index]
    return [each / whole if whole > 0 else 0.0 for each in times]
