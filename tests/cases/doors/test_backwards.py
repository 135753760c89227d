"""Forwards and backwards in every order: equal to eager, or an error that names the argument; never silently wrong."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support.prepared import Stack, Trainee, assert_same_values, batch, check, eager, prepared, warmed
from torch import Tensor

from protrain_compile import ContextError, DoorError


def two_forwards_then_two_backwards(trainee: Trainee) -> None:
    for seed in range(3):
        losses = [trainee.forward(seed), trainee.forward(seed + 10)]
        for loss in losses:
            loss.backward()
        trainee.update()


def two_forwards_and_one_joint_backward(trainee: Trainee) -> None:
    for seed in range(3):
        (trainee.forward(seed) * trainee.forward(seed + 10)).backward()
        trainee.update()


def retained_graph(trainee: Trainee) -> None:
    for seed in range(3):
        loss = trainee.forward(seed)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        trainee.update()


def evaluation_before_step(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.backward(seed)
        with torch.no_grad():
            trainee.forward(seed + 10)
        trainee.update()


def skipped_step(trainee: Trainee) -> None:
    for seed in range(4):
        trainee.backward(seed)
        if seed != 2:
            trainee.optimizer.step()
        trainee.optimizer.zero_grad()


def dropped_gradients(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.backward(seed)
        trainee.optimizer.zero_grad()
        trainee.backward(seed + 10)
        trainee.update()


def late_lr(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.backward(seed)
        for group in trainee.optimizer.param_groups:
            group["lr"] *= 0.5
        trainee.update()


def late_scheduler(trainee: Trainee) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, lambda step: 0.5**step)
    for seed in range(3):
        trainee.backward(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of this order at the first step
            scheduler.step()
        trainee.update()


def abandoned_forward(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.forward(seed + 10)
        trainee.step(seed)


def held_forward(trainee: Trainee) -> None:
    held = []
    for seed in range(3):
        held.append(trainee.forward(seed + 10))
        trainee.step(seed)


def empty_step(trainee: Trainee) -> None:
    trainee.optimizer.step()
    trainee.step(0)
    trainee.optimizer.step()
    trainee.step(1)


def frozen_input(trainee: Trainee) -> None:
    """An input that takes a gradient itself."""
    for seed in range(3):
        x = batch(seed).requires_grad_()
        loss = trainee.called(x)
        loss.backward()
        assert x.grad is not None
        trainee.update()


ALWAYS = [
    two_forwards_then_two_backwards,
    two_forwards_and_one_joint_backward,
    retained_graph,
    abandoned_forward,
    held_forward,
    empty_step,
    frozen_input,
]
"""What needs no argument: such a step runs its updates at ``step()``."""

WAITING = [evaluation_before_step, skipped_step, dropped_gradients, late_lr, late_scheduler]
"""What needs updates that wait."""


@pytest.mark.parametrize("loop", ALWAYS)
def test_equals_eager(loop, residency: str) -> None:
    check(loop, residency)


@pytest.mark.parametrize("loop", ALWAYS + WAITING)
def test_equals_eager_where_updates_wait(loop, residency: str) -> None:
    check(loop, residency, max_grad_norm=math.inf)


@pytest.mark.parametrize("loop", WAITING)
def test_raises_where_updates_ran(loop, residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    with pytest.raises(DoorError, match="max_grad_norm"):
        loop(trainee)


def test_error_of_late_lr_names_what_changed(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    with pytest.raises(DoorError, match="hyper-parameter"):
        late_lr(trainee)


def test_lr_put_back_goes_on(residency: str) -> None:
    """The error leaves a state in which training goes on once the cause is gone."""

    def loop(trainee: Trainee) -> None:
        warmed(trainee)
        trainee.backward(0)
        group = trainee.optimizer.param_groups[0]
        if isinstance(trainee.called, torch._dynamo.eval_frame.OptimizedModule):
            group["lr"] *= 2
            with pytest.raises(DoorError):
                trainee.optimizer.step()
            group["lr"] /= 2
        trainee.update()
        trainee.step(1)

    check(loop, residency)


@pytest.mark.parametrize("norm", [None, math.inf])
def test_stale_context(residency: str, norm: float | None) -> None:
    """A backward through weights that were updated since its forward, as eager refuses for a saved tensor."""
    trainee = warmed(prepared(Stack(), residency, max_grad_norm=norm))
    old = trainee.forward(0)
    trainee.step(1)
    with pytest.raises(ContextError, match="updated since the forward"):
        old.backward()
    plain = warmed(eager(Stack()))
    old = plain.forward(0)
    plain.step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_second_backward_after_an_update(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    trainee.backward(0)
    with pytest.raises(DoorError, match="gradient_accumulation_steps"):
        trainee.backward(1)
    trainee.update()
    trainee.step(1)


def test_more_backwards_than_declared(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency, gradient_accumulation_steps=2))
    for seed in range(2):
        trainee.backward(seed)
    with pytest.raises(DoorError, match="gradient_accumulation_steps"):
        trainee.backward(2)


class Raises(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


def test_exception_before_the_backward_reaches_the_model(residency: str) -> None:
    def loop(trainee: Trainee) -> None:
        warmed(trainee)
        with pytest.raises(ValueError, match="on purpose"):
            Raises.apply(trainee.forward(0)).backward()
        trainee.steps(1, 2)

    trainee = check(loop, residency)
    assert trainee.managed.residency.mode == "in_backward"


def _break_off(trainee: Trainee, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Run a backward in which the artefact called as number ``call`` fails, as when memory runs out."""
    import protrain_compile

    graph = protrain_compile.schedule(trainee.called).parts[0].schedule.graphs["backward"]
    found = [n for n in graph.graph.nodes if "operation" in n.meta and n.meta["operation"].op == "backward"]
    target, calls, run = found[call].target, [n.target for n in found[: call + 1]], found[call].target._run
    before = calls.count(target) - 1  # a template serves several blocks
    count = 0

    def fail(boxed: list[Tensor]) -> object:
        nonlocal count
        count += 1
        if count > before:
            raise RuntimeError("out of memory, on purpose")
        return run(boxed)

    with monkeypatch.context() as patch:
        patch.setattr(target, "_run", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            trainee.backward(0)


@pytest.mark.parametrize("call", [0, 2, 4])
def test_exception_in_mid_backward(residency: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward says once how far the updates came; training goes on, and every value is finite."""
    trainee = warmed(prepared(Stack(), residency))
    _break_off(trainee, monkeypatch, call)
    with pytest.warns(RuntimeWarning, match=f"{call / 5:.0%} of the trainable chunks"):
        trainee.step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainee.steps(2, 3)
    assert trainee.managed.residency.mode == "in_backward"
    assert all(bool(value.isfinite().all()) for value in trainee.model.state_dict().values())


@pytest.mark.parametrize("call", [0, 2, 4])
def test_exception_in_mid_backward_where_updates_wait(
    residency: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was updated: with the gradients dropped, it is as if the backward had never begun."""
    model = Stack()
    plain, trainee = warmed(eager(model)), warmed(prepared(model, residency, max_grad_norm=math.inf))
    _break_off(trainee, monkeypatch, call)
    trainee.optimizer.zero_grad()
    plain.steps(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainee.steps(1, 2)
    assert_same_values(trainee.model, plain.model)


@pytest.mark.parametrize("norm", [None, math.inf])
def test_autograd_grad_is_refused(residency: str, norm: float | None) -> None:
    """``torch.autograd.grad`` must leave every ``.grad`` alone, but the backward would update the chunks."""
    model = Stack()
    trainee = warmed(prepared(model, residency, max_grad_norm=norm))
    before = trainee.model.state_dict()
    x = batch(0).requires_grad_()
    with pytest.raises(DoorError, match=r"autograd\.grad"):
        torch.autograd.grad(trainee.called(x), x)
    with pytest.raises(DoorError, match=r"autograd\.grad"):
        torch.autograd.grad(trainee.called(x), [x, trainee.model.head.weight])
    with pytest.raises(DoorError, match=r"backward\(inputs"):
        trainee.called(x).backward(inputs=[x])
    for name, value in trainee.model.state_dict().items():
        assert torch.equal(value, before[name])
    plain = warmed(eager(model))
    plain.step(0)
    trainee.step(0)
    assert_same_values(trainee.model, plain.model)


def test_backward_for_parameters_is_refused(residency: str) -> None:
    trainee = prepared(Stack(), residency)
    for inputs in (trainee.model.head.weight, list(trainee.model.parameters())):
        with pytest.raises(DoorError, match=r"without inputs="):
            trainee.forward(0).backward(inputs=inputs)
