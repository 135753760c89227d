"""Streams that wait for host jobs: nothing blocks the launching thread, nothing needs the GIL, nothing deadlocks.

What could hang runs in a process of its own, with a time limit.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.runtime.streams import CudaStreams
from protrain_compile.updates.definition import AdamRule, Segment
from protrain_compile.updates.formats import ChunkStates, split_master
from protrain_compile.updates.native import load_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(load_library() is None, reason="no C compiler"),
]

DEVICE = torch.device("cuda", 0)
SIZE = 1 << 20
ROOT = Path(__file__).parents[2]
SLEEP_S = 1.0


def sleep_on_device(seconds: float = SLEEP_S) -> None:
    """Keep the current stream busy for about that long."""
    torch.cuda._sleep(int(seconds * 1.8e9))


class World:
    """A worker and streams; everything is allocated before anything waits."""

    def __init__(self) -> None:
        self.memory = HostMemory(CudaRegistrar())
        self.worker, self.streams = HostWorker(), CudaStreams(DEVICE)
        self.totals, self.landings = ([self.pinned(torch.float32) for _ in range(2)] for _ in range(2))
        self.gradients = [torch.full((SIZE,), value, device=DEVICE) for value in (1.0, 3.0)]
        self.fetched = torch.zeros(SIZE, device=DEVICE)
        sleep_on_device(0.001)  # loads the kernel
        torch.cuda.synchronize()

    def pinned(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.allocate(SIZE * dtype.itemsize, "tests").tensor(0, SIZE, dtype)

    def delay_gradients(self) -> None:
        """Keep the compute stream busy, and d2h behind it."""
        ready = self.streams.event()
        sleep_on_device()
        self.streams.record(ready, "compute")
        self.streams.wait(ready, "d2h")

    def accumulate(self, number: int) -> int:
        """Copy a gradient to the host and submit its accumulation; return the ticket."""
        self.streams.copy(self.landings[number], self.gradients[number], "d2h")
        arrived = self.streams.event()
        self.streams.record(arrived, "d2h")
        return self.worker.accumulate(self.totals[number], self.landings[number], after=arrived)

    def fetch(self, number: int, ticket: int) -> None:
        """Fetch a total behind its job."""
        self.streams.wait_host(self.worker, ticket, "h2d")
        self.streams.copy(self.fetched, self.totals[number], "h2d")

    def close(self) -> None:
        self.worker.close()
        torch.cuda.synchronize()
        self.memory.close()


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def test_the_first_wait_and_later_ones_do_not_block_the_launching_thread(world):
    for step in (1, 2):
        world.delay_gradients()
        start = time.perf_counter()
        ticket = world.accumulate(0)
        world.fetch(0, ticket)
        took = time.perf_counter() - start
        assert not world.worker.is_done(ticket)
        torch.cuda.synchronize()
        assert world.worker.is_done(ticket)
        assert (world.fetched == step).all()
        assert took < SLEEP_S / 4
    world.worker.check()


def test_other_streams_run_on_while_a_copy_stream_waits(world):
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):
        x = torch.ones(512, 512, device=DEVICE)
        y = x @ x  # loads the kernel
    torch.cuda.synchronize()
    world.delay_gradients()
    ticket = world.accumulate(0)
    world.fetch(0, ticket)
    with torch.cuda.stream(side):
        torch.mm(x, x, out=y)
    side.synchronize()
    assert not world.worker.is_done(ticket)
    torch.cuda.synchronize()
    assert (world.fetched == 1).all()


def test_a_stream_that_reaches_its_wait_first_does_not_hold_up_an_earlier_one(world):
    """h2d waits for a job whose gradient comes behind an earlier wait of d2h."""
    world.delay_gradients()
    first = world.accumulate(0)
    world.streams.wait_host(world.worker, first, "d2h")
    second = world.accumulate(1)
    world.fetch(1, second)
    assert not world.worker.is_done(first)
    torch.cuda.synchronize()
    assert (world.fetched == 3).all()
    assert (world.totals[0] == 1).all()


def test_a_hundred_steps_through_both_streams_equal_the_same_updates_in_order(world):
    worker, streams = world.worker, world.streams
    master = torch.randn(SIZE)
    theirs = ChunkStates(*split_master(master), torch.zeros(SIZE), torch.zeros(SIZE))
    home, landing = world.pinned(torch.bfloat16), world.pinned(torch.bfloat16)
    home.copy_(theirs.param)
    assert theirs.companion is not None
    mine = ChunkStates(home, theirs.companion.clone(), torch.zeros(SIZE), torch.zeros(SIZE))
    noise = torch.randn(SIZE).bfloat16()
    buffer, device_noise = torch.zeros(SIZE, dtype=torch.bfloat16, device=DEVICE), noise.to(DEVICE)
    torch.cuda.synchronize()
    arrival, ready, ticket = streams.event(), streams.event(), 0
    segments = [[Segment(0, SIZE, AdamRule(lr=0.01, eps=1e-4).scalars(step))] for step in range(1, 101)]
    for segment in segments:
        streams.wait_host(worker, ticket, "h2d")
        streams.copy(buffer, home, "h2d")
        streams.record(arrival, "h2d")
        streams.wait(arrival, "compute")
        buffer.mul_(0.5).add_(device_noise)  # the gradient takes the parameters' place
        streams.record(ready, "compute")
        streams.wait(ready, "d2h")
        streams.copy(landing, buffer, "d2h")
        arrived = streams.event()
        streams.record(arrived, "d2h")
        ticket = worker.update(mine, landing, segment, after=arrived)
    worker.drain()
    worker.check()
    for segment in segments:
        worker.updater.update(theirs, (theirs.param * 0.5).add_(noise), segment)
    assert torch.equal(mine.load_master(), theirs.load_master())


def test_an_event_that_was_never_recorded_has_happened(world):
    total = torch.zeros(8)
    world.worker.wait(world.worker.accumulate(total, torch.ones(8), after=world.streams.event()))
    assert (total == 1).all()


def test_waiting_costs_the_launching_thread_little(world):
    world.delay_gradients()
    ticket = world.accumulate(0)
    world.streams.wait_host(world.worker, ticket, "h2d")
    start = time.perf_counter()
    for _ in range(100):
        world.streams.wait_host(world.worker, ticket, "h2d")
    took = (time.perf_counter() - start) / 100
    assert not world.worker.is_done(ticket)
    torch.cuda.synchronize()
    assert took < 1e-4


# ---- what could hang -----------------------------------------------------------------------------------------------

SCRIPT = """
import ctypes, threading, time, torch
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.runtime.streams import CudaStreams
from protrain_compile.updates import job_queue

