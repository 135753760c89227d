from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.profiles import machine

from protrain_compile import cli
from protrain_compile.commands import profile
from protrain_compile.profile import HardwareProfile, Profile

LLAMA = (
    "llama:hidden_size=32,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=64,"
    "vocab_size=64"
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["profile", *arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_model_is_estimated_for_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "machine.json", tmp_path / "profile.json"
    file.write_text(machine().to_json())
    arguments = ["profile", LLAMA, "--seq", "16", "--hardware", str(file), "--output", str(output)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "block 0 to block 1 (2)" in printed
    assert "estimated, not measured" in printed
    found = Profile.from_json(output.read_text())
    assert found.hardware == machine()
    assert len(found.templates) >= 3
    assert all(template.nodes for template in found.templates)


def test_a_model_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("protrain_compile.profiler.measure.measure_hardware", lambda _, formats: machine())
    arguments = [LLAMA, "--seq", "16", "--device", "cpu", "--dtype", "float32", "--compile", "eager"]
    assert cli.main(["profile", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "compute of a step, measured" in printed
    assert "node by node" in printed


def test_the_machine_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def measured(device: torch.device, *, refresh: bool) -> HardwareProfile:
        seen.append((device.type, refresh))
        return machine()

    monkeypatch.setattr(profile, "profile_hardware", measured)
    output = tmp_path / "machine.json"
    assert cli.main(["profile", "--hardware-only", "--device", "cpu", "--refresh", "--output", str(output)]) == 0
    assert seen == [("cpu", True)]
    assert HardwareProfile.load(output) == machine()
    assert "round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either MODEL or --hardware-only"),
        ([LLAMA, "--hardware-only"], "give either MODEL or --hardware-only"),
        (["--hardware-only", "--hardware", "h200"], "argument --hardware: not allowed with --hardware-only"),
        ([LLAMA, "--hardware", "nothing"], "argument --hardware: hardware profile 'nothing': no such file"),
        (["--hardware-only", "--output", "missing/folder.json"], "argument --output: "),
        ([LLAMA, "--batch", "0"], "argument --batch: 0 is too small; use 1 or more"),
        (["no:such:function"], "MODEL"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(arguments, capsys)


def test_a_malformed_machine_names_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = json.loads(machine().to_json())
    plain["launch_us"] = "quick"
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(plain))
    assert "launch_us must be a number, got 'quick'" in refused([LLAMA, "--hardware", str(path)], capsys)


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", "--help"])
    assert "--hardware-only" in capsys.readouterr().out
