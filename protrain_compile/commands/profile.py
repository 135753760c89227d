"""``protrain profile``: what a model's parts and nodes cost, and what the machine can do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from protrain_compile.artefacts import ArtefactSet
from protrain_compile.commands.arguments import at_least, device
from protrain_compile.commands.models import DTYPES, resolve
from protrain_compile.commands.trace import trace_model
from protrain_compile.errors import OptionError, ProfileError
from protrain_compile.packing import Preparation
from protrain_compile.profile import HardwareProfile, Profile
from protrain_compile.profiler.estimate import estimate_profile
from protrain_compile.profiler.measure import profile_hardware, profile_program
from protrain_compile.profiler.update_rates import FORMATS
from protrain_compile.program import Program
from protrain_compile.report.profile_table import render_hardware, render_profile
from protrain_compile.runtime.host_budget import HostBudget

DESCRIPTION = """\
Measure what training a model costs on this machine: every compiled part and every ATen node, one block's data on the
device at a time, so that a model larger than the device can be profiled. With --hardware, estimate the same for another
machine and run nothing. Measurements are kept, and used again until something that they depend on changes."""

MODEL_HELP = (
    "a Hugging Face config.json or its folder, an architecture with sizes (llama:hidden_size=3200), or module:function"
)


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("profile", help="measure a model's parts and the machine", description=DESCRIPTION)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="sequences (default: 1)")
    parser.add_argument("--seq", type=at_least(1), metavar="N", help="tokens of each (default: 1024)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the parameters (default: the model's)")
    parser.add_argument("--device", type=device, metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if any)")
    parser.add_argument(
        "--compile", choices=("inductor", "eager"), default="inductor", help="compiled parts (default), or ATen nodes"
    )
    parser.add_argument("--hardware", metavar="FILE", help="estimate for this machine: a JSON file, or h200")
    parser.add_argument("--hardware-only", action="store_true", help="measure the machine, and no model")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--refresh", action="store_true", help="measure even what was measured before")
    parser.set_defaults(parser=parser, execute=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Carry the command out; return the exit status.

    Raises:
        OptionError: If arguments do not fit each other, or a file cannot be read or written.
        TraceError: If the model cannot be traced.
    """
    _check(parsed)
    if parsed.hardware_only:
        hardware = profile_hardware(_device(parsed), refresh=parsed.refresh)
        print(render_hardware(hardware))
        _write(parsed.output, hardware.to_json())
        return 0
    program, profile = _profile(parsed)
    print(render_hardware(profile.hardware))
    print()
    print(render_profile(program, profile))
    _write(parsed.output, profile.to_json())
    return 0


def _check(parsed: argparse.Namespace) -> None:
    if (parsed.model is None) != parsed.hardware_only:
        raise OptionError("give either MODEL or --hardware-only")
    if parsed.hardware_only and parsed.hardware is not None:
        raise OptionError("argument --hardware: not allowed with --hardware-only, which measures this machine")
    if parsed.output is not None and not parsed.output.absolute().parent.is_dir():
        raise OptionError(
            f"argument --output: {parsed.output.absolute().parent} does not exist; give an existing folder"
        )


def _profile(parsed: argparse.Namespace) -> tuple[Program, Profile]:
    hardware = _load(parsed.hardware) if parsed.hardware is not None else None
    where = torch.device("cpu") if hardware is not None else _device(parsed)
    dtype = None if parsed.dtype is None else DTYPES[parsed.dtype]
    source = resolve(parsed.model)
    model, inputs = source.build(*source.sizes(parsed.batch, parsed.seq, (1, 1024)), dtype, None)
    preparation = Preparation(where, None, HostBudget(), 1, None, None)
    program = trace_model(model, inputs, preparation, where).program
    if hardware is not None:
        return program, estimate_profile(program, hardware, parsed.compile)
    artefacts = ArtefactSet(parsed.compile)
    return program, profile_program(program, artefacts, formats=FORMATS, nodes=True, refresh=parsed.refresh)


def _load(name: str) -> HardwareProfile:
    try:
        return HardwareProfile.load(name)
    except ProfileError as error:
        raise OptionError(f"argument --hardware: {error}") from error


def _device(parsed: argparse.Namespace) -> torch.device:
    return parsed.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"argument --output: cannot write {path}: {error.strerror}") from error
