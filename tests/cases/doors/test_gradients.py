"""``p.grad`` at every moment, and what reads and changes it: clipping, GradScaler, hooks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support.prepared import Stack, Trainee, assert_close, check, eager, forced, prepared, warmed
from torch import Tensor

from protrain_compile import DoorError


def gradients(trainee: Trainee) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in trainee.model.parameters()]


def read_everywhere(trainee: Trainee) -> list[Tensor]:
    """Read every gradient at every moment of three steps; return those that were there."""
    found = []
    for seed in range(3):
        assert gradients(trainee) == [None] * 16
        loss = trainee.forward(seed)
        assert gradients(trainee) == [None] * 16
        loss.backward()
        found += [gradient for gradient in gradients(trainee) if gradient is not None]
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
        assert gradients(trainee) == [None] * 16
    assert len(found) == 3 * 16
    return found


@pytest.mark.parametrize("norm", [None, math.inf])
def test_read_everywhere(residency: str, norm: float | None) -> None:
    """Undeclared: the first step's updates wait anyway, and from the first read on all do."""
    model = Stack()
    plain, trainee = eager(model), prepared(model, residency, max_grad_norm=norm)
    for found, expected in zip(read_everywhere(trainee), read_everywhere(plain), strict=True):
        assert_close("gradient", found, expected)


