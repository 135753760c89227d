"""Case 21: evaluation in all its forms between training steps."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.compare import compile_model
from support.light import GPT
from support.models import tokens
from support.prepared import Stack, assert_same_values, batch, eager, forced, prepared

import protrain_compile
from protrain_compile import Plan

STEPS = 4


def train(model: torch.nn.Module, called: Any, evaluate: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses = []
    for number in range(STEPS):
        loss = called(tokens(seed=number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        evaluate()
    return losses


def compiles() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("policy", ["keep", "recompute", "swap"])
def test_interleaved(policy: str) -> None:
    """Evaluation sees the newest weights, changes nothing, and each mode compiles once."""
    model = GPT(3)
    plain = copy.deepcopy(model)
    alone = copy.deepcopy(model)
    compiled = compile_model(model, plan=Plan.uniform(policy))
    seen: list[torch.Tensor] = []
    counts: list[int] = []

    def evaluate() -> None:
        batch = tokens(seed=100)
        with torch.no_grad():
            expected = model(batch)
            seen.append(compiled(batch) - expected)
        with torch.inference_mode():
            seen.append(compiled(batch) - expected)
        model.eval()
        with torch.no_grad():
            seen.append(compiled(batch) - expected)
        seen.append(compiled(batch).detach() - expected)
        model.train()
        counts.append(compiles())

    losses = train(model, compiled, evaluate)
    for difference in seen:
        torch.testing.assert_close(difference, torch.zeros(()), rtol=0, atol=1e-5)
    # train, no_grad, inference_mode; then the same in eval: no_grad and with gradients (no flag is read: fewer).
    assert counts[0] == counts[-1], "evaluation kept compiling"
    assert counts[0] <= 5
    alone_losses = train(alone, compile_model(alone, plan=Plan.uniform(policy)), lambda: None)
    assert [loss.item() for loss in losses] == [loss.item() for loss in alone_losses]
    for loss, expected in zip(losses, train(plain, plain, lambda: None), strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_modes_compile_once_each() -> None:
    model = GPT(3, dropout=0.1)
    compiled = compile_model(model)
    compiled(tokens()).backward()
    assert compiles() == 1
    for mode, count in ((torch.no_grad, 2), (torch.inference_mode, 3), (torch.no_grad, 3), (torch.inference_mode, 3)):
        with mode():
            compiled(tokens())
        assert compiles() == count
    model.eval()  # dropout reads the flag
    with torch.no_grad():
        compiled(tokens())
        compiled(tokens())
    assert compiles() == 4
    schedule = protrain_compile.schedule(compiled)
    assert set(schedule.graphs) == {"forward", "backward", "inference", "inference.1", "inference.2"}


def test_evaluation_inside_a_step() -> None:
    """An evaluation between a forward and its backward."""
    model = GPT(3)
    compiled = compile_model(model, plan=Plan.uniform("recompute"))
    loss = compiled(tokens())
    with torch.no_grad():
        compiled(tokens(seed=1))
    loss.backward()
    reference = copy.deepcopy(model)
    reference.zero_grad()
    reference(tokens()).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_inference_keeps_nothing() -> None:
    model = GPT(3)
    compiled = compile_model(model)
    with torch.no_grad():
        compiled(tokens())
    (part,) = protrain_compile.schedule(compiled).parts
    assert len(part.graph.contexts) == 0
    assert set(part.schedule.graphs) == {"inference"}
    assert "saved for the backward" not in protrain_compile.schedule(compiled).render()


def test_inference_tensors_as_inputs() -> None:
    """A batch made under inference_mode has no version counter."""
    model = GPT(3)
    compiled = compile_model(model)
    with torch.inference_mode():
        batch = tokens().clone()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_a_prepared_model_that_is_first_called_in_inference_mode(residency: str) -> None:
    """What that call allocates is written in training, which refuses tensors that were made in inference mode."""
    model = Stack()
    ours, plain = prepared(model, forced(residency, "swap"), max_grad_norm=1.0), eager(model)
    with torch.inference_mode():
        torch.testing.assert_close(ours.called(batch()), plain.called(batch()))
    for seed in range(3):
        ours.step(seed)
        plain.called(batch(seed)).backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.update()
    assert_same_values(ours.model, plain.model)
