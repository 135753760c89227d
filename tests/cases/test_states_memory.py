"""Host memory of prepared models: peaks, budgets, pinning, what is given back; processes that end badly."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.prepared import Stack, adamw, assert_same_values, batch, eager, forced, prepared, warmed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import protrain_compile
from protrain_compile import HostMemoryError, managed
from protrain_compile.byte_text import format_size
from protrain_compile.errors import BudgetError
from protrain_compile.runtime import chunk_store
from protrain_compile.runtime.host_memory import HostMemory, PinningError
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.updates.host import TorchUpdater

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """The tests share compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(script: str, *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; it finds the tests' support modules."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


PEAK = """
    import resource, sys, torch
    from torch import nn
    import protrain_compile
    from protrain_compile import Plan
    from protrain_compile.packing import LANDINGS
    from protrain_compile.updates.host import make_host_updater

    def resident(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    def peak():  # ru_maxrss begins with that of the process that forked this one
        return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

    dtype, residency = getattr(torch, sys.argv[1]), sys.argv[2]
    make_host_updater().close()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    protrain_compile.prepare(model, optimizer)  # what imports allocate is not counted
    before = resident()
    assert peak() - before < 64 << 20
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(48)])
    model, optimizer = protrain_compile.prepare(model, torch.optim.AdamW(model.parameters()))
    plan = Plan(uniform_policy="keep", uniform_residency=residency, chunk_bytes=8 << 20)
    order = dict(enumerate(range(48)))
    optimizer._managed.bind(order, [[i] for i in order], plan, dict.fromkeys(order, dtype))
    final = (48 << 20) * (12 if residency == "offloaded" else 16 if dtype == torch.float32 else 14)
    print((peak() - before) / final, (resident() - before) / final)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("residency", ["offloaded", "persistent"])
def test_peak_of_prepare(dtype: str, residency: str) -> None:
    """Below 1.25 times what it takes in the end, 12 bytes a parameter (and gradients where it is persistent)."""
    script = textwrap.dedent(PEAK).replace("sys.argv[1]", repr(dtype)).replace("sys.argv[2]", repr(residency))
    done = run(script)
    assert done.returncode == 0, done.stderr
    peak, final = map(float, done.stdout.split())
    assert peak < 1.25, done.stdout
    assert final < 1.25


BUDGETS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 1.0},
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("arguments", BUDGETS)
@pytest.mark.parametrize("residency", ["offloaded", "split", "mixed"])
def test_host_budget(residency: str, arguments: dict[str, Any]) -> None:
    """Twenty percent too small: refused in ``prepare``, with both numbers, and nothing has changed; enough: trains."""
    needed = warmed(prepared(Stack(), residency, **arguments), 1).managed.packed.store.spec.most_host_bytes()
    model = Stack()
    values, optimizer = copy.deepcopy(model.state_dict()), adamw(model)
    refused = rf"needs .* of host memory, but {format_size(int(needed * 0.8))} is available \(host_memory_budget"
    with pytest.raises(HostMemoryError, match=refused):
        protrain_compile.prepare(
            model, optimizer, plan=forced(residency), host_memory_budget=int(needed * 0.8), **arguments
        )
    assert type(optimizer) is torch.optim.AdamW
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, values[name])
    prepared(model, residency, host_memory_budget=needed, **arguments).steps(0, 1)


def test_host_budget_of_a_model_on_meta() -> None:
    """Originals lie on the host while they are packed; with everything on the device nothing else does."""
    with torch.device("meta"):
        model = Stack()
    optimizer = adamw(model)
    originals = sum(parameter.nbytes for parameter in model.parameters())
    for budget, residency in ((originals - 1, "persistent"), (3 * originals, "offloaded")):
        with pytest.raises(HostMemoryError, match="host_memory_budget"):
            protrain_compile.prepare(
                model, optimizer, plan=forced(residency), host_memory_budget=budget, init=lambda module: None
            )
    assert all(parameter.is_meta for parameter in model.parameters())


def test_host_budget_that_packing_refuses() -> None:
    """A plan that only the compiler knows asks for more: refused before anything is allocated, and all is as it was."""
    model = Stack()
    trainee = prepared(model, "persistent", host_memory_budget="1KiB", options={"plan": forced("offloaded")})
    before = set(threading.enumerate())
    with pytest.raises(HostMemoryError, match=r"needs .* of host memory, but .* is available \(host_memory_budget"):
        trainee.step(0)
    assert set(threading.enumerate()) == before
    assert trainee.managed.residency is None
    assert_same_values(trainee.model, model, rtol=0)


def test_chunks_are_not_rounded_up() -> None:
    """Chunks of 65 and 129 pages take that, not 128 and 256."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(65 * 32, 32, bias=False), nn.Linear(32, 129 * 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).square().mean()

    trainee = prepared(Two(), data=lambda seed: torch.ones(2, 65 * 32))
    trainee.steps(0, 1)
    store = trainee.managed.residency.store
    parameters = sum(p.numel() for p in trainee.model.parameters()) * 4
    landings = store.spec.landings * max(chunk.size_bytes for chunk in trainee.managed.layout.chunks)
    assert store.spec.host_bytes() <= 1.01 * (3 * parameters + landings)
    assert store.pinned.held_bytes + store.pageable.held_bytes <= 1.01 * store.spec.host_bytes()


class Refuses:
    """A registrar whose driver pins ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def register(self, address: int, size_bytes: int) -> None:
        if size_bytes > self.left:
            raise PinningError("out of lockable memory, on purpose")
        self.left -= size_bytes

    def unregister(self, address: int) -> None:
        pass


def test_pinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on with pageable memory; one warning says so; the values are the same."""
    monkeypatch.setattr(chunk_store, "_pinned_memory", lambda device: HostMemory(Refuses(1_000)))
    model = Stack()
    plain, trainee = eager(model), prepared(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (plain, trainee):
            each.steps(*range(4))
    about = [str(each.message) for each in caught if "pinned" in str(each.message)]
    assert len(about) == 1
    assert_same_values(trainee.model, plain.model)


def test_everything_is_given_back() -> None:
    """A dropped model and optimizer end their thread and free their memory, without the cycle collector."""
    gc.collect()
    before = set(threading.enumerate())
    gc.disable()
    try:
        for residency in ("persistent", "offloaded", "split", "mixed"):
            trainee = warmed(prepared(Stack(), residency))
            with torch.no_grad():
                trainee.forward(3)
            held = [weakref.ref(trainee.managed), weakref.ref(trainee.managed.residency.worker)]
            held.append(weakref.ref(trainee.managed.residency.store))
            del trainee
            assert [ref() for ref in held] == [None] * 3
            assert set(threading.enumerate()) <= before
    finally:
        gc.enable()


def test_close() -> None:
    before = set(threading.enumerate())
    trainee = warmed(prepared(Stack()))
    trainee.managed.close()
    assert set(threading.enumerate()) <= before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("residency", ["offloaded", "mixed"])
def test_memory_is_flat(residency: str) -> None:
    trainee = warmed(prepared(Stack(), residency, gradient_accumulation_steps=2), 20)
    growths = []
    for window in range(3):
        gc.collect()
        before, objects = resident_bytes(), len(gc.get_objects())
        for seed in range(100):
            trainee.backward(100 * window + seed)
            trainee.step(seed)
        gc.collect()
        growths.append((resident_bytes() - before, len(gc.get_objects()) - objects))
    # A leak shows in every window; what others in this process allocate does not.
    assert min(size for size, _ in growths) < 1 << 20
    assert min(count for _, count in growths) < 100  # not one object a step


def test_data_loader_workers() -> None:
    """Forked workers neither inherit nor disturb the chunks."""
    model = Stack()
    plain, trainee = warmed(eager(model)), warmed(prepared(model))
    rows = TensorDataset(torch.cat([batch(seed) for seed in range(4)]))
    for each in (plain, trainee):
        for (x,) in DataLoader(rows, batch_size=5, num_workers=2):
            each.called(x).backward()
            each.update()
    assert_same_values(trainee.model, plain.model)


ENDS = """
    import os, signal, sys, threading, torch
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it, and so would we
    torch.set_num_threads(1)
    from support.prepared import *
    trainee = warmed(prepared(Stack(), "offloaded"), 3)
    seed = 0
"""


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("trainee.forward(0); raise ValueError('in the loop')", 1, "ValueError: in the loop"),
        ("trainee.backward(0); sys.exit(3)", 3, ""),
        (
            "trainee.backward(0); os.kill(os.getpid(), signal.SIGINT); trainee.step(1)",
            -signal.SIGINT,
            "KeyboardInterrupt",
        ),
        ("trainee.backward(0)", 0, ""),
    ],
    ids=["exception", "exit", "interrupt", "end"],
)
def test_process_ends(ending: str, code: int, says: str) -> None:
    """With updates under way a process ends with its code, and does not hang."""
    done = run(textwrap.dedent(ENDS) + ending)
    assert done.returncode == code, done.stderr
    assert says in done.stderr


