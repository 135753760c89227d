"""Options: defaults, every refusal, and what a plan may be given as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from passes import pass_names
from protrain_compile import OptionError, Plan, PlanError
from protrain_compile.options import Options, parse_plan


def test_defaults() -> None:
    options = Options.parse(None)
    assert options == Options(plan=None, schedule="print", compile="inductor", print_after=None)
    assert Options.parse({}) == options


def test_none_means_default() -> None:
    assert Options.parse({"plan": None, "schedule": None, "compile": None, "print_after": None}) == Options()


@pytest.mark.parametrize("mode", [None, "default"])
def test_the_default_mode_is_no_mode(mode: str | None) -> None:
    assert Options.parse({}, mode) == Options()


def test_modes_are_refused() -> None:
    with pytest.raises(OptionError, match="mode='max-autotune': the protrain backend has no modes"):
        Options.parse({}, "max-autotune")


def test_unknown_options_list_the_valid_ones() -> None:
    with pytest.raises(
        OptionError,
        match="unknown option 'memroy', 'plans'; the options are plan, memory_budget, schedule, compile, print",
    ):
        Options.parse({"plans": 1, "memroy": 2, "schedule": "off"})


@pytest.mark.parametrize(("value", "size"), [("2GiB", 2 << 30), (4096, 4096), (None, None)])
def test_memory_budget(value: Any, size: int | None) -> None:
    assert Options.parse({"memory_budget": value}).memory_budget == size


@pytest.mark.parametrize("value", ["much", 0, -1, True, 1.5])
def test_bad_memory_budget(value: Any) -> None:
    with pytest.raises(OptionError, match=r"memory_budget=.*give a positive number of bytes"):
        Options.parse({"memory_budget": value})


@pytest.mark.parametrize("value", ["fast", 3, True, ["inductor"], {}])
def test_bad_compile(value: Any) -> None:
    with pytest.raises(OptionError, match="choose one of inductor, eager"):
        Options.parse({"compile": value})


@pytest.mark.parametrize("value", ["print", "full", "off"])
def test_schedule_words(value: str) -> None:
    assert Options.parse({"schedule": value}).schedule == value


def test_schedule_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options.parse({"schedule": tmp_path / "s.txt"}).schedule == str(tmp_path / "s.txt")
    monkeypatch.chdir(tmp_path)
    assert Options.parse({"schedule": "s.txt"}).schedule == "s.txt"


def test_schedule_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"in an existing folder \(.*nowhere does not exist\)"):
        Options.parse({"schedule": str(tmp_path / "nowhere" / "s.txt")})


def test_schedule_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is a folder"):
        Options.parse({"schedule": str(tmp_path)})


@pytest.mark.parametrize("value", [True, 1, b"print", "", ["print"]])
def test_bad_schedule(value: Any) -> None:
    with pytest.raises(OptionError, match=r"schedule=.*choose 'print', 'full', 'off'"):
        Options.parse({"schedule": value})


@pytest.mark.parametrize("name", pass_names())
def test_print_after_takes_every_pass(name: str) -> None:
    assert Options.parse({"print_after": name}).print_after == name


@pytest.mark.parametrize("name", ["tag_block", 3, ""])
def test_bad_print_after_lists_the_passes(name: Any) -> None:
    with pytest.raises(OptionError, match=f"the passes are {', '.join(pass_names())}"):
        Options.parse({"print_after": name})


@pytest.mark.parametrize(
    "value",
    [
        Plan.uniform("recompute"),
        '{"uniform_policy": "recompute"}',
        {"uniform_policy": "recompute"},
    ],
)
def test_plans_in_every_form(value: Any) -> None:
    assert parse_plan(value) == Plan.uniform("recompute")
    assert Options.parse({"plan": value}).plan == Plan.uniform("recompute")


@pytest.mark.parametrize("value", [3, ["keep"], "recompute"])
def test_bad_plans(value: Any) -> None:
    with pytest.raises(PlanError):
        Options.parse({"plan": value})


def test_options_are_not_modified() -> None:
    given = {"plan": '{"uniform_policy": "keep"}', "schedule": None}
    Options.parse(given)
    assert given == {"plan": '{"uniform_policy": "keep"}', "schedule": None}


def test_a_misspelt_schedule_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"schedule='prnt': did you mean 'print'\? .*\./prnt"):
        Options.parse({"schedule": "prnt"})
    for file in ("./prnt", "print.txt"):
        assert Options.parse({"schedule": file}).schedule == file