device = torch.device("cuda", 0)
worker, streams = HostWorker(), CudaStreams(device)
total, landing = (torch.zeros(1 << 20).pin_memory() for _ in range(2))
gradient, fetched = torch.ones(1 << 20, device=device), torch.zeros(1 << 20, device=device)
ready = streams.event()

def launch():
    torch.cuda._sleep(int(1.8e9))
    streams.record(ready, "compute")
    streams.wait(ready, "d2h")
    for _ in range(4):  # the later jobs start while the launching thread is held up
        streams.copy(landing, gradient, "d2h")
        arrived = streams.event()
        streams.record(arrived, "d2h")
        ticket = worker.accumulate(total, landing, after=arrived)
    streams.wait_host(worker, ticket, "h2d")
    streams.copy(fetched, total, "h2d")
    assert not worker.is_done(ticket)
    return ticket

def check(count):
    torch.cuda.synchronize()
    worker.check()
    assert (fetched == count).all()
"""

HOLDERS = {
    "a synchronising call that keeps the GIL": "assert ctypes.PyDLL('libcuda.so.1').cuCtxSynchronize() == 0",
    "cudaMalloc with the GIL kept": """
pointer = ctypes.c_uint64()
assert ctypes.PyDLL('libcuda.so.1').cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 30)) == 0
assert ctypes.PyDLL('libcuda.so.1').cuMemFree_v2(pointer) == 0
""",
    "an allocation by torch": "block = torch.empty(1 << 30, dtype=torch.uint8, device=device); del block",
    "emptying torch's cache": "torch.empty(1 << 28, device=device); torch.cuda.empty_cache()",
    "pinning": "block = torch.empty(1 << 26).pin_memory()",
    "item": "assert fetched.sum().item() >= 0",
}


def run_script(text: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT + text]
    return subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True, check=False)


def test_a_launching_thread_that_the_device_holds_up_with_the_gil_is_let_go():
    steps = "\n".join(f"launch()\n{code}\ncheck({4 * number})" for number, code in enumerate(HOLDERS.values(), 1))
    result = run_script(f"{steps}\nworker.close()\nprint('through')")
    assert result.stdout.strip() == "through", result.stderr


@pytest.mark.parametrize("end", ["pass", "job_queue.STALL_LIMIT_S = 0.2", "raise ValueError('injected')", "del worker"])
def test_a_process_exits_with_jobs_and_streams_that_wait(end):
    result = run_script(f"launch()\n{end}")
    assert result.returncode == (1 if "raise" in end else 0), result.stderr
    assert ("injected" in result.stderr) == ("raise" in end)


def test_forked_data_loaders_leave_the_worker_alone():
    result = run_script(
        """
from torch.utils.data import DataLoader
for round in range(1, 4):
    launch()
    loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    assert len(list(loader)) == 8
    check(4 * round)
worker.close()
print("through")
"""
    )
    assert result.stdout.strip() == "through", result.stderr