def test_interrupt_leaves_parameters_that_can_be_saved(tmp_path: Path) -> None:
    script = textwrap.dedent(ENDS) + textwrap.dedent(
        f"""
        caught = threading.Event()

        def interrupt():  # again where Python ignored it, as it does in callbacks of the garbage collector
            while not caught.wait(0.5):
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            while True:
                trainee.step(0)
        except KeyboardInterrupt:
            caught.set()
            torch.save([trainee.model.state_dict(), trainee.optimizer.state_dict()], {str(tmp_path / "saved")!r})
        """
    )
    done = run(script)
    assert done.returncode == 0, done.stderr
    values, states = torch.load(tmp_path / "saved")
    model = Stack()
    model.load_state_dict(values)
    assert all(bool(value.isfinite().all()) for value in values.values())
    assert len(states["state"]) == 16


class Fails(TorchUpdater):
    """Fails on request."""

    fails = False

    def update(self, *arguments: Any) -> None:
        if self.fails:
            raise MemoryError("on purpose")
        super().update(*arguments)


def test_failed_host_update_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises at ``step()``, with its cause; nothing hangs and parameters can still be read."""
    updater = Fails()
    monkeypatch.setattr(managed, "HostWorker", lambda: HostWorker(updater))
    trainee = warmed(prepared(Stack()))
    updater.fails = True
    trainee.backward(0)
    trainee.managed.residency.worker.drain()
    updater.fails = False
    with pytest.raises(protrain_compile.HostUpdateError, match="on purpose"):
        trainee.optimizer.step()
    assert all(bool(value.isfinite().all()) for value in trainee.model.state_dict().values())
    trainee.update()
    trainee.step(1)


def test_forced_budget_of_the_device() -> None:
    """Without a plan for chunks, those that fit the budget are persistent."""
    model = Stack()
    plain = eager(model)
    plan = forced(residency=None)
    with pytest.raises(BudgetError) as caught:
        prepared(model, plan, memory_budget=1).forward()
    for budget, moves in ((caught.value.needed_bytes, True), ("1GiB", False)):
        trainee = prepared(model, plan, memory_budget=budget)
        trainee.steps(0, 1)
        residency = trainee.managed.residency.store.spec.residency
        assert (set(residency) != {"persistent"}) == moves, budget
    plain.steps(0, 1)
    assert_same_values(trainee.model, plain.model)
