"""bench/accuracy.py without a GPU: configurations, plans by hand, the table and the picture from recorded results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import accuracy
from bench.subject import Configuration, count_chunks, hand_plan, make_model


@pytest.mark.parametrize(
    "text",
    [
        "llama:16:24",
        "gpt2:8:16+clip",
        "llama:16:24@p7,b4",
        "mistral:4:40.5+clip@b3",
        "llama:32:12=recompute",
        "gpt2:1:2=swap*3,keep@p0",
    ],
)
def test_a_configuration_as_text(text: str) -> None:
    assert str(Configuration.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["llama", "llama:16", "other:1:2", "llama:16:24@", "llama:16:24=@p7", "llama:16:24@p7,b4,x"]
)
def test_no_configuration(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is not MODEL:BATCH:CAP"):
        Configuration.parse(text)
    with pytest.raises(SystemExit):
        accuracy.main([text])
    assert "is not MODEL:BATCH:CAP" in capsys.readouterr().err


def test_a_plan_by_hand() -> None:
    model = make_model("llama")
    assert hand_plan(Configuration.parse("llama:1:1"), model) is None
    plan = hand_plan(Configuration.parse("llama:1:1=recompute*25,keep@p2,b4"), model)
    assert plan.policies == ("recompute",) * 25 + ("keep",)
    assert plan.residency == ("persistent",) * 2 + ("offloaded",) * 26
    assert plan.buffers == 4


def test_chunks_are_counted_as_packed() -> None:
    """The Llama of the recorded runs has 28 chunks."""
    assert count_chunks(make_model("llama")) == 28


@pytest.mark.parametrize(("name", "millions"), [("llama", 3430), ("gpt2", 1558), ("mistral", 3316)])
def test_models_have_the_sizes_that_they_claim(name: str, millions: int) -> None:
    model = make_model(name)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def result(configuration: str, step_ms: float, predicted_ms: float) -> dict[str, Any]:
    return {
        "configuration": configuration,
        "step_ms": step_ms,
        "tokens_s": 1000.0,
        "peak_bytes": 20 << 30,
        "other_bytes": 0,
        "reserved_bytes": 22 << 30,
        "prediction": {"step_ms": predicted_ms, "peak_bytes": 21 << 30},
        "plan": {"persistent": 7, "chunks": 28, "buffers": 4, "policies": "26 keep", "loss": "whole"},
    }


def test_results_are_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("llama:16:24", 1000.0, 1010.0),
        result("gpt2:8:16", 500.0, 480.0),
        {"configuration": "gpt2:8:1", "error": ["too small"]},
    ]
    (tmp_path / "found.json").write_text(json.dumps(results), encoding="utf-8")
    pytest.importorskip("matplotlib")
    files = {name: str(tmp_path / name) for name in ("plot.svg", "table.md")}
    arguments = ["--read", str(tmp_path / "found.json"), "--plot", files["plot.svg"], "--output", files["table.md"]]
    assert accuracy.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "+1.0%" in shown
    assert "-4.0%" in shown
    assert "median error 2.5%, worst -4.0%, of 2 configurations" in shown
    assert "failed" in shown
    assert "<svg" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "Llama 3.43B" in (tmp_path / "table.md").read_text(encoding="utf-8")
