"""A prepared model's training loops on a device whose streams are threads, under a few interleavings."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from support.device import install
from support.prepared import Stack, Trainee, assert_close, assert_same_values, eager, forced, prepared
from support.threaded import DeadlockError, ThreadedDevice
from torch import Tensor

SEEDS = range(5)


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler() -> Iterator[None]:
    """The tests share compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def device() -> Iterator[ThreadedDevice]:
    made = ThreadedDevice(records=True)
    with pytest.MonkeyPatch.context() as patch:
        install(made, patch)
        yield made


def loop(trainee: Trainee) -> Tensor:
    """Train, evaluate, abandon a forward, run two forwards, skip a backward, load a state dict."""
    losses = [trainee.step(seed) for seed in range(4)]
    with torch.no_grad():
        losses.append(trainee.forward(10))
    trainee.forward(11)
    losses.append(trainee.step(4))
    both = trainee.forward(5) + trainee.forward(6)
    both.backward()
    trainee.update()
    trainee.model.load_state_dict(trainee.model.state_dict())
    losses += [both.detach(), trainee.step(7), trainee.step(8)]
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("residency", "policy", "norm"),
    [("offloaded", "keep", None), ("mixed", "recompute", None), ("offloaded", "swap", math.inf)],
)
def test_equals_eager(residency: str, policy: str, norm: float | None, device: ThreadedDevice) -> None:
    model = Stack()
    plain, trainee = eager(model), prepared(model, forced(residency, policy), max_grad_norm=norm)
    for seed in SEEDS:
        device.reseed(seed)
        assert_close("losses", loop(trainee), loop(plain))
        assert_same_values(trainee.model, plain.model)
    trainee.managed.close()


def test_a_seed_reproduces_an_interleaving(device: ThreadedDevice) -> None:
    trainee = prepared(Stack())
    trainee.steps(*range(6))  # nothing waits for an event that has never been
    ran = []
    for seed in (0, 0, 1):
        device.synchronize()
        device.reseed(seed)
        trainee.steps(2, 3, 4, 5)  # as many as bring the landings, which are used in turn, round
        device.synchronize()
        ran.append([name for name, _ in device.ran])
    assert ran[0] == ran[1]
    assert sorted(ran[0]) == sorted(ran[2])
    assert ran[0] != ran[2]


def test_every_stream_is_a_thread(device: ThreadedDevice) -> None:
    """Computation, copies each way and updates run on threads of their own, and not on the launching one."""
    trainee = prepared(Stack())
    device.reseed(0)
    trainee.steps(0, 1)
    trainee.managed.close()
    threads: dict[str, set[int]] = {"compute": set(), "h2d": set(), "d2h": set(), "host": set()}
    for name, thread in device.ran:
        threads[re.split(r"\W", name)[0]].add(thread)
    assert all(len(each) == 1 for each in threads.values())
    assert len(set.union(*threads.values()) | {threading.get_ident()}) == 5


def test_a_wait_for_what_nothing_does_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.threaded.PATIENCE_S", 0.1)
    device = ThreadedDevice()
    device.submit(device.stream("h2d", "h2d"), lambda: None, "a copy", ready=lambda: False)
    with pytest.raises(DeadlockError, match=r"(?s)the end of h2d, and nothing can run.*h2d: 1 queued, first a copy"):
        device.synchronize()


def test_what_an_operation_raises_reaches_the_launching_thread() -> None:
    device = ThreadedDevice()

    def launch() -> None:
        device.submit(device.stream("h2d"), lambda: 1 / 0, "fails")
        device.synchronize()

    with pytest.raises(ZeroDivisionError):
        launch()
    device.synchronize()
