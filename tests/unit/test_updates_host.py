"""Both host executions against the reference and torch.optim: formats, gradients, segments, threads, bad values."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_compile.updates.definition import AdamRule, Segment, SgdRule, reference_update
from protrain_compile.updates.formats import ChunkStates, StateFormat, split_master
from protrain_compile.updates.host import HostUpdater, NativeUpdater, TorchUpdater, array_struct, make_host_updater
from protrain_compile.updates.job_queue import DeviceCalls, Failure, NativeQueue, Operation
from protrain_compile.updates.native import load_library

RULES = [
    AdamRule(lr=0.01, weight_decay=0.1),
    AdamRule(lr=0.01, weight_decay=0.1, decoupled=False, maximize=True),
    AdamRule(lr=0.01, amsgrad=True, beta1=0.3, eps=1e-4),
    SgdRule(lr=0.01),
    SgdRule(lr=0.01, momentum=0.9, dampening=0.2, weight_decay=0.1),
    SgdRule(lr=0.01, momentum=0.9, nesterov=True, maximize=True),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZE = 40_000


def native(threads: int) -> NativeUpdater:
    library = load_library()
    if library is None:
        pytest.skip("no C compiler")
    return NativeUpdater(library, threads)


@pytest.fixture(params=["native", "native-3-threads", "torch"])
def updater(request):
    made: HostUpdater = {
        "native": lambda: native(1),
        "native-3-threads": lambda: native(3),
        "torch": TorchUpdater,
    }[request.param]()
    yield made
    made.close()


def make_states(state_format: StateFormat, master: torch.Tensor) -> ChunkStates:
    moments = [torch.zeros_like(master) for _ in range(3)]
    if state_format is StateFormat.SPLIT:
        return ChunkStates(*split_master(master), *moments)
    if state_format is StateFormat.FP32:
        return ChunkStates(master.clone(), None, *moments)
    return ChunkStates(master.half(), master.clone(), *moments)


def random(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_states_close(mine: ChunkStates, theirs: ChunkStates) -> None:
    """Close where finite; an infinite moment may be NaN in the other, as torch's own executions differ in that."""
    for name in ("moment1", "moment2", "moment2_max"):
        moments = (getattr(states, name) for states in (mine, theirs))
        ours, other = (moment.where(moment.isfinite(), torch.nan) for moment in moments)
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=5e-7, equal_nan=True)
    torch.testing.assert_close(mine.load_master(), theirs.load_master(), rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_the_reference(updater, rule, state_format, gradient_dtype):
    size = 4097
    mine, theirs = (make_states(state_format, random(size, 1)) for _ in range(2))
    for step in range(1, 6):
        gradient = random(size, 10 + step).to(gradient_dtype)
        segments = [Segment(0, size, rule.scalars(step, 0.5))]
        updater.update(mine, gradient, segments)
        reference_update(theirs, gradient, segments)
    assert_states_close(mine, theirs)
    high, _ = split_master(mine.load_master())
    assert torch.equal(mine.param, {0: high, 1: mine.param, 2: mine.load_master().half()}[int(state_format)])


@pytest.mark.parametrize("size", [1, 7, 4097])
def test_fifty_steps_equal_torch_adamw(updater, size):
    theirs = torch.nn.Parameter(random(size, 0))
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1, eps=1e-4)
    mine = make_states(StateFormat.FP32, theirs.detach())
    for step in range(1, 51):
        theirs.grad = random(size, step)
        optimizer.step()
        rule = AdamRule(lr=1e-3, weight_decay=0.1, eps=1e-4)
        updater.update(mine, theirs.grad, [Segment(0, size, rule.scalars(step))])
    torch.testing.assert_close(mine.param, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state_format", [StateFormat.SPLIT, StateFormat.FP16])
def test_masters_are_bit_equal_to_an_fp32_model(updater, state_format):
    size = 4097
    start = random(size, 3) * torch.logspace(-20, 3, size)
    mine, plain = make_states(state_format, start), make_states(StateFormat.FP32, start)
    for step in range(1, 51):
        gradient = random(size, 100 + step).to(torch.bfloat16)
        for states in (mine, plain):
            updater.update(states, gradient, [Segment(0, size, AdamRule(weight_decay=0.1).scalars(step))])
    assert torch.equal(mine.load_master(), plain.param)
    assert not torch.equal(plain.param, start)


@pytest.mark.parametrize("state_format", list(StateFormat))
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 70_000), max_size=6), threads=st.integers(1, 4))
def test_cuts_and_threads_change_no_bit(state_format, cuts, threads):
    size = 70_000
    gradient = random(size, 5).to(torch.bfloat16)
    scalars = AdamRule(weight_decay=0.1).scalars(3)
    bounds = [0, *sorted(cuts), size]
    one, many = native(1), native(threads)
    whole, pieces = (make_states(state_format, random(size, 4)) for _ in range(2))
    one.update(whole, gradient, [Segment(0, size, scalars)])
    many.update(pieces, gradient, [Segment(b, e, scalars) for b, e in itertools.pairwise(bounds)])
    one.close()
    many.close()
    assert torch.equal(whole.param, pieces.param)
    assert torch.equal(whole.load_master(), pieces.load_master())


