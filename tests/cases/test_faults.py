"""What fails, fails cleanly: memory runs out, copies and updates raise, Ctrl-C, forks.

After every fault the parameters can be read, each chunk holds what it held before the fault or what a whole update gave
it, and training goes on once the reason is gone.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.prepared import Stack, Trainee, assert_same_values, eager, prepared, warmed
from torch import Tensor

from protrain_compile import DoorError, HostUpdateError, managed, residency
from protrain_compile.residency import ChunkResidency
from protrain_compile.runtime.chunk_store import ChunkStore
from protrain_compile.runtime.host_budget import HostMemoryError
from protrain_compile.runtime.host_memory import HostMemory
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.updates.host import TorchUpdater


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """The tests share compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Fault:
    """Makes one call of a function raise, or interrupts the process in it."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, error: Callable[[], None]) -> None:
        self.calls = 0
        self.at = -1
        self._error = error
        original = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if number == self.at:
                self._error()
            return original(*arguments, **keywords)

        patch.setattr(owner, name, call)

    def arm(self, at: int) -> None:
        """Strike in the call with number ``at`` from now on."""
        self.calls, self.at = 0, at

    @property
    def struck(self) -> bool:
        """Whether that call has come."""
        return 0 <= self.at < self.calls


def out_of_memory() -> None:
    raise HostMemoryError("out of memory, on purpose")


def values(trainee: Trainee) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainee.model.state_dict().items()}


def assert_whole_chunks(trainee: Trainee, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Every chunk holds its values from before or from after the step."""
    found = values(trainee)
    names = [spec.name for spec in trainee.managed.specs]
    for chunk in trainee.managed.layout.chunks:
        own = [names[slot.parameter] for slot in chunk.slots]
        is_old, is_new = (all(torch.equal(found[n], each[n]) for n in own) for each in (before, after))
        assert is_old or is_new, f"chunk {chunk.index}: {own}"


