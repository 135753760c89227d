from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.capture import gpt_program, schedule_of
from support.models import GPT, tokens
from support.profiles import machine

from protrain_compile import compat
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.profile import ArtefactCost, Format, HardwareProfile, Profile
from protrain_compile.profiler import cache, measure
from protrain_compile.profiler.cache import cache_folder, cached, graph_text, hardware_key, template_key
from protrain_compile.profiler.hardware import UpdateRates
from protrain_compile.profiler.measure import profile_hardware, profile_program

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


class Counter:
    """Measures a cost, another one each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> ArtefactCost:
        self.calls += 1
        return ArtefactCost(float(self.calls))


def test_what_was_measured_is_read_again(folder: Path) -> None:
    measure_once = Counter()
    first, second = (cached(ArtefactCost, "key", measure_once) for _ in range(2))
    assert first == second == ArtefactCost(1.0)
    assert cached(ArtefactCost, "other", measure_once) == ArtefactCost(2.0)
    assert sorted(path.name for path in folder.iterdir()) == ["key.json", "other.json"]


def test_refresh_measures_and_keeps() -> None:
    counter = Counter()
    cached(ArtefactCost, "key", counter)
    assert cached(ArtefactCost, "key", counter, refresh=True) == ArtefactCost(2.0)
    assert cached(ArtefactCost, "key", counter) == ArtefactCost(2.0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"ms": "fast"}', b"\xff\xfe"])
def test_a_corrupt_file_is_measured_anew(folder: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    cached(ArtefactCost, "key", Counter())
    (folder / "key.json").write_bytes(content)
    counter = Counter()
    assert cached(ArtefactCost, "key", counter) == ArtefactCost(1.0)
    assert "measured anew" in caplog.text
    assert cached(ArtefactCost, "key", counter) == ArtefactCost(1.0)
    assert counter.calls == 1


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    counter = Counter()
    assert [cached(ArtefactCost, "key", counter).ms for _ in range(2)] == [1.0, 2.0]


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    assert cached(ArtefactCost, "key", Counter()) == ArtefactCost(1.0)
    assert list(folder.iterdir()) == []


def test_what_is_not_worth_keeping_is_not_kept(folder: Path) -> None:
    cached(ArtefactCost, "key", Counter(), worth_keeping=lambda _: False)
    assert not (folder / "key.json").exists()


def test_the_default_folder_is_under_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "protrain" / "profiles"


def block_of(program: Any) -> Any:
    return program.templates[program.template_of[1]]


def key_of(template: Any, mode: Any = "eager", **changes: Any) -> str:
    return template_key(template, mode, CPU, **{"nodes": False, "launch_us": 5.0, **changes})


def test_the_depth_of_the_model_does_not_matter_to_its_block() -> None:
    assert key_of(block_of(gpt_program(2))) == key_of(block_of(gpt_program(3)))


def key_with_fast_products(template: Any) -> str:
    products: Any = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        return key_of(template)
    finally:
        products.fp32_precision = before


def test_the_key_changes_with_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(gpt_program())
    wider = block_of(schedule_of(GPT(2), tokens(batch=3)).program)
    keys = [
        key_of(block),
        key_of(wider),
        key_of(block, "inductor"),
        key_of(block, nodes=True),
        key_of(block, launch_us=6.0),
        key_of(dataclasses.replace(block, input_roles=("mutated", *block.input_roles[1:]))),
    ]
    parts = block.parts
    keys.append(key_of(dataclasses.replace(block, parts=dataclasses.replace(parts, backward=parts.forward))))
    keys.append(key_with_fast_products(block))
    monkeypatch.setattr(compat, "inductor_settings", lambda: "others")
    keys.append(key_of(block, "inductor"))
    monkeypatch.setattr(compat, "cuda_driver_version", lambda: 13000)
    keys.append(key_of(block))
    monkeypatch.setattr(cache, "device_bytes", lambda _: 1)
    keys.append(key_of(block))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.append(key_of(block))
    monkeypatch.setattr("protrain_compile.__version__", "9.9")
    keys.append(key_of(block))
    assert len(set(keys)) == len(keys)


def test_the_graph_text_has_strides_but_no_names() -> None:
    lines = graph_text(block_of(gpt_program()).joint)
    assert any("aten.addmm.default" in line and "%" in line for line in lines)
    assert not any("primals" in line for line in lines)
    assert "[32, 1]" in "".join(lines)


def test_inductor_settings_tell_a_changed_one() -> None:
    before = compat.inductor_settings()
    with compat.inductor_config.patch(max_autotune=not compat.inductor_config.max_autotune):
        assert compat.inductor_settings() != before
    assert compat.inductor_settings() == before


def test_a_program_is_measured_once() -> None:
    first = profile_program(gpt_program(2), ArtefactSet("eager"), hardware=machine(), nodes=True)
    untouched = ArtefactSet("eager")
    program = gpt_program(3)
    again = profile_program(program, untouched, hardware=machine(), nodes=True)
    block, other = (p.template_of[1] for p in (gpt_program(2), program))
    assert again.templates[other].parts == first.templates[block].parts
    assert untouched.compiled_count == 0
    calls = [node.name for node in program.templates[other].joint.graph.nodes if node.op == "call_function"]
    assert [cost.name for cost in again.templates[other].nodes] == calls
    assert Profile.from_json(again.to_json()) == again


def test_hardware_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [machine(name="first"), machine(name="second")]
    monkeypatch.setattr(measure, "measure_hardware", lambda _, formats: made.pop(0))
    assert [profile_hardware(CPU).name for _ in range(2)] == ["first", "first"]
    assert profile_hardware(CPU, refresh=True).name == "second"
    assert hardware_key(CPU).startswith("hardware-")


def test_formats_that_are_new_are_measured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = machine().host_updates[0]
    split = machine(host_updates=(rate,), device_update_gparams_per_s={"split": 1.0})
    asked = []

    def more(_: torch.device, formats: Sequence[Format]) -> UpdateRates:
        asked.append(tuple(formats))
        return UpdateRates(
            tuple(dataclasses.replace(rate, format=each) for each in formats), dict.fromkeys(formats, 2.0)
        )

    monkeypatch.setattr(measure, "measure_hardware", lambda _, formats: split)
    monkeypatch.setattr(measure, "measure_updates", more)
    assert profile_hardware(CPU, ("split",)) == split
    found = profile_hardware(CPU, ("split", "fp32"))
    assert [each.format for each in found.host_updates] == ["split", "fp32"]
    assert found.device_update_gparams_per_s == {"split": 1.0, "fp32": 2.0}
    assert profile_hardware(CPU, ("fp32",)) == found
    assert asked == [("fp32",)]


def test_what_was_measured_in_another_way_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hardware_key(CPU)
    monkeypatch.setattr(cache, "_method", lambda: "another")
    assert hardware_key(CPU) != before


def test_ranks_that_share_a_host_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each updates with fewer threads than one rank alone, whose rates would be far too good for it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    alone = hardware_key(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert hardware_key(CPU) != alone


def test_everything_is_compiled_before_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling loads the host: what is measured beside it is no rate of the machine."""
    program, artefacts = gpt_program(2), ArtefactSet("eager")
    seen = []

    def measured(device: torch.device, formats: Sequence[Format]) -> HardwareProfile:
        seen.append(artefacts.compiled_count)
        return machine(name="measured")

    monkeypatch.setattr(measure, "measure_hardware", measured)
    assert profile_program(program, artefacts).hardware.name == "measured"
    assert seen == [sum(len(each.parts.graphs()) for each in program.templates if each.parts is not None)]
