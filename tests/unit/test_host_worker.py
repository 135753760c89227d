"""The host worker: order, tickets, waits, errors, ends; native ones need no GIL; beside a stand-in device."""

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from support.fake_cuda import FakeCuda, build

from protrain_compile.runtime.cuda_driver import CudaDriverError
from protrain_compile.runtime.host_worker import HostUpdateError, HostWorker
from protrain_compile.updates.definition import AdamRule, Segment, SgdRule
from protrain_compile.updates.formats import ChunkStates, split_master
from protrain_compile.updates.host import NativeUpdater, TorchUpdater
from protrain_compile.updates.native import find_compilers, load_library

SIZE = 40_000
ROOT = Path(__file__).parents[2]


def updater_of(kind: str):
    if kind == "thread":
        return TorchUpdater()
    library = load_library()
    if library is None:
        pytest.skip("no C compiler")
    return NativeUpdater(library, 3)


@pytest.fixture(params=["native", "thread"])
def kind(request):
    return request.param


@pytest.fixture
def worker(kind):
    made = HostWorker(updater_of(kind))
    yield made
    made.close()


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory):
    compilers = find_compilers(os.environ)
    if not compilers:
        pytest.skip("no C compiler")
    return build(compilers[-1], tmp_path_factory.mktemp("fake"))


@pytest.fixture
def cuda(fake_library):
    made = FakeCuda(fake_library)
    made.library.fake_refuse_pinning(0)
    return made


@pytest.fixture
def gpu_worker(cuda):
    made = HostWorker(updater_of("native"), driver=cuda.driver)
    yield made
    made.close()


