"""The knobs of ``torch.compile(model, backend="protrain", options={...})``."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from protrain_compile.byte_text import parse_size
from protrain_compile.errors import OptionError
from protrain_compile.plan import Plan

CompileMode = Literal["inductor", "eager"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may say about compilation; every field has a working default.

    Attributes:
        plan: The Plan to follow (a Plan, its JSON text, or the JSON object). Default: the one given to ``prepare``,
            else planned.
        memory_budget: The most device memory, in bytes, that this process may have allocated at once; as a number or
            such as "20GiB". Where ``prepare`` was given one too, the smaller one counts. Default: what is free, less
            a reserve.
        schedule: ``"print"`` (default; equal blocks folded), ``"full"``, ``"off"``, or a file path.
        compile: ``"inductor"`` (default) or ``"eager"`` (run the ATen operations one by one).
        print_after: Name of a pass after which the graphs are printed, for debugging.
    """

    plan: Plan | None = None
    memory_budget: int | None = None
    schedule: str = "print"
    compile: CompileMode = "inductor"
    print_after: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Return the Options for what ``torch.compile`` handed to the backend.

        Raises:
            OptionError: If an option is unknown (the message lists the valid ones) or has a bad value.
            PlanError: If ``plan`` is malformed.
        """
        if mode not in (None, "default"):
            raise OptionError(f"mode={mode!r}: the protrain backend has no modes; leave `mode` out and use `options`")
        given = dict(options or {})
        valid = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in given if name not in valid)
        if unknown:
            raise OptionError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(valid)}")
        given = {name: value for name, value in given.items() if value is not None}
        if "plan" in given:
            given["plan"] = parse_plan(given["plan"])
        if "memory_budget" in given:
            given["memory_budget"] = parse_size(given["memory_budget"], "memory_budget")
        if given.get("compile", "inductor") not in get_args(CompileMode):
            raise OptionError(f"compile={given['compile']!r}: choose one of {', '.join(get_args(CompileMode))}")
        if "schedule" in given:
            given["schedule"] = _parse_schedule(given["schedule"])
        _check_pass_name(given.get("print_after"))
        return cls(**given)


def parse_plan(value: Any) -> Plan:
    """Return the Plan that ``value`` (a Plan, JSON text or JSON object) stands for."""
    if isinstance(value, Plan):
        return value
    if isinstance(value, str):
        return Plan.from_json(value)
    return Plan.from_mapping(value)


def _parse_schedule(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise OptionError(f"schedule={value!r}: choose 'print', 'full', 'off', or the path of a file to write")
    text = os.fspath(value)
    if text in ("print", "full", "off"):
        return text
    meant = difflib.get_close_matches(text, ("print", "full", "off"))
    if meant and text == Path(text).stem:
        raise OptionError(f"schedule={text!r}: did you mean {meant[0]!r}? For a file of that name, write './{text}'")
    path = Path(text).absolute()
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{path} is a folder" if path.is_dir() else f"{path.parent} does not exist"
        raise OptionError(
            f"schedule={text!r}: choose 'print', 'full', 'off', or the path of a file in an existing folder ({wrong})"
        )
    return text


def _check_pass_name(name: Any) -> None:
    from passes import pass_names

    if name is not None and name not in pass_names():
        raise OptionError(f"print_after={name!r}: the passes are {', '.join(pass_names())}")
