"""The optimizer stays an Optimizer: schedulers, edits, hooks, state in and out, what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from support.prepared import (
    EPS,
    RESIDENCIES,
    Stack,
    Trainee,
    adamw,
    assert_close,
    assert_same_values,
    batch,
    check,
    eager,
    forced,
    prepared,
    warmed,
)
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import protrain_compile
from protrain_compile import OptionError, Plan


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """The tests share compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


lr_scheduler = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.7**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=8),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, before: bool) -> None:
    """Made before or after ``prepare``: the rates that eager has, and no warning."""
    model = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = eager(model)
        schedulers = [SCHEDULERS[name](plain.optimizer)]
        made: list[lr_scheduler.LRScheduler] = []

        def optimizers(own: nn.Module) -> torch.optim.Optimizer:
            optimizer = adamw(own)
            if before:
                made.append(SCHEDULERS[name](optimizer))
            return optimizer

        trainee = prepared(model, "offloaded", optimizers)
        schedulers += made or [SCHEDULERS[name](trainee.optimizer)]
        for seed in range(6):
            for each, scheduler in zip((plain, trainee), schedulers, strict=True):
                each.step(seed)
                scheduler.step(*([1.0] if name == "plateau" else []))
            assert plain.optimizer.param_groups[0]["lr"] == trainee.optimizer.param_groups[0]["lr"]
    assert plain.optimizer.param_groups[0]["lr"] != 3e-3
    assert_same_values(trainee.model, plain.model)


def edit_by_hand(trainee: Trainee) -> None:
    for seed in range(6):
        if seed == 3:
            for group in trainee.optimizer.param_groups:
                group.update(lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3)
        trainee.step(seed)


def tensor_lr(trainee: Trainee) -> None:
    trainee.optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    trainee.steps(0, 1)
    trainee.optimizer.param_groups[0]["lr"].mul_(0.5)
    trainee.steps(2, 3)


@pytest.mark.parametrize("loop", [edit_by_hand, tensor_lr])
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_edits(loop, residency: str) -> None:
    check(loop, residency)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_edits_after_loading(residency: str) -> None:
    """``load_state_dict`` makes new groups: they count from then on."""

    def loop(trainee: Trainee) -> None:
        trainee.steps(0, 1)
        trainee.optimizer.load_state_dict(copy.deepcopy(trainee.optimizer.state_dict()))
        trainee.optimizer.param_groups[0]["lr"] = 0.05
        trainee.steps(2, 3)

    check(loop, residency)


def test_two_groups() -> None:
    def optimizers(model: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": decayed, "lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.3},
            {"params": others, "weight_decay": 0.0, "amsgrad": True, "maximize": True},
        ]
        return torch.optim.AdamW(groups, lr=2e-3, eps=EPS)

    for residency in RESIDENCIES:
        trainee = check(lambda each: each.steps(0, 1, 2, 3), residency, optimizers=optimizers)
        plain = eager(Stack(), optimizers)
        plain.step()
        assert_same_states(trainee.optimizer, plain.optimizer, values=False)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=3e-3, eps=EPS, weight_decay=0.1),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, eps=EPS, amsgrad=True, maximize=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, eps=EPS, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, maximize=True),
}