class Gate:
    """An event of a device without handles."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def synchronize(self) -> None:
        assert self._open.wait(30)

    def happen(self) -> None:
        self._open.set()


def run_script(text: str, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True, check=False)


# ---- order and results ---------------------------------------------------------------------------------------------


def make_world(seed: int):
    generator = torch.Generator().manual_seed(seed)
    masters = [torch.randn(SIZE, generator=generator) for _ in range(3)]
    chunks = [ChunkStates(*split_master(m), torch.zeros(SIZE), torch.zeros(SIZE)) for m in masters[:2]]
    chunks.append(ChunkStates(masters[2].clone(), None, torch.zeros(SIZE), torch.zeros(SIZE)))
    gradients = [torch.randn(SIZE, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    return chunks, gradients, [torch.zeros(SIZE), torch.zeros(SIZE, dtype=torch.bfloat16)]


def jobs_of(seed: int, count: int):
    """Yield functions that give one job to a worker or an updater with the tensors of a world."""
    chance = random.Random(seed)
    for step in range(1, count + 1):
        cut, chunk, gradient, total = (chance.randrange(n) for n in (SIZE, 3, 2, 2))
        rules = (AdamRule(lr=0.01, weight_decay=0.1), SgdRule(lr=0.1, momentum=0.9))
        segments = [Segment(0, cut, rules[0].scalars(step)), Segment(cut, SIZE, rules[1].scalars(step))]
        yield chance.choice(
            [
                lambda to, w, c=chunk, g=gradient, s=segments: to.update(w[0][c], w[1][g], s),
                lambda to, w, t=total, g=gradient: to.accumulate(w[2][t], w[1][g]),
                lambda to, w, t=total, c=chunk: to.convert(w[2][t], w[0][c].param),
                lambda to, w, t=total, c=chunk, s=segments: to.update(w[0][c], w[2][t], s),
            ]
        )


@pytest.mark.parametrize("seed", range(4))
def test_mixed_jobs_equal_the_same_calls_in_order(worker, seed):
    mine, theirs = make_world(seed), make_world(seed)
    last = 0
    for job in jobs_of(seed, 60):
        ticket = job(worker, mine)
        assert ticket == last + 1
        last = ticket
    for job in jobs_of(seed, 60):
        job(worker.updater, theirs)  # beside the worker
    worker.drain()
    worker.check()
    for ours, other in zip(mine[0], theirs[0], strict=True):
        assert torch.equal(ours.load_master(), other.load_master())
        assert torch.equal(ours.moment1, other.moment1)
        assert torch.equal(ours.moment2, other.moment2)
    assert all(torch.equal(ours, other) for ours, other in zip(mine[2], theirs[2], strict=True))


def test_an_empty_update_is_a_job(worker):
    states = ChunkStates(torch.ones(4), None, torch.zeros(4), torch.zeros(4))
    worker.wait(worker.update(states, torch.ones(4), []))
    assert worker.is_done(1)
    assert torch.equal(states.param, torch.ones(4))


def test_tickets_count_up_and_ticket_zero_is_done(worker):
    assert worker.is_done(0)
    worker.wait(0)
    worker.drain()
    total, one = torch.zeros(8), torch.ones(8)
    assert [worker.accumulate(total, one) for _ in range(3)] == [1, 2, 3]
    assert not worker.is_done(4)
    worker.wait(2)
    assert worker.is_done(2)
    worker.make_stream_wait(3, None)  # no stream of a device: the caller waits
    assert worker.is_done(3)
    assert (total == 3).all()


def test_arguments_that_do_not_fit_are_refused_at_once(worker):
    states = ChunkStates(torch.zeros(4), None, torch.zeros(4))
    with pytest.raises(ValueError, match="needs moment2"):
        worker.update(states, torch.zeros(4), [Segment(0, 4, AdamRule().scalars(1))])
    with pytest.raises(ValueError, match="one length"):
        worker.accumulate(torch.zeros(4), torch.zeros(5))
    assert worker.convert(torch.zeros(4), torch.zeros(4)) == 1


def test_threads_wait_and_submit_at_once(worker):
    totals = [torch.zeros(SIZE) for _ in range(4)]
    seen = []

    def run(total: torch.Tensor) -> None:
        for _ in range(40):
            ticket = worker.accumulate(total, torch.ones(SIZE))  # nobody else refers to the source
            if ticket % 3 == 0:
                worker.wait(ticket)
                assert worker.is_done(ticket)
            seen.append(ticket)

    threads = [threading.Thread(target=run, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.drain()
    assert sorted(seen) == list(range(1, 161))
    assert all((total == 40).all() for total in totals)


def test_many_threads_wake_at_one_ticket(gpu_worker, cuda):
    event, woken = cuda.event(), []
    ticket = gpu_worker.accumulate(torch.zeros(8), torch.ones(8), after=event)

    def wait() -> None:
        gpu_worker.wait(ticket)
        woken.append(None)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.25)  # more than a slice
    assert not woken
    event.happen()
    for thread in threads:
        thread.join(10)
    assert len(woken) == 8


def test_a_job_comes_after_its_event_on_any_device(worker, kind):
    gate, total = Gate(), torch.zeros(8)
    if kind == "native":
        gate.happen()  # waited for by the submitting thread
    worker.accumulate(total, torch.ones(8), after=gate)
    if kind == "thread":
        time.sleep(0.05)
        assert not worker.is_done(1)
        gate.happen()
    worker.wait(1)
    assert (total == 1).all()


# ---- errors --------------------------------------------------------------------------------------------------------


class FailingUpdater(TorchUpdater):
    def accumulate(self, total, gradient):
        raise ArithmeticError("injected")


def test_an_error_of_a_python_job_surfaces_once_and_the_count_goes_on():
    worker = HostWorker(FailingUpdater())
    target = torch.zeros(8)
    worker.accumulate(target, target)
    worker.accumulate(target, target)
    worker.wait(worker.convert(target, torch.ones(8)))
    with pytest.raises(HostUpdateError, match="injected") as caught:
        worker.check()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    worker.check()
    assert (target == 1).all()
    worker.close()


def test_a_failed_event_surfaces_once_and_the_count_goes_on(gpu_worker, cuda):
    total = torch.zeros(8)
    events = [cuda.event(719), cuda.event(201), cuda.event()]
    for event in events:
        gpu_worker.accumulate(total, torch.ones(8), after=event)
        event.happen()
    gpu_worker.drain()
    assert (total == 1).all()  # what has not arrived is not read
    with pytest.raises(HostUpdateError, match=r"job 1 \(accumulate\).*CUDA_ERROR_LAUNCH_FAILED \(719\)") as caught:
        gpu_worker.check()
    cause = caught.value.__cause__.__cause__
    assert isinstance(cause, CudaDriverError)
    assert cause.code == 719
    gpu_worker.check()


# ---- memory --------------------------------------------------------------------------------------------------------


def test_what_a_job_uses_lives_until_it_is_done_and_no_longer(gpu_worker, cuda):
    event, total = cuda.event(), torch.zeros(SIZE)
    gradient, last = torch.full((SIZE,), 2.0), torch.ones(SIZE)
    gone = [weakref.ref(gradient), weakref.ref(last)]
    gpu_worker.accumulate(total, gradient, after=event)
    ticket = gpu_worker.accumulate(total, last)
    happen = event.happen
    del gradient, last
    gc.collect()
    assert all(ref() is not None for ref in gone)
    happen()
    gpu_worker.wait(ticket)
    assert all(ref() is None for ref in gone)
    assert (total == 3).all()


def test_submitting_lets_go_of_what_is_done(worker):
    total, gradient = torch.zeros(8), torch.ones(8)
    gone = weakref.ref(gradient)
    ticket = worker.accumulate(total, gradient)
    del gradient
    while not worker.is_done(ticket):
        time.sleep(0.001)
    worker.accumulate(total, total)
    worker.drain()
    assert gone() is None


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_closing_runs_what_was_submitted(kind):
    worker, total = HostWorker(updater_of(kind)), torch.zeros(SIZE)
    for _ in range(50):
        worker.accumulate(total, torch.ones(SIZE))
    worker.close()
    worker.close()
    assert (total == 50).all()
    assert worker.is_done(50)
    worker.drain()
    worker.check()
    with pytest.raises(RuntimeError, match="closed"):
        worker.accumulate(total, total)


def own_threads() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def test_a_worker_that_nobody_refers_to_runs_what_was_submitted_and_ends(kind):
    torch.ones(SIZE).add(1)  # torch's own threads are there
    before, total = own_threads(), torch.zeros(SIZE)
    worker = HostWorker(updater_of(kind))
    for _ in range(50):
        worker.accumulate(total, torch.ones(SIZE))
    del worker
    gc.collect()
    assert (total == 50).all()
    assert own_threads() <= before


SCRIPT = """
import os, sys, threading, torch
from pathlib import Path
from support.fake_cuda import FakeCuda
from protrain_compile.updates import job_queue
from protrain_compile.updates.host import TorchUpdater, make_host_updater
from protrain_compile.runtime.host_worker import HostWorker

