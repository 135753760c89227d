from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from protrain_compile import cli
from protrain_compile.demo import run
from protrain_compile.demo.generate import generate
from protrain_compile.demo.model import GPT
from protrain_compile.demo.train import Trainer, evaluate, largest_difference
from protrain_compile.plan import Plan

CPU = torch.device("cpu")
ARGUMENTS = "--device cpu --blocks 3 --width 16 --heads 2 --seq 16 --batch 2 --steps 12 --sample 5"


def demo(*arguments: str) -> int:
    return cli.main(["demo", *ARGUMENTS.split(), *arguments])


def tiny_model() -> GPT:
    return GPT(blocks=2, width=16, heads=2, max_length=8)


@pytest.mark.parametrize("policy", [(), ("--recompute", "2"), ("--dtype", "bfloat16"), ("--memory-budget", "64MiB")])
def test_demo_agrees_with_eager(policy: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--compile", "eager", "--check", *policy) == 0
    out = capsys.readouterr().out
    assert "protrain schedule" in out
    assert "[backward]" in out
    assert re.search(r"training loss \d\.\d+ -> \d\.\d+", out)
    assert re.search(r"validation loss \d\.\d+ nats", out)
    assert "  | The " in out
    assert "check passed" in out


def test_schedule_shows_the_recomputed_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--compile", "eager", "--recompute", "2", "--schedule", "full", "--sample", "0") == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"compute +recompute", out)) == 2
    assert "sample" not in out


def test_schedule_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--compile", "eager", "--schedule", "off", "--steps", "1") == 0
    assert "[forward]" not in capsys.readouterr().out


def test_plan_file_with_block_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan.uniform("recompute").fit(["blocks.0", "blocks.1", "blocks.2"]).to_json())
    assert demo("--compile", "eager", "--steps", "1", "--plan", str(path)) == 0
    assert "3 recompute" in capsys.readouterr().out


def test_other_losses_than_eager_fail_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_compile", lambda model, _: lambda *batch: 1.01 * model(*batch))
    assert demo("--check") == 1
    assert "check FAILED: the loss differs from eager's by at most 1.0e-02 (tolerance 1e-04)" in capsys.readouterr().out


def test_divergence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "_compile", lambda model, _: model)
    assert demo("--lr", "1e30") == 1
    assert "try a smaller --lr" in capsys.readouterr().err


def test_without_a_compiler_pieces_run_as_aten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(run, "missing_compiler", lambda _: "C++ compiler (install g++, or set CXX)")
    monkeypatch.setattr(run, "_compile", lambda model, settings: seen.append(settings.compile) or model)
    assert demo("--steps", "1") == 0
    assert seen == ["eager"]
    assert "note: --compile inductor needs a C++ compiler (install g++, or set CXX)" in capsys.readouterr().out


def test_model_shares_its_embedding_with_the_head() -> None:
    model = tiny_model()
    assert model.head.weight is model.token_embedding.weight


def test_model_sees_no_later_byte() -> None:
    model = tiny_model().eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_untrained_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(256, (8, 9))
    loss = tiny_model()(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(5.545, abs=0.1)


def test_generation_continues_the_prompt_the_same_way_for_a_seed() -> None:
    model = tiny_model()
    text = generate(model, b"long prompt, past the window", count=6, seed=1)
    assert text.startswith(b"long prompt, past the window")
    assert len(text) == len(b"long prompt, past the window") + 6
    assert text == generate(model, b"long prompt, past the window", count=6, seed=1)


def test_evaluation_averages_and_restores_the_mode() -> None:
    model = tiny_model()
    batches = [run.Batch(torch.full((1, 8), n), torch.full((1, 8), n + 1)) for n in range(3)]
    with torch.no_grad():
        expected = sum(model(*batch).item() for batch in batches) / 3
    assert evaluate(model, model, batches, dtype=torch.float32) == pytest.approx(expected)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rate_rises_then_falls() -> None:
    model = tiny_model()
    trainer = Trainer(model, model, device=CPU, dtype=torch.float32, steps=100, lr=1.0)
    rates = [trainer._rate(step) for step in range(100)]
    top = rates.index(1.0)
    assert 0 < top < 50
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_largest_difference_is_relative() -> None:
    assert largest_difference([1.0, 2.2, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(0.1)