def assert_same_states(
    found: torch.optim.Optimizer, expected: torch.optim.Optimizer, *, values: bool = True, rtol: float = 1e-5
) -> None:
    """Compare state dicts: keys, shapes, types, groups; and ``values``."""
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for number, state in theirs["state"].items():
        assert list(ours["state"][number]) == list(state)
        for name, value in state.items():
            actual = ours["state"][number][name]
            if value is None:
                assert actual is None
                continue
            assert (actual.shape, actual.dtype, actual.device) == (value.shape, value.dtype, value.device)
            if values:
                assert_close(name, actual, value, rtol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_is_that_of_eager(name: str) -> None:
    """Before the first step, after some, right after ``step()``, and through ``optimizer.state``."""
    model = Stack()
    for residency in RESIDENCIES:
        plain, trainee = eager(model, OPTIMIZERS[name]), prepared(model, residency, OPTIMIZERS[name])
        assert_same_states(trainee.optimizer, plain.optimizer)
        for seed in range(3):
            for each in (plain, trainee):
                each.backward(seed)
                each.optimizer.step()
            # Moments of tiny gradients: sums in another order differ by more than those of parameters.
            assert_same_states(trainee.optimizer, plain.optimizer, rtol=1e-4)
            for each in (plain, trainee):
                each.optimizer.zero_grad()
        assert_same_values(trainee.model, plain.model)
        for p, q in zip(trainee.model.parameters(), plain.model.parameters(), strict=True):
            assert list(trainee.optimizer.state[p]) == list(plain.optimizer.state.get(q, {}))
        assert len(trainee.optimizer.state) == len(plain.optimizer.state)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_optimizers_and_earlier_steps(name: str, residency: str) -> None:
    """The optimizer has stepped before ``prepare``: its moments and step counts are kept."""
    model = Stack()
    first = eager(model, OPTIMIZERS[name])
    first.steps(0, 1)
    own = copy.deepcopy(first)  # a model and its optimizer together
    plain = Trainee(own.model, own.model, own.optimizer)
    plain_result = plain.steps(2, 3, 4)
    second, optimizer = protrain_compile.prepare(first.model, first.optimizer, plan=forced(residency))
    trainee = Trainee(second, torch.compile(second, backend="protrain", options=OPTIONS), optimizer)
    assert_close("losses", trainee.steps(2, 3, 4), plain_result)
    assert_same_values(second, own.model)
    assert_same_states(optimizer, own.optimizer, rtol=1e-4)


OPTIONS = {"compile": "eager", "schedule": "off"}


def saved(trainee: Trainee) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save({"model": trainee.model.state_dict(), "optimizer": trainee.optimizer.state_dict()}, buffer)
    return buffer


def loaded(trainee: Trainee, buffer: io.BytesIO, *, optimizer_first: bool = False) -> None:
    buffer.seek(0)
    content = torch.load(buffer)
    if optimizer_first:
        trainee.optimizer.load_state_dict(content["optimizer"])
    trainee.model.load_state_dict(content["model"])
    if not optimizer_first:
        trainee.optimizer.load_state_dict(content["optimizer"])


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_resume_is_exact(residency: str, dtype: torch.dtype, called: bool, optimizer_first: bool) -> None:
    """Ten steps equal five, save, load into another prepared model (called already, or not), and five, to the bit."""

    def data(seed: int) -> torch.Tensor:
        return batch(seed).to(dtype)

    model = Stack().to(dtype)
    plan = forced(residency, chunk_bytes=1_000) if dtype != torch.float32 else residency
    through = prepared(model, plan, data=data)
    through.steps(*range(5))
    buffer = saved(through)
    through.steps(*range(5, 10))
    other = prepared(Stack().to(dtype), plan, data=data)
    if called:
        other.steps(20, 21)
    loaded(other, buffer, optimizer_first=optimizer_first)
    # The first step of a model waits for step(), those of `through` ran in the backward: the arithmetic is the same.
    other.steps(*range(5, 10))
    for name, value in through.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value), name
    ours, theirs = other.optimizer.state_dict(), through.optimizer.state_dict()
    for number, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.equal(ours["state"][number][name], value), name


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_plain_checkpoint_in_and_out(residency: str) -> None:
    """A checkpoint of plain torch loads into a prepared model, and one of a prepared model into plain torch."""
    model = Stack()
    plain = eager(model)
    plain.steps(0, 1, 2)
    trainee = prepared(Stack(), residency)
    loaded(trainee, saved(plain))
    assert_same_values(trainee.model, plain.model, rtol=0)
    assert_same_states(trainee.optimizer, plain.optimizer, rtol=0)
    for each in (plain, trainee):
        each.steps(3, 4, 5)
    assert_same_values(trainee.model, plain.model)
    back = eager(Stack())
    loaded(back, saved(trainee))
    assert_same_values(back.model, trainee.model, rtol=0)
    for each in (plain, back):
        each.steps(6, 7)
    assert_same_values(back.model, plain.model)


def test_loading_a_state_without_entries_resets() -> None:
    model = Stack()
    plain, trainee = eager(model), warmed(prepared(model))
    fresh = eager(model)
    trainee.model.load_state_dict(fresh.model.state_dict())
    trainee.optimizer.load_state_dict(fresh.optimizer.state_dict())
    assert_same_states(trainee.optimizer, fresh.optimizer)
    for each in (plain, trainee):
        each.steps(0, 1)
    assert_same_values(trainee.model, plain.model)


def test_bad_state_dicts_raise_as_eager() -> None:
    trainee = warmed(prepared(Stack()))
    before = trainee.optimizer.state_dict()
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict()
    with pytest.raises(ValueError, match="doesn't match the size"):
        trainee.optimizer.load_state_dict(other)
    for name, value in trainee.optimizer.state_dict()["state"][3].items():
        assert torch.equal(value, before["state"][3][name])
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainee.model.load_state_dict({**trainee.model.state_dict(), "head.bias": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="Missing key"):
        trainee.model.load_state_dict({})
    with pytest.raises(OptionError, match="assign=True"):
        trainee.model.load_state_dict(trainee.model.state_dict(), assign=True)
    trainee.step(0)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_state_dict_right_after_step(residency: str) -> None:
    """It holds the new values, and fresh ones: later steps do not change it."""
    model = Stack()
    plain, trainee = eager(model), prepared(model, residency)
    for seed in range(3):
        for each in (plain, trainee):
            each.backward(seed)
            each.optimizer.step()
        found = trainee.model.state_dict()
        kept = {name: value.clone() for name, value in found.items()}
        assert_same_values(trainee.model, plain.model)
        assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in found.values())
        for each in (plain, trainee):
            each.optimizer.zero_grad()
            each.step(seed + 10)
        assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_safetensors(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    trainee = warmed(prepared(Stack()))
    safetensors.save_file(trainee.model.state_dict(), tmp_path / "a.safetensors")
    safetensors.save_model(trainee.model, str(tmp_path / "b.safetensors"))
    for name in ("a", "b"):
        model = Stack()
        safetensors.load_model(model, str(tmp_path / f"{name}.safetensors"))
        assert_same_values(model, trainee.model, rtol=0)
        other = prepared(Stack())
        other.model.load_state_dict(safetensors.load_file(tmp_path / f"{name}.safetensors"))
        assert_same_values(other.model, trainee.model, rtol=0)
    compiled = trainee.called.state_dict()
    assert {key.removeprefix("_orig_mod.") for key in compiled} == set(trainee.model.state_dict())


def test_step_hooks() -> None:
    calls: list[str] = []
    trainee = prepared(Stack())
    handles = [
        trainee.optimizer.register_step_pre_hook(lambda o, a, k: calls.append("pre")),
        trainee.optimizer.register_step_post_hook(lambda o, a, k: calls.append("post")),
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append("global post")),
    ]
    trainee.steps(0, 1)
    for handle in handles:
        handle.remove()
    trainee.step(2)
    assert calls == ["global pre", "pre", "post", "global post"] * 2