torch.set_num_threads(1)
cuda = FakeCuda(Path(sys.argv[1]))
workers = [HostWorker(TorchUpdater()), HostWorker(make_host_updater(2), driver=cuda.driver)]
totals, one = [torch.zeros(100_000) for _ in workers], torch.ones(100_000)
for worker, total in zip(workers, totals):
    worker.wait(worker.accumulate(total, one))

class Late:
    def __init__(self): self.event = threading.Event()
    def happen(self): self.event.set()
    def synchronize(self): self.event.wait()

def refuses(call):
    try:
        call()
    except RuntimeError as error:
        return "forked" in str(error)

def submit_late():
    late = [Late(), cuda.event()]
    jobs = zip(workers, totals, late)
    return late, [worker.accumulate(total, one, after=event) for worker, total, event in jobs]
"""


def test_a_forked_child_neither_waits_nor_ends_what_it_does_not_have(fake_library):
    script = """
for how in ("exit", "drop", "close"):
    late, tickets = submit_late()  # in flight while forking
    child = os.fork()
    if child == 0:
        for worker, total, ticket in zip(workers, totals, tickets):
            worker.wait(1)
            if not refuses(lambda: worker.accumulate(total, one)) or not refuses(lambda: worker.wait(ticket)):
                os._exit(3)
            if how == "close":
                worker.close()
        if how == "drop":
            del worker, workers
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, how
    for worker, total, ticket, event in zip(workers, totals, tickets, late):
        event.happen()
        worker.wait(ticket)
        assert (total == ticket).all()
for worker in workers:
    worker.close()
"""
    result = run_script(SCRIPT + script, str(fake_library))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("stuck", [False, True])
def test_the_interpreter_exits_with_jobs_that_wait(stuck, fake_library):
    script = f"""
job_queue.STALL_LIMIT_S = 0.5
if {stuck}:
    submit_late()
for worker, total in zip(workers, totals):
    for _ in range(20):
        worker.accumulate(total, one)
