"""The Profile of one program on the device that it was captured for: from the cache, or measured."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import torch

from protrain_compile.artefacts import ArtefactSet
from protrain_compile.profile import Format, HardwareProfile, Profile, TemplateProfile
from protrain_compile.profiler.cache import cached, hardware_key, template_key
from protrain_compile.profiler.hardware import measure_hardware, measure_updates
from protrain_compile.profiler.nodes import measure_nodes
from protrain_compile.profiler.templates import compile_parts, measure_template, template_device, template_shares
from protrain_compile.profiler.update_rates import FORMATS
from protrain_compile.program import Program, Template

log = logging.getLogger("protrain_compile.profiler")


def profile_hardware(
    device: torch.device,
    formats: Sequence[Format] = FORMATS,
    *,
    refresh: bool = False,
    first: Callable[[], None] = lambda: None,
) -> HardwareProfile:
    """Return the HardwareProfile of ``device``.

    Args:
        device: The device.
        formats: Of which states it has the rates of updates; it may have those of more.
        refresh: Measure it anew.
        first: What is done before it is measured.
    """
    key = hardware_key(device)

    def measure() -> HardwareProfile:
        first()
        return measure_hardware(device, formats=formats)

    def complete() -> HardwareProfile:
        first()
        return found.with_updates(*measure_updates(device, missing))

    found = cached(HardwareProfile, key, measure, refresh=refresh)
    known = {rate.format for rate in found.host_updates}
    missing = [format for format in formats if format not in known]
    return cached(HardwareProfile, key, complete, refresh=True) if missing else found


def profile_program(
    program: Program,
    artefacts: ArtefactSet,
    *,
    hardware: HardwareProfile | None = None,
    formats: Sequence[Format] = FORMATS[:1],
    nodes: bool = False,
    refresh: bool = False,
) -> Profile:
    """Return the Profile of ``program``.

    Args:
        program: A program with templates and their parts, captured for the device that it runs on.
        artefacts: Compiles and holds the parts; only of templates that are not in the cache.
        hardware: The machine; measured, or taken from the cache, if None.
        formats: Of which states the machine's updates are measured, at least.
        nodes: Whether to measure every node, too.
        refresh: Measure even what is in the cache.
    """
    start = time.perf_counter()
    device = next((d for d in map(template_device, program.templates) if d.type != "cpu"), torch.device("cpu"))

    def compile_all() -> None:
        # Inductor's processes start with the first part and load the whole host, which the rates would show.
        for template in program.templates:
            compile_parts(template, artefacts)

    machine = hardware or profile_hardware(device, formats, refresh=refresh, first=compile_all)
    shares = template_shares(program, artefacts.mode, machine)
    templates = tuple(
        _profile_template(template, artefacts, machine, device, nodes, refresh, share)
        for template, share in zip(program.templates, shares, strict=True)
    )
    log.info("profiled %d templates in %.1f s", len(templates), time.perf_counter() - start)
    return Profile(machine, templates)


def _profile_template(
    template: Template,
    artefacts: ArtefactSet,
    machine: HardwareProfile,
    device: torch.device,
    nodes: bool,
    refresh: bool,
    share: float,
) -> TemplateProfile:
    def measure() -> TemplateProfile:
        parts = measure_template(template, artefacts, machine, share)
        return dataclasses.replace(parts, nodes=measure_nodes(template, machine) if nodes else ())

    key = template_key(template, artefacts.mode, device, nodes=nodes, launch_us=machine.launch_us)
    found = cached(TemplateProfile, key, measure, refresh=refresh, worth_keeping=lambda each: each.measured)
    names = [node.name for node in template.joint.graph.nodes if node.op == "call_function"]
    named = zip(found.nodes, names, strict=bool(found.nodes))  # equal templates may name their nodes differently
    return dataclasses.replace(found, nodes=tuple(dataclasses.replace(cost, name=name) for cost, name in named))