def test_first_read_late(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    assert trainee.model.head.weight.grad is None
    trainee.backward(0)
    with pytest.raises(DoorError, match=r"head\.weight\.grad was read.*max_grad_norm"):
        _ = trainee.model.head.weight.grad
    with pytest.raises(DoorError, match="max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)
    trainee.update()
    assert trainee.model.head.weight.grad is None
    trainee.step(1)


def test_gradients_after_step_are_none(residency: str) -> None:
    """Eager keeps them until ``zero_grad()``; they are used up here, and reading them says so by None."""
    trainee = prepared(Stack(), residency)
    trainee.backward(0)
    trainee.optimizer.step()
    assert gradients(trainee) == [None] * 16


def clip_norm(trainee: Trainee) -> Tensor:
    norms = []
    for seed in range(4):
        trainee.backward(seed)
        norms.append(torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 0.05))
        trainee.update()
    assert min(norms) > 0.05
    return torch.stack(norms)


def clip_value(trainee: Trainee) -> None:
    for seed in range(4):
        trainee.backward(seed)
        torch.nn.utils.clip_grad_value_(trainee.model.parameters(), 0.01)
        trainee.update()


def add_noise(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.backward(seed)
        for p in trainee.model.parameters():
            p.grad.add_(torch.randn_like(p.grad) * 0.01)
        trainee.update()


def replace(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.backward(seed)
        for p in trainee.model.parameters():
            p.grad = p.grad.sign() * 0.01
        trainee.model.head.bias.grad += 1
        trainee.update()


def drop_some(trainee: Trainee) -> None:
    """A parameter without a gradient is not updated and its moments and decay stay."""
    for seed in range(4):
        trainee.backward(seed)
        trainee.model.blocks[1].up.weight.grad = None
        trainee.model.stem.bias.grad = None
        if seed == 2:
            for p in trainee.model.blocks[2].parameters():
                p.grad = None
            del trainee.model.head.weight.grad
        trainee.update()


def model_zero_grad(trainee: Trainee) -> None:
    for seed in range(3):
        trainee.backward(seed)
        trainee.model.zero_grad()
        trainee.backward(seed + 10)
        trainee.optimizer.step()
        trainee.model.zero_grad()


def keep_gradients(trainee: Trainee) -> Tensor:
    """A gradient that the user holds on to keeps its value."""
    held = []
    for seed in range(4):
        trainee.backward(seed)
        held += [
            p.grad for p in (trainee.model.stem.weight, trainee.model.head.weight, trainee.model.blocks[1].up.bias)
        ]
        trainee.update()
    return torch.cat([each.flatten() for each in held])


def post_accumulate_hooks(trainee: Trainee) -> None:
    def halve(p: torch.nn.Parameter) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in trainee.model.blocks[1].parameters():
        p.register_post_accumulate_grad_hook(halve)
    trainee.steps(0, 1, 2)


LOOPS = [clip_norm, clip_value, add_noise, replace, drop_some, model_zero_grad, keep_gradients, post_accumulate_hooks]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("norm", [None, math.inf])
def test_equals_eager(loop, residency: str, norm: float | None) -> None:
    trainee = check(loop, residency, max_grad_norm=norm)
    assert trainee.managed.residency.mode == "at_step"


@pytest.mark.parametrize("loop", LOOPS)
def test_raises_where_updates_ran(loop, residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    with pytest.raises(DoorError, match="max_grad_norm"):
        loop(trainee)


@pytest.mark.parametrize("loop", [clip_norm, replace, drop_some])
def test_accumulated_gradients(loop, residency: str) -> None:
    """With a declared accumulation they add up in fp32."""

    def accumulated(trainee: Trainee) -> None:
        trainee.backward(5)
        loop(trainee)

    check(accumulated, residency, gradient_accumulation_steps=3, max_grad_norm=math.inf)


def test_declared_norm_clips_what_was_changed(residency: str) -> None:
    """``max_grad_norm`` is applied to the gradients as the user left them."""
    model = Stack()
    plain, trainee = eager(model), prepared(model, residency, max_grad_norm=0.05)
    for seed in range(3):
        for each in (plain, trainee):
            each.backward(seed)
            each.model.head.weight.grad.mul_(3)
            each.model.blocks[0].up.weight.grad = None
            if each is plain:
                torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.05)
            each.update()
    for p, q in zip(trainee.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert_close("parameter", p, q)


@pytest.mark.parametrize("norm", [None, math.inf])
def test_autocast(residency: str, norm: float | None) -> None:
    """A parameter that travels as 16 bits shows a gradient of its own type, and no master in the optimizer's state."""
    model = Stack()
    plain, trainee = eager(model), prepared(model, forced(residency, chunk_bytes=1_000), max_grad_norm=norm)
    for seed in range(3):
        for each in (plain, trainee):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = each.forward(seed)
            loss.backward()
        for p, q in zip(trainee.model.parameters(), plain.model.parameters(), strict=True):
            assert_close("gradient", p.grad, q.grad, rtol=2e-2)  # of bf16 products, added in another order
        exact = torch.stack([p.grad.double().norm() for p in trainee.model.parameters()]).norm()
        found = torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1e-3)
        assert_close("norm", found.double(), exact)
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1e-3)
        for each in (plain, trainee):
            each.update()
    ours, theirs = trainee.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert [list(state) for state in ours.values()] == [list(state) for state in theirs.values()]
    assert all(value.dtype == torch.float32 for value in trainee.model.state_dict().values())
    for p, q in zip(trainee.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert_close("parameter", p, q, rtol=2e-2)


def test_impossible_assignments(residency: str) -> None:
    trainee = prepared(Stack(), residency)
    weight = trainee.model.head.weight
    weight.grad = None
    trainee.backward(0)
    with pytest.raises(DoorError, match="shape"):
        weight.grad = torch.zeros(8)
    with pytest.raises(DoorError, match="shape"):
        weight.grad = torch.zeros(1)
    trainee.update()
    with pytest.raises(DoorError, match="between backward"):
        weight.grad = torch.zeros_like(weight)


def test_gradient_hooks_are_refused(residency: str) -> None:
    trainee = prepared(Stack(), residency)
    with pytest.raises(DoorError, match="register_post_accumulate_grad_hook"):
        trainee.model.head.weight.register_hook(lambda gradient: gradient * 2)


def scaled(trainee: Trainee, scaler: torch.amp.GradScaler, seed: int, spoil: bool = False, clip: bool = False) -> None:
    loss = trainee.forward(seed)
    scaler.scale(loss * (math.inf if spoil else 1.0)).backward()
    if clip:
        scaler.unscale_(trainee.optimizer)
        torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 0.05)
    scaler.step(trainee.optimizer)
    scaler.update()
    trainee.optimizer.zero_grad()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("norm", [None, math.inf])
def test_grad_scaler(residency: str, norm: float | None, clip: bool) -> None:
    def loop(trainee: Trainee) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for seed in range(5):
            scaled(trainee, scaler, seed, spoil=seed in (1, 3), clip=clip)
        return torch.tensor(scaler.get_scale())

    check(loop, residency, max_grad_norm=norm)


def test_grad_scaler_skips_a_step_bit_for_bit(residency: str) -> None:
    trainee = prepared(Stack(), residency)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled(trainee, scaler, 0)
    values, states = trainee.model.state_dict(), trainee.optimizer.state_dict()
    scaled(trainee, scaler, 1, spoil=True)
    assert scaler.get_scale() == 512.0
    for name, value in trainee.model.state_dict().items():
        assert torch.equal(value, values[name])
    for number, state in trainee.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, states["state"][number][name])
    scaled(trainee, scaler, 2)


def test_first_grad_scaler_late(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(DoorError, match="max_grad_norm"):
        scaled(trainee, scaler, 0)


def test_undeclared_clipping_from_the_first_step_warns_of_nothing(residency: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_norm(prepared(Stack(), residency))


def test_gradients_of_an_sgd(residency: str) -> None:
    check(clip_norm, residency, optimizers=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))


def test_gradients_with_an_unused_parameter(residency: str) -> None:
    """The declared norm leaves out what has no gradient."""
    model = Stack()
    model.spare = torch.nn.Parameter(torch.ones(3))

    def loop(trainee: Trainee) -> None:
        clip_norm(trainee)
        assert trainee.model.spare.grad is None

    trainee = check(loop, residency if residency != "mixed" else "split", model)
    assert torch.equal(trainee.model.state_dict()["spare"], torch.ones(3))


def test_gradients_held_from_step_to_step_take_no_more_memory() -> None:
    """Views of each step's gradients keep their memory, which dies with them: the next step's lie elsewhere."""
    trainee = prepared(Stack(), forced("offloaded"), max_grad_norm=math.inf)
    held: list[Tensor | None] = []
    sizes = []
    for seed in range(5):
        trainee.backward(seed)
        held = [None if p.grad is None else p.grad.view(-1) for p in trainee.model.parameters()]
        trainee.update()
        store = trainee.managed.packed.store
        sizes.append(store.pinned.held_bytes + store.pageable.held_bytes)
    assert all(gradient is not None for gradient in held)
    assert sizes[1:] == sizes[1:2] * 4