"""
    result = run_script(SCRIPT + script, str(fake_library))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no progress") == (2 if stuck else 0)


def test_a_worker_closed_while_stuck_keeps_its_memory_and_says_so(kind, cuda, monkeypatch, caplog):
    monkeypatch.setattr("protrain_compile.updates.job_queue.STALL_LIMIT_S", 0.2)
    worker = HostWorker(updater_of(kind), driver=cuda.driver)
    event, total = (cuda.event() if kind == "native" else Gate()), torch.zeros(SIZE)
    ticket = worker.accumulate(total, torch.ones(SIZE), after=event)
    worker.close()
    assert "no progress" in caplog.text
    with pytest.raises(RuntimeError, match="stuck"):
        worker.wait(ticket)
    event.happen()
    while not worker.is_done(ticket):
        time.sleep(0.01)
    assert (total == 1).all()


def test_ctrl_c_ends_a_wait(gpu_worker, cuda):
    event = cuda.event()
    gpu_worker.accumulate(torch.zeros(8), torch.ones(8), after=event)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu_worker.drain()
    finally:
        signal.signal(signal.SIGALRM, before)
        event.happen()
    gpu_worker.drain()


# ---- the GIL -------------------------------------------------------------------------------------------------------


def test_jobs_end_while_a_thread_holds_the_gil_in_c(gpu_worker, cuda):
    """The wait keeps the GIL until a stream has seen the flag; meanwhile no Python code runs anywhere."""
    total, stream, event = torch.zeros(1 << 22), cuda.stream(), cuda.event()
    for _ in range(5):
        ticket = gpu_worker.accumulate(total, torch.ones_like(total), after=event)
    gpu_worker.make_stream_wait(ticket, stream)
    holding = ctypes.PyDLL(cuda.library._name)  # unlike CDLL
    assert holding.fake_happen_and_await(ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream.cuda_stream))
    assert gpu_worker.is_done(ticket)
    assert (total == 5).all()


def test_a_wait_in_c_with_the_gil_ends(gpu_worker):
    library = load_library()
    assert library is not None
    holding = ctypes.PyDLL(library._name)
    holding.protrain_queue_wait.argtypes = library.protrain_queue_wait.argtypes
    total = torch.zeros(1 << 22)
    tickets = [gpu_worker.accumulate(total, torch.ones_like(total)) for _ in range(5)]
    assert holding.protrain_queue_wait(gpu_worker._jobs._queue._queue, tickets[-1], 20_000) == 1
    assert (total == 5).all()


def test_nobody_spins(gpu_worker, cuda):
    event = cuda.event()
    ticket = gpu_worker.accumulate(torch.zeros(8), torch.ones(8), after=event)
    before = time.process_time()
    time.sleep(0.3)  # the dispatcher waits for its event
    event.happen()
    gpu_worker.wait(ticket)
    time.sleep(0.3)  # the dispatcher has nothing to do
    assert time.process_time() - before < 0.1


# ---- a device's streams and events ---------------------------------------------------------------------------------


def test_a_stream_waits_and_the_caller_does_not(gpu_worker, cuda):
    first, second, stream = cuda.event(), cuda.event(), cuda.stream()
    total = torch.zeros(SIZE)
    gpu_worker.accumulate(total, torch.ones(SIZE), after=first)
    ticket = gpu_worker.accumulate(total, torch.ones(SIZE), after=second)
    gpu_worker.make_stream_wait(ticket, stream)
    assert (stream.waits, stream.value) == (1, ticket)
    first.happen()
    gpu_worker.wait(1)
    time.sleep(0.02)
    assert not stream.passed
    second.happen()
    deadline = time.monotonic() + 10
    while not stream.passed and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stream.passed
    assert (total == 2).all()


def test_a_stream_passes_a_failed_job(gpu_worker, cuda):
    event, stream = cuda.event(719), cuda.stream()
    ticket = gpu_worker.accumulate(torch.zeros(8), torch.ones(8), after=event)
    gpu_worker.make_stream_wait(ticket, stream)
    event.happen()
    deadline = time.monotonic() + 10
    while not stream.passed and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stream.passed


def test_no_wait_for_what_is_done(gpu_worker, cuda):
    stream = cuda.stream()
    gpu_worker.wait(gpu_worker.accumulate(torch.zeros(8), torch.ones(8)))
    gpu_worker.make_stream_wait(1, stream)
    assert stream.waits == 0


def test_an_event_that_was_never_recorded_has_happened(gpu_worker, cuda):
    event = cuda.event()
    event.cuda_event = 0
    gpu_worker.wait(gpu_worker.accumulate(torch.zeros(8), torch.ones(8), after=event))


@pytest.mark.parametrize("refused", ["wait", "pinning"])
def test_the_caller_waits_where_streams_cannot(cuda, refused, caplog):
    cuda.library.fake_refuse_pinning(801 if refused == "pinning" else 0)
    worker = HostWorker(updater_of("native"), driver=cuda.driver)
    event, stream = cuda.event(), cuda.stream(801 if refused == "wait" else 0)
    for _ in range(2):
        ticket = worker.accumulate(torch.zeros(8), torch.ones(8), after=event)
    threading.Timer(0.05, event.happen).start()
    worker.make_stream_wait(1, stream)
    assert worker.is_done(1)
    worker.make_stream_wait(ticket, stream)
    assert stream.waits == 0
    assert caplog.text.count("CUDA_ERROR_NOT_SUPPORTED (801)") == 1
    worker.close()


def test_errors_of_the_driver_are_raised_with_their_names(gpu_worker, cuda):
    event = cuda.event()
    gpu_worker.accumulate(torch.zeros(8), torch.ones(8), after=event)
    with pytest.raises(CudaDriverError, match=r"cuStreamWaitValue32_v2 returned CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        gpu_worker.make_stream_wait(1, cuda.stream(719))
    event.happen()


def test_flags_wrap_around(cuda):
    stream = cuda.stream()
    flag = ctypes.c_int32(-(2**31) + 5)  # what a queue writes after 2**31 + 5 jobs
    cuda.driver().make_stream_wait(1, stream.cuda_stream, ctypes.addressof(flag), 2**31 + 5)
    deadline = time.monotonic() + 10
    while not stream.passed and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stream.passed
