"""Tracing without memory gives the Program that the backend builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import light
from support.capture import schedule_of
from support.models import tokens
from torch import Tensor, nn

from protrain_compile.commands import trace
from protrain_compile.commands.models import resolve
from protrain_compile.commands.trace import Inputs, TracedModel, trace_model
from protrain_compile.errors import TraceError
from protrain_compile.packing import Preparation
from protrain_compile.runtime.host_budget import HostBudget

PREPARATION = Preparation(torch.device("cpu"), None, HostBudget(), 1, None, None)


def traced(model: nn.Module, inputs: object) -> TracedModel:
    return trace_model(model, Inputs.of(inputs), PREPARATION)


def test_same_program_as_the_backend() -> None:
    with torch.device("meta"):
        model = light.GPT(3)
    found = traced(model, tokens())
    expected = schedule_of(light.GPT(3), tokens()).program
    assert found.program.template_of == expected.template_of == (0, 1, 1, 1, 2)
    assert [s.stage for s in found.program.segments] == [s.stage for s in expected.segments]
    for ours, theirs in zip(found.program.templates, expected.templates, strict=True):
        assert [str(n.target) for n in ours.joint.graph.nodes] == [str(n.target) for n in theirs.joint.graph.nodes]


def test_first_uses_name_parameters_of_the_model() -> None:
    with torch.device("meta"):
        model = light.GPT(3, tied=True)
    names = [name for name, _ in model.named_parameters()]
    found = traced(model, tokens())
    used = [{names[i] for i in uses} for uses in found.first_uses]
    assert all(name.startswith("blocks.1.") for name in used[2])
    assert names[0] in used[0]
    assert names[0] in used[-1], "the tied head"
    assert set(found.read_as.values()) == {torch.float32}


def test_a_model_far_larger_than_memory() -> None:
    """15 G parameters: 30 GB."""
    source = resolve("llama:hidden_size=16384,num_hidden_layers=3,num_attention_heads=64,intermediate_size=80000")
    model, inputs = source.build(1, 16, None, None)
    assert sum(p.numel() for p in model.parameters()) > 1.5e10
    found = trace_model(model, inputs, PREPARATION)
    assert found.program.template_of == (0, 1, 1, 1, 2)


class Attends(nn.Module):
    def __init__(self, size: int, *, masked: bool) -> None:
        super().__init__()
        self.qkv, self.size, self.masked = nn.Linear(2 * size, 6 * size), size, masked

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, self.size)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if self.masked else None).sum()


@pytest.mark.parametrize(("size", "masked", "fused"), [(4, True, True), (5, True, False), (5, False, True)])
def test_attention_is_fused_where_a_gpu_has_a_kernel(size: int, masked: bool, fused: bool) -> None:
    """fp32: 4 numbers are 16 bytes."""
    program = traced(Attends(size, masked=masked), (torch.randn(2, 8, 2 * size), torch.ones(8, 8).bool())).program
    names = {str(node.target) for node in program.calls()}
    assert any("flash_attention" in name for name in names) == fused
    assert ("aten.bmm.default" in names) != fused


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return y.sum()


class NoGradient(Breaks):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).detach().sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [(Breaks, "cannot be traced: .*graph_break"), (NoGradient, "nothing to differentiate"), (nn.ReLU, "no trainable")],
)
def test_what_cannot_be_traced(model: type[nn.Module], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(model(), torch.zeros(2, 4))


class Masked(nn.Module):
    """Attention with a mask, whose heads have 6 numbers: no multiple of 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(*heads.unbind(), attn_mask=mask).sum()


def test_attention_without_a_fused_kernel_is_traced_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, where that is known: of the same model with another batch."""
    captures: list[int] = []
    capture = trace._capture

    def counted(*arguments: Any) -> Any:
        captures.append(1)
        return capture(*arguments)

    monkeypatch.setattr(trace, "_capture", counted)
    for known, expected in ((False, 2), (True, 1)):
        captures.clear()
        torch._dynamo.reset()
        found = trace_model(Masked(), Inputs.of(torch.zeros(2, 8, 12)), PREPARATION, unfused=known)
        assert found.unfused
        assert len(captures) == expected
        assert not [node for node in found.program.graph.graph.nodes if "attention" in str(node.target)]
