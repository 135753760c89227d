"""The profiler: how long it takes, and how near its estimates are to what it measures.

Templates of Llama-like blocks are compiled first; then the machine, the templates and their nodes are measured, without
a cache: machine and templates twice, as the first time kernels are loaded and variants of them tried, which otherwise
happens in the first step of training. The last columns are what would have been said without running anything, from the
machine's own figures and from those that come with the package.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import common
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.commands.trace import Inputs, trace_model
from protrain_compile.packing import Preparation
from protrain_compile.profile import Format, HardwareProfile, Profile
from protrain_compile.profiler.estimate import estimate_profile
from protrain_compile.profiler.hardware import measure_hardware
from protrain_compile.profiler.nodes import measure_nodes
from protrain_compile.profiler.templates import compile_parts, measure_templates
from protrain_compile.program import Program
from protrain_compile.report.profile_table import template_names
from protrain_compile.runtime.host_budget import HostBudget


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``call`` returns, and its seconds."""
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def trace(shape: common.Shape, device: torch.device, dtype: torch.dtype) -> Program:
    """Return the program of a model whose values are never made."""
    with torch.device("meta"):
        model = common.Llama(shape).to(dtype)
    rotary = common.rotary_angles(shape)
    model.cos, model.sin = rotary.cos().to(device, dtype), rotary.sin().to(device, dtype)
    preparation = Preparation(device, None, HostBudget(), 1, None, None)
    return trace_model(model, Inputs.of(common.make_batch(shape, "cpu")), preparation, device).program


def rows(program: Program, measured: Profile, estimates: Sequence[Profile]) -> list[tuple[str, ...]]:
    """Return a row for every part: measured, estimated, and by how much the estimate is off."""
    found = []
    for i, name in enumerate(template_names(program)):
        for role, cost in measured.templates[i].parts.items():
            guesses = [each.templates[i].parts[role].ms for each in estimates]
            off = [f"{ms:.3f} ({ms / cost.ms - 1:+.0%})" for ms in guesses]
            workspace = [each.templates[i].parts[role].workspace_bytes / 2**20 for each in (measured, estimates[0])]
            found.append((f"{name} {role}", f"{cost.ms:.3f}", *off, *(f"{size:.0f}" for size in workspace)))
    return found


def run(arguments: argparse.Namespace) -> common.Result:
    """Measure, estimate, and compare."""
    device = torch.device(arguments.device)
    shape = common.TINY if arguments.tiny else common.Shape(layers=arguments.layers)
    program = trace(shape, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    artefacts = ArtefactSet(arguments.compile)
    for template in program.templates:
        compile_parts(template, artefacts)
    formats: tuple[Format, ...] = ("fp32",) if device.type == "cpu" else ("split",)
    machine, first_hardware_s = timed(lambda: measure_hardware(device, formats=formats))
    _, hardware_s = timed(lambda: measure_hardware(device, formats=formats))
    _, first_templates_s = timed(lambda: measure_templates(program, artefacts, machine))
    templates, templates_s = timed(lambda: measure_templates(program, artefacts, machine))
    _, nodes_s = timed(lambda: [measure_nodes(template, machine) for template in program.templates])
    measured = Profile(machine, templates)
    shipped = HardwareProfile.load("h200")
    estimates = [estimate_profile(program, each, arguments.compile) for each in (machine, shipped)]
    header = ("part", "measured ms", "estimated", "estimated, h200.json", "workspace MiB", "estimated MiB")
    notes = (
        shape.describe(),
        f"seconds beyond compilation: the machine {hardware_s:.2f}, the templates {templates_s:.2f}, together "
        f"{hardware_s + templates_s:.2f}; nodes, for protrain profile, {nodes_s:.2f}",
        f"the first time, with kernels loaded, tried and chosen: {first_hardware_s:.2f} and {first_templates_s:.2f}",
    )
    return common.Result(
        "Profiler", "bench.profiler", arguments.device, header, tuple(rows(program, measured, estimates)), notes
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.profiler", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=common.default_device())
    parser.add_argument("--compile", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--layers", type=int, default=8, help="blocks (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that the benchmark runs")
    parser.add_argument("--output", help="markdown file to write")
    arguments = parser.parse_args()
    found = run(arguments)
    found.show(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
