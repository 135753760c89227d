"""Gradients that a schedule does not bring by itself: zeros, those from outside, and what the user still holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.prepared import Stack, Trainee, assert_close, assert_same_values, check, eager, prepared, warmed
from torch import Tensor, nn

from protrain_compile import DoorError


class Alternating(Stack):
    """Uses one of its blocks in every other call."""

    used = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        return (self.blocks[1](x) if self.used else x).square().mean() + self.blocks[2](x).square().mean()


@pytest.mark.parametrize("norm", [None, math.inf])
def test_zeros_update_as_in_eager(residency: str, norm: float | None) -> None:
    """Momentum and decay go on where a gradient is zero; where it is None, nothing does."""

    def loop(trainee: Trainee) -> None:
        for seed, (used, to_none) in enumerate([(1, 1), (1, 0), (0, 0), (0, 1), (0, 1), (1, 0), (0, 0), (1, 0)]):
            trainee.model.used = bool(used)
            trainee.backward(seed)
            trainee.optimizer.step()
            trainee.optimizer.zero_grad(set_to_none=bool(to_none))
        trainee.optimizer.step()  # of zeros alone

    check(loop, "split" if residency == "mixed" else residency, Alternating(), max_grad_norm=norm)


def test_zeros_can_be_read_and_added_to(residency: str) -> None:
    def loop(trainee: Trainee) -> Tensor:
        weight, spare = trainee.model.blocks[1].up.weight, trainee.model.head.bias
        trainee.backward(0)
        trainee.optimizer.zero_grad(set_to_none=False)
        assert not weight.grad.any()
        weight.grad.add_(0.5)
        spare.grad = None
        trainee.backward(1)
        trainee.update()
        assert weight.grad is None
        return weight.detach().clone()

    check(loop, residency)


class Penalty(torch.autograd.Function):
    """Half the square of a tensor; its gradient is the tensor."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.value = weight.detach().clone()
        return (weight * weight).sum() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.value


def penalised(trainee: Trainee, seed: int) -> None:
    loss = trainee.forward(seed) + 0.1 * Penalty.apply(trainee.model.blocks[1].up.weight)
    loss.backward()


@pytest.mark.parametrize("norm", [None, 0.05, math.inf])
def test_gradients_from_outside_count(residency: str, norm: float | None) -> None:
    """From the first step on: updates wait then."""

    def loop(trainee: Trainee) -> None:
        for seed in range(4):
            penalised(trainee, seed)
            if norm is not None and trainee.model is trainee.called:
                torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), norm)
            trainee.update()

    check(loop, residency, max_grad_norm=norm)


def test_gradients_from_outside_alone(residency: str) -> None:
    def loop(trainee: Trainee) -> Tensor:
        trainee.step(0)
        Penalty.apply(trainee.model.blocks[1].up.weight).backward()
        gradient = trainee.model.blocks[1].up.weight.grad.clone()
        trainee.optimizer.zero_grad()
        assert trainee.model.blocks[1].up.weight.grad is None
        Penalty.apply(trainee.model.blocks[2].up.weight).backward()
        trainee.update()
        return gradient

    check(loop, residency)


def test_late_gradients_from_outside_raise(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    penalised(trainee, 0)
    with pytest.raises(DoorError, match=r"blocks\.1\.up\.weight was updated .* max_grad_norm"):
        trainee.optimizer.step()


def test_gradients_from_outside_before_the_first_call_raise() -> None:
    trainee = prepared(Stack())
    Penalty.apply(trainee.model.head.weight).backward()
    with pytest.raises(DoorError, match=r"head\.weight has a gradient from outside"):
        trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.optimizer.step()


HELD = {
    "itself": lambda p: p.grad,
    "view": lambda p: p.grad[1:3].t(),
    "detached": lambda p: p.grad.detach(),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("norm", [None, math.inf])
def test_what_is_held_keeps_its_values(residency: str, name: str, norm: float | None) -> None:
    trainee, plain = prepared(Stack(), residency, max_grad_norm=norm), eager(Stack())
    plain.model.load_state_dict(trainee.model.state_dict())
    held = []
    for seed in range(2):
        for each in (trainee, plain):
            each.backward(seed)
        held.append(
            (HELD[name](trainee.model.blocks[1].up.weight), HELD[name](plain.model.blocks[1].up.weight).clone())
        )
        for each in (trainee, plain):
            each.update()
    for each in (trainee, plain):
        each.steps(5, 6)
    for found, expected in held:
        assert_close("held", found, expected)
    assert_same_values(trainee.model, plain.model)


def test_a_loop_that_never_looks_keeps_no_memory() -> None:
    trainee = warmed(prepared(Stack(), max_grad_norm=1.0))
    landings = [landing.data_ptr() for landing in trainee.managed.packed.store.landings]
    trainee.steps(0, 1)
    assert [landing.data_ptr() for landing in trainee.managed.packed.store.landings] == landings


def test_norms_outside_are_refused(residency: str) -> None:
    """An eager operation on a parameter that records a gradient."""
    trainee = warmed(prepared(Stack(), residency), 1)
    with pytest.raises(DoorError, match="outside of the compiled model"):
        trainee.forward(0) + nn.utils.parameters_to_vector(trainee.model.parameters()).norm()
