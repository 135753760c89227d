"""Capture: names, kinds and gradients of a graph's inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.capture import capture
from support.light import GPT
from support.models import Llama, tokens
from torch import Tensor, nn

from protrain_compile.capture import source_name
from protrain_compile.program import GraphInput, InputKind, Program, fake_value


def by_name(program: Program) -> dict[str, GraphInput]:
    return {source.name: source for source in program.inputs}


def test_a_decoder() -> None:
    model = GPT(2)
    program = capture(model, tokens())
    found = by_name(program)
    assert program.name == "GPT"
    assert program.differentiable
    assert program.num_outputs == 1
    assert set(found) == {"tokens", *dict(model.named_parameters())}
    assert found["tokens"] == GraphInput("tokens", InputKind.INPUT)
    assert all(
        found[name] == GraphInput(name, InputKind.PARAMETER, trainable=True) for name, _ in model.named_parameters()
    )


def test_inputs_are_in_the_order_of_the_placeholders() -> None:
    model = Llama(2)
    program = capture(model, tokens())
    parameters = dict(model.named_parameters())
    for node, source in zip(program.primals, program.inputs, strict=True):
        if source.kind is InputKind.PARAMETER:
            assert fake_value(node).shape == parameters[source.name].shape


def test_buffers() -> None:
    found = by_name(capture(Llama(2), tokens()))
    assert found["cos"].kind is InputKind.BUFFER
    assert not found["cos"].trainable
    assert not found["cos"].mutated


def test_frozen_parameters() -> None:
    model = GPT(2, tied=False)
    model.embed.requires_grad_(False)
    found = by_name(capture(model, tokens()))
    assert found["embed.weight"] == GraphInput("embed.weight", InputKind.PARAMETER, trainable=False, frozen=True)
    assert found["head.weight"].trainable


def test_a_tied_weight_is_one_input() -> None:
    names = list(by_name(capture(GPT(2, tied=True), tokens())))
    assert ("embed.weight" in names) != ("head.weight" in names)


def test_mutated_buffers() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).sum()

    found = by_name(capture(Normed(), torch.randn(3, 4)))
    mutated = {name for name, source in found.items() if source.mutated}
    assert mutated == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert found["norm.running_mean"].kind is InputKind.BUFFER


def test_mutated_user_inputs() -> None:
    def function(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        state.add_(1)
        return (x * weight).sum()

    program = capture(function, torch.randn(3), torch.zeros(3), torch.randn(3, requires_grad=True))
    assert [source.name for source in program.inputs if source.mutated] == ["state"]


def test_a_trainable_user_input() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum()

    found = by_name(capture(Scale(), torch.randn(3, requires_grad=True)))
    assert found["x"] == GraphInput("x", InputKind.INPUT, trainable=True)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_a_backward(context: Any) -> None:
    with context():
        program = capture(GPT(2), tokens())
    assert not program.differentiable
    assert program.tangents == []
    found = by_name(program)
    assert found["norm.weight"] == GraphInput("norm.weight", InputKind.PARAMETER, trainable=False)


def test_tangents_follow_the_primals() -> None:
    program = capture(GPT(2), tokens())
    assert len(program.tangents) == 1
    assert len(program.results) == program.num_outputs + len(program.inputs)


def test_an_output_without_gradient_has_no_tangent() -> None:
    class Two(GPT):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            loss = super().forward(ids)
            return loss, ids + 1

    program = capture(Two(2), tokens())
    assert program.num_outputs == 2
    assert len(program.tangents) == 1


def test_a_function_is_a_model_too() -> None:
    program = capture(lambda x: (x * 2).sum(), torch.ones(3, requires_grad=True))
    assert program.name in ("model", "function")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['blocks']._modules['0']._modules['ln']._parameters['weight']", "blocks.0.ln.weight"),
        ("L['self']._buffers['cos']", "cos"),
        ("L['tokens']", "tokens"),
        ("L['self'].blocks[0].weight", "blocks.0.weight"),
        ("L['kwargs']['mask']", "kwargs.mask"),
        ("G['TABLE']", "TABLE"),
    ],
)
def test_source_names(source: str, name: str) -> None:
    assert source_name(source) == name