# ---- memory runs out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", ["offloaded", "mixed"])
def test_host_memory_runs_out_while_packing(residency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every allocation in turn: nothing is lost, and the same call works when there is memory."""
    fault = Fault(monkeypatch, HostMemory, "allocate", out_of_memory)
    model = Stack()
    plain, trainee = eager(model), prepared(model, residency, max_grad_norm=math.inf)
    threads = threading.active_count()
    for at in range(20):
        fault.arm(at)
        try:
            trainee.forward(0)
        except HostMemoryError:
            assert_same_values(trainee.model, model, rtol=0)
            assert threading.active_count() <= threads + 1  # a worker that goes on waiting for its model
            continue
        break
    assert not fault.struck
    assert at == 2, "one slab for what crosses the link, one for moments"
    fault.arm(-1)
    for each in (plain, trainee):
        each.steps(0, 1, 2)
    assert_same_values(trainee.model, plain.model)
    store = trainee.managed.packed.store
    assert store.pinned.held_bytes + store.pageable.held_bytes <= store.spec.host_bytes()


@pytest.mark.parametrize(("name", "sites"), [("empty", 3), ("zeros_like", 2), ("zeros", 4)])
def test_device_memory_runs_out_while_packing(name: str, sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every allocation on the device in turn: buffers, gradients, parameters and moments of persistent chunks."""

    def fail() -> None:
        raise torch.OutOfMemoryError("on purpose")

    fault = Fault(monkeypatch, torch, name, fail)
    model = Stack()
    plain, trainee = eager(model), prepared(model, "mixed")
    struck = 0
    for at in range(100):
        fault.arm(at)
        try:
            trainee.forward(0)
        except torch.OutOfMemoryError:
            struck += 1
            assert_same_values(trainee.model, model, rtol=0)
            continue
        break
    fault.arm(-1)
    assert struck >= sites
    for each in (plain, trainee):
        each.steps(0, 1, 2)
    assert_same_values(trainee.model, plain.model)


@pytest.mark.parametrize("norm", [None, math.inf])
def test_host_memory_runs_out_for_accumulators(norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward: it raises, the gradients can be dropped, and the step be run again."""
    fault = Fault(monkeypatch, HostMemory, "allocate", out_of_memory)
    model = Stack()
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": norm}
    plain, trainee = eager(model), prepared(model, "offloaded", **arguments)
    trainee.forward(0)
    struck = 0
    for at in range(10):
        fault.arm(at)
        try:
            trainee.backward(0)
        except HostMemoryError:
            struck += 1
            assert_same_values(trainee.model, model, rtol=0)
            trainee.optimizer.zero_grad()
            continue
        break
    fault.arm(-1)
    assert struck == 3, "none, one, three of five accumulators were made, and stayed"
    trainee.optimizer.zero_grad()
    for each in (plain, trainee):
        for seed in range(4):
            each.backward(seed)
            each.step(seed + 10)
    assert_same_values(trainee.model, plain.model)


# ---- copies and updates ---------------------------------------------------------------------------------------------


class CopyError(Exception):
    pass


@pytest.mark.parametrize("norm", [None, math.inf])
def test_a_copy_raises(norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of a step in turn; chunks are old or new, and what is read next is not what the copy left behind."""

    def fail() -> None:
        raise CopyError

    trainee = warmed(prepared(Stack(), "offloaded", max_grad_norm=norm))
    fault = Fault(monkeypatch, type(trainee.managed.packed.streams), "copy", fail)
    for at in range(100):
        before = values(trainee)
        expected = _step_from(trainee, before)
        fault.arm(at)
        try:
            trainee.step(5)
        except CopyError:
            fault.arm(-1)
            assert_whole_chunks(trainee, before, expected)
            _recover(trainee)
            continue
        break
    assert at >= 10
    fault.arm(-1)
    trainee.steps(6, 7)
    assert all(bool(value.isfinite().all()) for value in values(trainee).values())


def _step_from(trainee: Trainee, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what step 5 makes of the values, which are put back, as are the states."""
    states = trainee.optimizer.state_dict()
    trainee.step(5)
    after = values(trainee)
    trainee.model.load_state_dict(before)
    trainee.optimizer.load_state_dict(states)
    return after


def _recover(trainee: Trainee) -> None:
    """Go on after a step that broke off: drop what waits; a forward says what was updated."""
    trainee.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with torch.no_grad():
            trainee.forward(0)


class Fails(TorchUpdater):
    """Fails in one kind of job, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.operation = ""

    def _check(self, operation: str) -> None:
        if operation == self.operation:
            raise MemoryError("on purpose")

    def update(self, *arguments: Any) -> None:
        self._check("update")
        super().update(*arguments)

    def accumulate(self, *arguments: Any) -> None:
        self._check("accumulate")
        super().accumulate(*arguments)

    def convert(self, *arguments: Any) -> None:
        self._check("convert")
        super().convert(*arguments)


@pytest.mark.parametrize("operation", ["update", "accumulate", "convert"])
def test_a_host_job_raises(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It surfaces at the next ``step()``, once, with its cause; then training goes on."""
    updater = Fails()
    monkeypatch.setattr(managed, "HostWorker", lambda: HostWorker(updater))
    trainee = prepared(Stack(), "offloaded", gradient_accumulation_steps=2)
    for seed in range(2):
        trainee.backward(seed)
        trainee.step(seed)
    updater.operation = operation
    trainee.backward(2)
    trainee.backward(3)
    trainee.managed.packed.worker.drain()
    updater.operation = ""
    with pytest.raises(HostUpdateError, match=r"on purpose.*every other chunk is whole") as raised:
        trainee.optimizer.step()
    assert isinstance(raised.value.__cause__, MemoryError)
    assert all(bool(value.isfinite().all()) for value in values(trainee).values())
    trainee.update()
    trainee.steps(4, 5)
    assert all(bool(value.isfinite().all()) for value in values(trainee).values())


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Return what presses Ctrl-C; a process in the background may have been started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


PHASES = {
    "forward": (ChunkResidency, "wait", None),
    "backward, moving": (ChunkResidency, "offload", None),
    "backward, collecting": (ChunkResidency, "collect", None),
    "backward, updating": (ChunkResidency, "apply", None),
    "step": (ChunkResidency, "apply", math.inf),
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_a_step(phase: str, ctrl_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, norm = PHASES[phase]
    fault = Fault(monkeypatch, owner, name, ctrl_c)
    trainee = warmed(prepared(Stack(), "mixed", max_grad_norm=norm))
    for at in (0, 1, 2):
        before = values(trainee)
        expected = _step_from(trainee, before)
        fault.arm(at)
        with pytest.raises(KeyboardInterrupt):
            trainee.step(5)
        fault.arm(-1)
        assert_whole_chunks(trainee, before, expected)
        _recover(trainee)
    trainee.steps(6, 7)
    assert all(bool(value.isfinite().all()) for value in values(trainee).values())


@pytest.mark.parametrize(("owner", "name"), [(ChunkStore, "write"), (HostMemory, "allocate"), (residency, "Buffer")])
def test_ctrl_c_while_packing(
    owner: Any, name: str, ctrl_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call goes on with packing; nothing is lost."""
    fault = Fault(monkeypatch, owner, name, ctrl_c)
    model = Stack()
    plain, trainee = eager(model), prepared(model, "offloaded")
    for at in (1, 0):
        fault.arm(at)
        with pytest.raises(KeyboardInterrupt):
            trainee.forward(0)
        assert_same_values(trainee.model, model, rtol=0)
    fault.arm(-1)
    for each in (plain, trainee):
        each.steps(0, 1, 2)
    assert_same_values(trainee.model, plain.model)


# ---- forks ----------------------------------------------------------------------------------------------------------


def _in_child(run: Callable[[], None]) -> str:
    """Run in a forked child; return the name and text of what it raised, "nothing", or how the process died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"died with status {status}"


USES: dict[str, Callable[[Trainee], Any]] = {
    "forward": lambda trainee: trainee.forward(0),
    "state dict": lambda trainee: trainee.model.state_dict(),
    "optimizer's state dict": lambda trainee: trainee.optimizer.state_dict(),
    "read": lambda trainee: trainee.model.head.weight.sum(),
    "write": lambda trainee: trainee.model.head.weight.data.zero_(),
    "step": lambda trainee: trainee.optimizer.step(),
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_is_told(use: str) -> None:
    """Chunks are not inherited: an error says so, where reading them would be a segmentation fault."""
    trainee = warmed(prepared(Stack(), "mixed"))
    said = _in_child(lambda: USES[use](trainee))
    assert said.startswith(DoorError.__name__), said
    assert "forked" in said
    trainee.steps(0, 1)


def test_a_child_forked_before_packing_reads_its_own_values() -> None:
    model = Stack()
    trainee = prepared(model, "offloaded")
    assert _in_child(lambda: assert_same_values(trainee.model, model, rtol=0)) == "nothing"
    trainee.steps(0, 1)
