from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import protrain_compile
from protrain_compile import cli
from protrain_compile.commands import demo
from protrain_compile.demo import settings
from protrain_compile.demo.settings import Settings
from protrain_compile.plan import Plan


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The Settings that the command line would have run with; nothing runs."""
    seen: list[Settings] = []

    def record(settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(demo, "run", record)
    return seen


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command line says."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", *arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"protrain {protrain_compile.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_installed_command() -> None:
    command = Path(sys.executable).with_name("protrain")
    if not command.exists():
        pytest.skip("protrain is not installed in this environment")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"protrain {protrain_compile.__version__}\n"


def test_defaults(parsed: list[Settings]) -> None:
    assert cli.main(["demo"]) == 0
    (found,) = parsed
    assert found.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert found.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    assert found.plan == Plan(policies=("keep",) * found.blocks)
    assert (found.compile, found.schedule) == ("inductor", "print")


def test_cpu_computes_in_float32_unless_told(parsed: list[Settings]) -> None:
    cli.main(["demo", "--device", "cpu"])
    cli.main(["demo", "--device", "cpu", "--dtype", "bfloat16"])
    assert [found.dtype for found in parsed] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("recomputed", [0, 2, 3])
def test_recompute_takes_the_first_blocks(parsed: list[Settings], recomputed: int) -> None:
    cli.main(["demo", "--blocks", "3", "--recompute", str(recomputed)])
    assert parsed[0].plan == Plan(policies=("recompute",) * recomputed + ("keep",) * (3 - recomputed))


@pytest.mark.parametrize(
    "plan",
    [
        Plan.uniform("recompute"),
        Plan(policies=("keep", "recompute")),
        Plan(policies=("keep", "recompute"), blocks=("blocks.0", "blocks.1")),
    ],
)
def test_plan_file(parsed: list[Settings], tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    cli.main(["demo", "--blocks", "2", "--plan", str(path)])
    assert parsed[0].plan == plan.fit(["blocks.0", "blocks.1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--blocks 0", "argument --blocks: 0 is too small; use 1 or more"),
        ("--steps -3", "argument --steps: -3 is too small; use 1 or more"),
        ("--steps many", "argument --steps: 'many' is not a whole number"),
        ("--seed 99999999999999999999", "argument --seed: 99999999999999999999 is too large"),
        ("--heads 5 --width 192", "argument --heads: 5 does not divide --width 192; use for example --heads 4"),
        ("--recompute 7 --blocks 6", "argument --recompute: 7 is more than --blocks 6; use at most 6"),
        ("--recompute -1", "argument --recompute: -1 is too small; use 0 or more"),
        ("--lr 0", "argument --lr: 0 is no learning rate; use a number above 0"),
        ("--lr nan", "argument --lr: nan is no learning rate"),
        ("--lr fast", "argument --lr: 'fast' is not a number"),
        ("--device tpu", "argument --device: 'tpu' is not supported; use cpu, cuda or cuda:N"),
        ("--device meta", "argument --device: 'meta' is not supported; use cpu, cuda or cuda:N"),
        ("--device cuda:999", "argument --device: "),
        ("--dtype float16", "argument --dtype: invalid choice: 'float16'"),
        ("--compile fast", "argument --compile: invalid choice: 'fast'"),
        ("--text missing.txt", "argument --text: cannot read missing.txt: No such file or directory; give a text file"),
        ("--plan missing.json", "argument --plan: cannot read missing.json: No such file or directory"),
        ("--plan p --recompute 1", "argument --recompute: not allowed with argument --plan"),
        ("--seq 100000", "--seq 100000 needs at least"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_bad_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(arguments.split(), capsys)


def test_empty_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --prompt: must not be empty" in fails(["--prompt", ""], capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "plan is not JSON"),
        ("\xff", "codec can't decode"),
        ("[]", "must be a JSON object"),
        ('{"uniform_policy": "forget"}', "unknown policy 'forget'"),
        ('{"policies": ["keep"]}', "has 1 block policies, but this graph has 6 blocks (blocks.0 to blocks.5)"),
        ('{"policies": ["keep"], "blocks": ["layer 0"]}', "give one policy per block"),
    ],
)
def test_bad_plan_file(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("latin-1"))
    found = fails(["--blocks", "6", "--plan", str(path)], capsys)
    assert "argument --plan:" in found
    assert message in found


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: Settings) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("device", "variable", "tool"), [("cpu", "CXX", "g++"), ("cuda", "CC", "gcc")])
def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, device: str, variable: str, tool: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(settings.shutil, "which", lambda name: f"/bin/{name}" if name == tool else None)
    assert settings.missing_compiler(torch.device(device)) is None
    monkeypatch.setattr(settings.shutil, "which", lambda _: None)
    assert variable in (settings.missing_compiler(torch.device(device)) or "")
