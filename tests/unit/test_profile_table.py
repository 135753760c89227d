from __future__ import annotations

import pytest
from support import light
from support.capture import compiled, gpt_program
from support.models import tokens
from support.profiles import machine

from protrain_compile.profile import ArtefactCost, NodeCost, NvmeRate, Profile, TemplateProfile
from protrain_compile.profiler.estimate import estimate_profile
from protrain_compile.report.profile_table import OPS_SHOWN, render_hardware, render_profile, template_names


def rows(text: str) -> dict[str, list[str]]:
    """The cells of every line, by the first one."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line}


def test_templates_are_named_by_their_segments() -> None:
    names = template_names(gpt_program(3))
    assert names == ["prologue", "block 0 to block 2 (3)", "epilogue", "epilogue, sliced"]


def test_times_are_summed_over_the_blocks_of_a_step() -> None:
    program = gpt_program(3)
    part = {"forward": ArtefactCost(1.0, 2048, 7), "backward": ArtefactCost(2.0, -1)}
    whole = {**part, "recompute": ArtefactCost(0.5)}  # only blocks are recomputed, though the epilogue could be
    profile = Profile(
        machine(), tuple(TemplateProfile(whole if i in (1, 2) else part, measured=True) for i in range(4))
    )
    text = render_profile(program, profile)
    assert "block 0 to block 2 (3)  forward" in text
    line = next(line for line in text.splitlines() if line.startswith("block 0"))
    assert line.split()[-5:] == ["1.000", "3.00", "7", "2.00", "KiB"]
    assert "compute of a step, measured: 15.0 ms; everything recomputed: 16.5 ms" in text
    assert "-1" not in text  # memory that a backward gives back is no workspace


def test_an_estimate_says_so() -> None:
    profile = estimate_profile(gpt_program(), machine())
    assert "compute of a step, estimated, not measured:" in render_profile(gpt_program(), profile)


def test_nodes_are_grouped_by_operation() -> None:
    nodes = (
        NodeCost("mm", "mm", 3.0, 1024, 2048),
        NodeCost("mm_1", "mm", 3.0, -3072, 4096),
        NodeCost("exp", "exp", 4.0, 0, 0),
    )
    program = gpt_program(3)
    templates = tuple(TemplateProfile({}, nodes if i == 1 else ()) for i in range(4))
    text = render_profile(program, Profile(machine(), templates))
    found = rows(text)
    assert found["mm"] == ["mm", "2", "6.000", "60%", "-2.00", "KiB", "4.00", "KiB"]
    assert found["exp"] == ["exp", "1", "4.000", "40%", "0", "B", "0", "B"]
    assert found["all"][:4] == ["all", "3", "10.000", "100%"]
    assert text.count("node by node") == 1
    assert text.index("mm  ") < text.index("exp")


def test_rare_operations_share_a_row() -> None:
    nodes = tuple(NodeCost(f"n{i}", f"op{i}", float(100 - i), 0, 0) for i in range(OPS_SHOWN + 3))
    text = render_profile(gpt_program(3), Profile(machine(), (TemplateProfile({}, nodes),) * 4))
    assert "3 others" in text
    assert f"op{OPS_SHOWN - 1}" in text
    assert f"op{OPS_SHOWN} " not in text


def test_the_machine_is_shown_with_its_source() -> None:
    text = render_hardware(machine(source="seen " * 60, nvme=NvmeRate(2.0, 3.0)))
    for part in ("round", "8.00 GiB device, 32.0 GiB host, 4 cores", "10.0 TFLOPS", "100 GB/s", "5.0 us"):
        assert part in text
    assert "10.0 GB/s alone, 8.0 both ways, 5.0 beside updates" in text
    assert "disk" in text
    assert "4 cores, shared by 8 such devices" in render_hardware(machine(devices=8))
    assert max(map(len, text.splitlines())) <= 100


def test_a_compiled_model_shows_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protrain_compile.profiler.measure.measure_hardware", lambda _, formats: machine())
    _, schedule = compiled(light.GPT(2), tokens())
    text = schedule.profile(refresh=True)
    assert "block 0 to block 1 (2), node by node" in text
    assert "compute of a step, measured:" in text
    assert schedule.profile() == text  # nothing is measured twice
