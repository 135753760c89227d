from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.capture import Graph, capture, gpt_program
from support.profiles import machine
from torch import Tensor, nn

from passes import structure_pipeline
from protrain_compile.profile import Profile
from protrain_compile.profiler.estimate import (
    ATTENTION_SHARE,
    WHOLE_RATE_SHARE,
    dying_inputs,
    estimate_profile,
    kernel_ms,
    matmul_tflops,
)
from protrain_compile.profiler.kernels import kernels_of

aten = torch.ops.aten


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    g = Graph()
    a, b = g.input("a", 1000, 1000), g.input("b", 1000, 1000)
    (kernel,) = kernels_of(g.module(g.call(aten.mm.default, a, b)), fused=True)
    assert kernel_ms(kernel, machine()) == pytest.approx(2e9 / 1e12 * 1e3)
    assert kernel_ms(kernel, machine(device_gb_per_s=1.0)) == pytest.approx(12e6 / 1e9 * 1e3)


def test_attention_has_a_rate_of_its_own() -> None:
    g = Graph()
    q, k, v = (g.input(name, 1, 1, 512, 64) for name in "qkv")
    (kernel,) = kernels_of(
        g.module(g.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)), fused=True
    )
    assert kernel_ms(kernel, machine()) == pytest.approx(kernel.flops / 1e12 * 1e3 / ATTENTION_SHARE)


def test_a_rate_that_was_not_measured_is_told_from_another() -> None:
    known = machine(matmul_tflops={"bfloat16": 10.0})
    assert matmul_tflops(known, torch.bfloat16) == matmul_tflops(known, torch.float16) == 10.0
    assert matmul_tflops(known, torch.float32) == 10.0 * WHOLE_RATE_SHARE
    assert matmul_tflops(machine(matmul_tflops={"float32": 1.0}), torch.bfloat16) == 1.0
    assert matmul_tflops(machine(), torch.float64) == 1.0


def test_every_part_of_every_template_is_estimated() -> None:
    program = gpt_program()
    profile = estimate_profile(program, machine())
    assert len(profile.templates) == len(program.templates)
    for template, found in zip(program.templates, profile.templates, strict=True):
        assert template.parts is not None
        expected = template.parts.graphs().keys()
        assert set(found.parts) == expected
        calls = template.joint.graph.find_nodes(op="call_function", target=aten.mm.default)
        assert {node.name for node in calls} <= {node.name for node in found.nodes}
        assert not found.measured
    assert Profile.from_json(profile.to_json()) == profile


def test_fusion_saves_time_and_launches() -> None:
    program = gpt_program()
    fused, single = (estimate_profile(program, machine(), mode) for mode in ("inductor", "eager"))
    block = program.template_of[1]
    for role in ("forward", "backward"):
        assert fused.templates[block].parts[role].ms < single.templates[block].parts[role].ms
        assert fused.templates[block].parts[role].launches < single.templates[block].parts[role].launches


def test_recompute_costs_no_more_than_the_forward() -> None:
    program = gpt_program()
    parts = estimate_profile(program, machine()).templates[program.template_of[1]].parts
    assert 0 < parts["recompute"].ms <= parts["forward"].ms < parts["backward"].ms


def test_saved_values_and_tangents_die_in_the_backward() -> None:
    program = gpt_program()
    parts = program.templates[program.template_of[1]].parts
    assert parts is not None
    names = {str(node.target) for node in dying_inputs(parts)}
    assert any(name.startswith("tangents") for name in names)
    assert not any(name.startswith("primals") for name in names)


def test_a_sliced_loss_takes_as_long_and_needs_less_memory() -> None:
    """On a machine of which products, not launches or copies, take the time; its forward does the backward's work."""
    torch.manual_seed(0)
    model = Head(width=64, words=4096)
    program = capture(model, torch.randn(8, 256, 64), torch.randint(4096, (8, 256)))
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    ((whole, sliced),) = program.sliced.items()
    found = estimate_profile(program, machine(matmul_tflops={"float32": 0.001})).templates
    times = [sum(found[i].parts[role].ms for role in ("forward", "backward")) for i in (whole, sliced)]
    assert 0.95 < times[1] / times[0] < 1.1
    needs = [max(part.workspace_bytes for part in found[i].parts.values()) for i in (whole, sliced)]
    assert needs[1] < needs[0] / 2
    assert found[sliced].parts["forward"].launches > found[whole].parts["forward"].launches


class Head(nn.Module):
    """A projection to words and its loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.words(x).flatten(0, 1), labels.flatten())