def test_segments_have_their_own_rules_and_steps(updater):
    size = 40_000
    segments = [
        Segment(3, 10_000, AdamRule(lr=0.1).scalars(7)),
        Segment(10_000, 10_001, SgdRule(lr=0.5, momentum=0.9).scalars(1)),
        Segment(20_000, 20_000, SgdRule().scalars(1)),
        Segment(20_000, 39_990, AdamRule(lr=0.2, decoupled=False, weight_decay=0.5, amsgrad=True).scalars(2)),
    ]
    mine, theirs = (make_states(StateFormat.SPLIT, random(size, 1)) for _ in range(2))
    gradient = random(size, 2).half()
    updater.update(mine, gradient, segments)
    reference_update(theirs, gradient, segments)
    assert_states_close(mine, theirs)
    for begin, end in ((0, 3), (10_001, 20_000), (39_990, size)):
        assert torch.equal(mine.load_master()[begin:end], random(size, 1)[begin:end])


@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("rule", RULES)
def test_infinite_and_nan_gradients_do_what_the_reference_does(updater, rule, state_format):
    mine, theirs = (make_states(state_format, random(40, 1)) for _ in range(2))
    for step in (1, 2, 3):
        gradient = random(40, step)
        if step == 2:
            gradient[5], gradient[17], gradient[33] = float("nan"), float("inf"), -float("inf")
        for states, update in ((mine, updater.update), (theirs, reference_update)):
            update(states, gradient, [Segment(0, 40, rule.scalars(step))])
    assert_states_close(mine, theirs)
    assert mine.load_master()[5].isnan()
    assert mine.param[5].isnan()
    assert mine.load_master()[:5].isfinite().all()


def test_without_decay_an_infinite_parameter_stays_infinite(updater):
    states = make_states(StateFormat.SPLIT, torch.full((8,), float("inf")))
    updater.update(states, torch.ones(8), [Segment(0, 8, AdamRule().scalars(1))])
    assert (states.param == float("inf")).all()


def test_learning_rate_zero_changes_moments_only(updater):
    states = make_states(StateFormat.FP32, random(100, 1))
    updater.update(states, torch.ones(100), [Segment(0, 100, AdamRule(lr=0.0, weight_decay=0.1).scalars(1))])
    assert torch.equal(states.param, random(100, 1))
    assert (states.moment1 > 0).all()


def test_moments_do_not_stay_denormal():
    updater, states = native(2), make_states(StateFormat.SPLIT, random(100, 1))
    states.moment1.fill_(3e-38)
    for step in range(1, 20):
        updater.update(states, torch.zeros(100), [Segment(0, 100, AdamRule().scalars(step))])
    assert not states.moment1.any()
    assert torch.tensor(1e-40).mul(0.5).item() > 0, "the caller's own arithmetic must keep its denormals"
    updater.close()


# ---- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total_dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 40_001])
def test_accumulate_and_convert_equal_torch(updater, total_dtype, gradient_dtype, size):
    total, gradient = random(size, 1).to(total_dtype), (random(size, 2) * 100).to(gradient_dtype)
    expected = (total.float() + gradient.float()).to(total_dtype)
    updater.accumulate(total, gradient)
    assert torch.equal(total, expected)
    updater.convert(total, gradient)
    assert torch.equal(total, gradient.to(total_dtype))


