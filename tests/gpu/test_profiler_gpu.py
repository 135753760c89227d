from __future__ import annotations

import time

import pytest
import torch
from support.capture import schedule_of
from support.models import Llama, tokens

from protrain_compile.artefacts import ArtefactSet
from protrain_compile.profile import HardwareProfile
from protrain_compile.profiler.estimate import estimate_template
from protrain_compile.profiler.hardware import measure_hardware
from protrain_compile.profiler.nodes import measure_nodes
from protrain_compile.profiler.templates import measure_templates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_hardware_is_measured_in_seconds() -> None:
    measure_hardware(torch.device("cuda"))  # compiles the update kernels
    start = time.perf_counter()
    found = measure_hardware(torch.device("cuda"))
    print(found.to_json(), f"{time.perf_counter() - start:.1f} s")
    assert found.device_bytes == torch.cuda.get_device_properties(0).total_memory
    assert HardwareProfile.from_json(found.to_json()) == found


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_templates_are_measured_and_nothing_is_left(mode: str) -> None:
    model = Llama(3, width=256).cuda().bfloat16()
    program = schedule_of(model, tokens().cuda(), compile=mode).program
    hardware = HardwareProfile.load("h200")
    artefacts = ArtefactSet(mode)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    found = measure_templates(program, artefacts, hardware)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for template, profile in zip(program.templates, found, strict=True):
        told = estimate_template(template, hardware, mode)  # type: ignore[arg-type]
        print(template.name, mode, profile.parts, told.parts)
        assert profile.measured
        assert profile.parts.keys() == told.parts.keys()
        assert all(cost.ms > 0 for cost in profile.parts.values())


def test_nodes_are_measured() -> None:
    model = Llama(2, width=256).cuda().bfloat16()
    template = schedule_of(model, tokens().cuda()).program.templates[1]
    before = torch.cuda.memory_allocated()
    found = measure_nodes(template, HardwareProfile.load("h200"))
    assert torch.cuda.memory_allocated() == before
    assert [each.name for each in found] == [n.name for n in template.joint.graph.nodes if n.op == "call_function"]
    assert any(each.inside_bytes > 0 for each in found)
