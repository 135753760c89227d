"""The first call of a prepared model: what packs it, and what breaks it off."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.light import GPT
from support.models import tokens
from support.prepared import Stack, adamw, assert_close, assert_same_values, batch, eager, prepared
from torch import nn

import protrain_compile
from protrain_compile.runtime.chunk_store import ChunkStore
from protrain_compile.runtime.host_memory import HostMemory, HostMemoryError


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """The tests share compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class OnceBroken:
    """Wraps a function that raises at one call."""

    def __init__(self, function: Any, call: int, error: BaseException) -> None:
        self.function, self.left, self.error = function, call, error

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*arguments, **keywords)


BREAKS = {
    "allocating": (HostMemory, "allocate", 1),
    "allocating masters": (HostMemory, "allocate", 2),
    "moving in": (ChunkStore, "write", 1),
    "moving in, later": (ChunkStore, "write", 9),
    "moments": (ChunkStore, "add_moments", 1),
    "moments' memory": (HostMemory, "allocate", 3),
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("error", [HostMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_packing_that_breaks_off(name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value can be read, written and saved; the next call goes on, and trains as if nothing had been."""
    model = Stack().bfloat16()
    plain, trainee = (prepared(model, data=lambda seed: batch(seed).bfloat16()) for _ in range(2))
    owner, method, call = BREAKS[name]
    function = getattr(owner, method)
    broken = OnceBroken(function, call, error)
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, functools.partialmethod(broken))
        with pytest.raises(type(error)):
            trainee.forward(0)
    if name.startswith("allocating"):
        assert trainee.managed.residency is None
    assert_same_values(trainee.model, model, rtol=0)
    assert trainee.optimizer.state_dict()["state"] == {}
    for each in (plain, trainee):
        with torch.no_grad():
            each.model.head.bias.add_(1.0)
            each.model.stem.weight[0].zero_()
        each.steps(0, 1)
    assert_same_values(trainee.model, plain.model, rtol=0)


def test_states_wait_while_packing_has_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that had stepped before keeps its states."""
    source = eager(Stack())
    source.steps(0, 1)
    given = copy.deepcopy(source.optimizer.state_dict())
    trainee = prepared(source.model)
    trainee.optimizer.load_state_dict(given)
    with monkeypatch.context() as patched:
        patched.setattr(ChunkStore, "add_moments", OnceBroken(None, 1, HostMemoryError("no memory")))
        with pytest.raises(HostMemoryError):
            trainee.forward(0)
    for number, state in trainee.optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], given["state"][number]["exp_avg"])
    for each in (source, trainee):
        each.steps(2, 3)
    assert_same_values(trainee.model, source.model)


@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_init_that_raises(call: int) -> None:
    """The model is on ``meta`` as before, and can be prepared."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)], nn.BatchNorm1d(4))
    optimizer = adamw(model)
    parameters = list(model.parameters())

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.5)

    with pytest.raises(ZeroDivisionError):
        protrain_compile.prepare(model, optimizer, init=OnceBroken(init, call, ZeroDivisionError()))
    assert type(optimizer) is torch.optim.AdamW
    assert all(each.is_meta for each in [*model.parameters(), *model.buffers()])
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in parameters]

    def whole(module: nn.Module) -> None:
        init(module)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    protrain_compile.prepare(model, optimizer, init=whole)
    for name, value in model.state_dict().items():
        assert (value == (0.5 if name.endswith(("weight", "bias")) else 0)).all()


def test_tied_weights_in_and_out(tmp_path: Any) -> None:
    """Both names, as in eager; one place in the chunks; saved, and loaded in either order of names."""
    model = GPT(2, tied=True)
    plain = eager(model)
    trainee = prepared(model, data=lambda seed: tokens(seed=seed))
    for moment in range(2):
        found = trainee.model.state_dict()
        assert list(found) == list(plain.model.state_dict())
        assert torch.equal(found["head.weight"], found["embed.weight"])
        save_file(found, tmp_path / "model.safetensors")
        saved = load_file(tmp_path / "model.safetensors")
        for order in (list(saved), list(reversed(saved))):
            other = prepared(GPT(2, tied=True))
            other.model.load_state_dict({name: saved[name] for name in order})
            assert_same_values(other.model, trainee.model, rtol=0)
        if moment == 0:
            trainee.step(0)
    places = [slot.parameter for chunk in trainee.managed.layout.chunks for slot in chunk.slots]
    assert len(places) == len(set(places)) == len(list(model.parameters()))


@pytest.mark.parametrize("residency", ["offloaded", "persistent"])
def test_a_model_that_is_evaluated_first(residency: str) -> None:
    """Chunks are those of training first, updates run in the backward, nothing is fetched on demand."""
    model = Stack()
    plain, trainee, other = eager(model), prepared(model, residency), prepared(model, residency)
    for each in (plain, trainee):
        with torch.no_grad():
            each.forward(9)
    losses = [each.steps(0, 1, 2) for each in (plain, trainee, other)]
    assert torch.equal(losses[1], losses[2])
    assert_close("losses", losses[1], losses[0])
    assert_same_values(trainee.model, other.model, rtol=0)
    assert trainee.managed.layout == other.managed.layout
    assert trainee.managed.packed.store.spec.residency == other.managed.packed.store.spec.residency
    assert trainee.managed.packed.mode == "in_backward"
    assert trainee.managed.packed.counters.misses == other.managed.packed.counters.misses == 0


def test_a_first_evaluation_without_the_autocast_of_training() -> None:
    """Chunks hold what the evaluation read, fp32; training under autocast is right all the same."""
    model = Stack()
    plain, trainee = eager(model), prepared(model)
    for each in (plain, trainee):
        with torch.no_grad():
            each.forward(9)
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each.forward(seed)
            loss.backward()
            each.update()
    assert_same_values(trainee.model, plain.model, rtol=1e-2)
    assert {chunk.dtype for chunk in trainee.managed.layout.chunks} == {torch.float32}