def test_every_fp16_and_bf16_value_converts_as_in_torch():
    updater = native(1)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        wide = torch.empty(1 << 16)
        updater.convert(wide, every.view(dtype))
        torch.testing.assert_close(wide, every.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
    updater.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_values_round_as_in_torch(dtype):
    updater = native(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    halves = torch.arange(0, 2**16).to(torch.int16).view(torch.float16).float().view(torch.int32)
    values = torch.cat([bits.to(torch.int32), halves, halves + 0x1000, halves + 0x0FFF, halves - 1]).view(torch.float32)
    narrow = torch.empty(values.numel(), dtype=dtype)
    updater.convert(narrow, values)
    torch.testing.assert_close(narrow, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    updater.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sum(updater, dtype):
    values = random(100_001, 1).to(dtype)
    exact = values.double().square().sum().item()
    assert updater.square_sum(values) == pytest.approx(exact, rel=1e-12)
    assert updater.square_sum(values[:0]) == 0.0


def test_square_sum_is_infinite_only_for_infinite_elements(updater):
    values = torch.full((50_000,), 3e38)
    assert updater.square_sum(values) == pytest.approx(50_000 * 9e76, rel=1e-6)
    for bad in (float("inf"), -float("inf"), float("nan")):
        values[49_999] = bad
        assert not torch.tensor(updater.square_sum(values)).isfinite()


def test_square_sum_does_not_depend_on_threads():
    values = random(300_000, 1)
    sums = set()
    for threads in (1, 2, 5):
        updater = native(threads)
        sums |= {updater.square_sum(values) for _ in range(5)}
        updater.close()
    assert len(sums) == 1


# ---- life ----------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after_close():
    updater = native(3)
    updater.close()
    updater.close()
    with pytest.raises(RuntimeError, match="closed"):
        updater.square_sum(torch.ones(3))


def test_wrong_tensors_are_refused(updater):
    with pytest.raises(ValueError, match="one length"):
        updater.accumulate(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="float64"):
        updater.convert(torch.ones(3), torch.ones(3).double())
    with pytest.raises(ValueError, match="contiguous"):
        updater.square_sum(torch.ones(6)[::2])
    states = make_states(StateFormat.FP32, torch.ones(4))
    with pytest.raises(ValueError, match="int64"):
        updater.update(states, torch.ones(4, dtype=torch.int64), [Segment(0, 4, SgdRule().scalars(1))])


def test_calls_from_many_threads_take_turns():
    updater, totals = native(3), [torch.zeros(100_000) for _ in range(4)]

    def add(total: torch.Tensor) -> None:
        for _ in range(50):
            updater.accumulate(total, torch.ones(100_000))

    callers = [threading.Thread(target=add, args=(total,)) for total in totals]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    updater.close()
    assert all((total == 50).all() for total in totals)


def test_the_kernel_holds_no_gil():
    updater, values = native(1), torch.ones(1 << 24)
    started, ticks = threading.Event(), []

    def run() -> None:
        started.set()
        for _ in range(3):
            updater.square_sum(values)
        ticks.append(None)

    worker = threading.Thread(target=run)
    worker.start()
    started.wait()
    count = 0
    while not ticks:
        count += 1
    worker.join()
    updater.close()
    assert count > 100


def test_a_forked_child_works_alone_and_exits():
    script = (
        "import os, torch\n"
        "from protrain_compile.updates.host import make_host_updater\n"
        "updater, values = make_host_updater(3), torch.ones(100_000)\n"
        "assert updater.square_sum(values) == 100_000\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    good = updater.square_sum(values) == 100_000\n"
        "    updater.close()\n"
        "    os._exit(0 if good else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert updater.square_sum(values) == 100_000\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=os.environ | {"PYTHONPATH": "."})


def test_a_child_forked_in_mid_update_works_alone():
    """The locks are as the parent's threads left them, and nobody there will release them."""
    updater, values, stop = native(3), torch.ones(1 << 20), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            updater.square_sum(values)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            total = array_struct(values, values)
            updater.library.protrain_convert(updater.pool, ctypes.byref(total))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    busy.join()
    updater.close()


def test_a_pool_stays_for_its_queue():
    updater = native(2)
    queue, total, one = NativeQueue(updater), torch.zeros(SIZE), torch.ones(SIZE)
    queue.array(Operation.ACCUMULATE, total, one)
    updater.close()
    with pytest.raises(RuntimeError, match="closed"):
        updater.square_sum(one)
    with pytest.raises(RuntimeError, match="closed"):
        NativeQueue(updater)
    queue.wait(queue.array(Operation.ACCUMULATE, total, one))
    queue.end()
    assert (total == 2).all()
    assert queue.done == 2


def test_a_queue_waits_by_any_function_and_reports_what_it_returns():
    updater = native(2)
    queue, flag = NativeQueue(updater), ctypes.c_int32(-1)
    absolute = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value  # an event is its own result
    assert absolute is not None
    queue.attach(DeviceCalls(0, 0, absolute), ctypes.addressof(flag))
    assert flag.value == 0
    total, one = torch.zeros(SIZE), torch.ones(SIZE)
    for event in (0, 7, 9):
        queue.array(Operation.CONVERT if event else Operation.ACCUMULATE, total, one, event)
    queue.wait(3)
    assert flag.value == 3
    assert queue.take_failure() == Failure(2, Operation.CONVERT, 1, 7)
    assert queue.take_failure() is None
    queue.end()
    updater.close()


def test_the_default_updater_is_native_where_there_is_a_compiler():
    updater = make_host_updater(2)
    assert isinstance(updater, NativeUpdater) == (load_library() is not None)
    updater.close()