def test_what_is_refused_after_prepare() -> None:
    trainee = prepared(Stack())
    optimizer = trainee.optimizer
    with pytest.raises(OptionError, match="add the group before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(OptionError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(OptionError, match="state_dict"):
            copied(optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OptionError, match="amsgrad after prepare"):
        trainee.step(0)
    optimizer.param_groups[0]["amsgrad"] = False
    trainee.steps(0, 1)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert "lr: 0.003" in repr(optimizer)


class Muon(torch.optim.Optimizer):
    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})


class OwnAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make",
    [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Adagrad, Muon, OwnAdamW],
    ids=lambda each: each.__name__,
)
def test_other_optimizers_are_refused(make: type) -> None:
    model = Stack()
    with pytest.raises(OptionError, match=rf"{make.__name__} is not supported.*torch\.optim\.AdamW"):
        protrain_compile.prepare(model, make(model.parameters()))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_max_grad_norm_equals_clipping() -> None:
    """Declared, it clips in ``step()`` as ``clip_grad_norm_`` does; below the limit it changes nothing."""
    model = Stack()
    for residency in RESIDENCIES:
        for limit in (0.02, 100.0):
            plain, trainee = eager(model), prepared(model, residency, max_grad_norm=limit)
            for seed in range(5):
                plain.backward(seed)
                torch.nn.utils.clip_grad_norm_(plain.model.parameters(), limit)
                plain.update()
                trainee.step(seed)
            assert_same_values(trainee.model, plain.model)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("norm", [None, 0.02, math.inf])
def test_accumulation_windows(residency: str, norm: float | None) -> None:
    """Windows of 1, 4, 2, 3, 1 micro-batches with 4 declared; ``zero_grad`` between two backwards clears."""

    def loop(trainee: Trainee) -> None:
        for number, window in enumerate((1, 4, 2, 3, 1, 4, 4)):
            if number == 3:
                trainee.backward(99)
                trainee.optimizer.zero_grad()
            for seed in range(window):
                (trainee.forward(10 * number + seed) / window).backward()
            if norm is not None and trainee.model is trainee.called:
                torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), norm)
            trainee.update()

    trainee = check(loop, residency, gradient_accumulation_steps=4, max_grad_norm=norm)
    assert trainee.managed.residency.mode == ("in_backward" if norm is None else "at_step")


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_accumulation_equals_one_big_batch(residency: str) -> None:
    model = Stack()
    plain, trainee = eager(model), prepared(model, residency, gradient_accumulation_steps=4)
    for number, window in enumerate((1, 4, 2, 3, 1)):
        parts = [batch(10 * number + seed) for seed in range(window)]
        plain.called(torch.cat(parts)).backward()
        plain.update()
        for part in parts:
            (trainee.called(part) / window).backward()
        trainee.update()
    assert_same_values(trainee.model, plain.model)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_type(residency: str, dtype: torch.dtype) -> None:
    """Many small gradients beside one large one: in bf16 they are lost, as in eager; in fp32 they count."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).bfloat16()
    sizes = [1.0, *[2.0**-9] * 7]

    def accumulate(trainee: Trainee) -> Tensor:
        for _ in range(2):  # from the second step on, the last of the declared backwards updates
            trainee.optimizer.zero_grad()
            for size in sizes:
                trainee.called(torch.ones(1, 4, dtype=torch.bfloat16)).sum().mul(size).backward()
            trainee.optimizer.step()
        return trainee.optimizer.state_dict()["state"][0]["exp_avg"]

    plan = Plan(uniform_policy="keep", uniform_residency=residency if residency != "mixed" else "split")
    arguments = {"gradient_accumulation_steps": len(sizes), "gradient_accumulation_dtype": dtype}
    trainee = prepared(model, plan, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), **arguments)
    found = accumulate(trainee)
    total = sum(sizes) if dtype == torch.float32 else 1.0
    assert trainee.managed.packed.mode == "in_backward"
    assert_close("exp_avg", found, torch.full((4, 4), total * (1 - 0.9**2)), rtol=1e-6)
