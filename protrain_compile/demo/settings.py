"""The arguments of `protrain demo`, read and checked before any work is done."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from protrain_compile.byte_text import parse_size
from protrain_compile.commands.arguments import at_least, device
from protrain_compile.errors import OptionError, PlanError
from protrain_compile.options import CompileMode
from protrain_compile.plan import Plan, Policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run of the demo does.

    Attributes:
        device: Where the model trains.
        dtype: The type of matrix products; parameters stay float32, and bfloat16 is reached by autocast.
        blocks: Number of transformer blocks.
        width: Size of the residual stream.
        heads: Attention heads a block.
        seq: Bytes in a window.
        batch: Windows in a step.
        steps: Optimizer steps.
        lr: Peak learning rate.
        seed: Seeds the weights, the batches and the sample.
        plan: What happens to each block's saved values.
        memory_budget: Device bytes for which a plan is searched in place of that one; None for none.
        compile: How the backend runs its artefacts.
        schedule: How the backend prints the schedule.
        text: The text to learn, or None for Python's documentation topics.
        prompt: What the generated text starts with.
        sample: Bytes of text to generate; 0 for none.
        check: Whether to train an uncompiled copy too and compare the losses.
    """

    device: torch.device
    dtype: torch.dtype
    blocks: int
    width: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    seed: int
    plan: Plan
    memory_budget: int | None
    compile: CompileMode
    schedule: str
    text: Path | None
    prompt: bytes
    sample: int
    check: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's arguments on `parser`."""
    _add_model_arguments(parser.add_argument_group("model"))
    _add_training_arguments(parser.add_argument_group("training"))
    _add_backend_arguments(parser.add_argument_group("backend"))
    _add_result_arguments(parser.add_argument_group("result"))


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    _add_integer(group, "--blocks", 4, "transformer blocks")
    _add_integer(group, "--width", 256, "size of the residual stream")
    _add_integer(group, "--heads", 4, "attention heads a block")


def _add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", type=device, metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if any)")
    group.add_argument(
        "--dtype", choices=DTYPES, help="type of matrix products (default: bfloat16 on cuda, float32 on cpu)"
    )
    _add_integer(group, "--steps", 400, "optimizer steps")
    _add_integer(group, "--batch", 16, "windows in a step")
    _add_integer(group, "--seq", 128, "bytes in a window")
    group.add_argument(
        "--lr", type=_learning_rate, default=3e-3, metavar="RATE", help="peak learning rate (default: %(default)s)"
    )
    _add_integer(group, "--seed", 0, "seeds the weights, the batches and the sample", minimum=0)
    group.add_argument("--text", type=Path, metavar="FILE", help="what to learn (default: Python's help topics)")


def _add_backend_arguments(group: argparse._ArgumentGroup) -> None:
    policies = group.add_mutually_exclusive_group()
    policies.add_argument(
        "--recompute", type=at_least(0), metavar="N", help="recompute the first N blocks in the backward (default: 0)"
    )
    policies.add_argument("--plan", type=Path, metavar="FILE", help="a Plan as JSON, in place of --recompute")
    policies.add_argument("--memory-budget", metavar="SIZE", help="search a plan for this much memory, such as 20MiB")
    _add_choice(group, "--compile", ("inductor", "eager"), "run compiled pieces, or one ATen operation at a time")
    _add_choice(
        group,
        "--schedule",
        ("print", "off", "full"),
        "print the schedule with equal blocks folded, not at all, in full",
    )


def _add_result_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt", default="The ", metavar="TEXT", help="what the sample starts with (default: %(default)r)"
    )
    _add_integer(group, "--sample", 400, "bytes of text to generate, 0 for none", minimum=0)
    group.add_argument("--check", action="store_true", help="train an uncompiled copy too and compare the losses")


def _add_integer(group: argparse._ArgumentGroup, flag: str, default: int, text: str, *, minimum: int = 1) -> None:
    parse = at_least(minimum)
    group.add_argument(flag, type=parse, default=default, metavar="N", help=f"{text} (default: {default})")


def _add_choice(group: argparse._ArgumentGroup, flag: str, choices: Sequence[str], text: str) -> None:
    group.add_argument(flag, choices=choices, default=choices[0], help=f"{text} (default: {choices[0]})")


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Return the Settings that parsed `arguments` stand for.

    Raises:
        OptionError: If arguments do not fit each other; the message names them and says what to do.
    """
    _check_heads(arguments.width, arguments.heads)
    if not arguments.prompt:
        raise OptionError("argument --prompt: must not be empty; give at least one character")
    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    budget = arguments.memory_budget
    derived: dict[str, Any] = {
        "device": device,
        "dtype": DTYPES[dtype],
        "plan": _read_plan(arguments),
        "memory_budget": None if budget is None else parse_size(budget, "--memory-budget"),
        "prompt": os.fsencode(arguments.prompt),
    }
    as_given = {field.name for field in dataclasses.fields(Settings)} - set(derived)
    return Settings(**derived, **{name: getattr(arguments, name) for name in as_given})


def missing_compiler(device: torch.device) -> str | None:
    """Return what Inductor needs on `device` and cannot find, in words; None if nothing is missing."""
    if device.type == "cuda":  # Triton builds its launchers with a C compiler
        found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        return None if found else "C compiler (install gcc, or set CC)"
    found = shutil.which(os.environ.get("CXX", "g++"))
    return None if found else "C++ compiler (install g++, or set CXX)"


def _check_heads(width: int, heads: int) -> None:
    if width % heads == 0:
        return
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - heads))
    raise OptionError(f"argument --heads: {heads} does not divide --width {width}; use for example --heads {nearest}")


def _read_plan(arguments: argparse.Namespace) -> Plan:
    blocks: int = arguments.blocks
    if arguments.plan is not None:
        return _load_plan(arguments.plan, blocks)
    recomputed: int = arguments.recompute or 0
    if recomputed > blocks:
        raise OptionError(f"argument --recompute: {recomputed} is more than --blocks {blocks}; use at most {blocks}")
    policies: list[Policy] = ["recompute" if block < recomputed else "keep" for block in range(blocks)]
    return Plan(policies=tuple(policies))


def _load_plan(path: Path, blocks: int) -> Plan:
    try:
        return Plan.from_json(path.read_text()).fit([f"blocks.{block}" for block in range(blocks)])
    except OSError as error:
        raise OptionError(f"argument --plan: cannot read {path}: {error.strerror}; give a JSON file") from error
    except (PlanError, UnicodeDecodeError) as error:
        raise OptionError(f"argument --plan: {path}: {error}") from error


def _learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is no learning rate; use a number above 0, such as 3e-3")
    return value
