"""The device kernel against the reference, torch.optim and the host kernel, on a CUDA device."""

import itertools

import pytest
import torch

from protrain_compile.updates.definition import AdamRule, Segment, SgdRule, reference_update
from protrain_compile.updates.device import DeviceUpdater, load_kernel
from protrain_compile.updates.formats import ChunkStates, StateFormat, split_master
from protrain_compile.updates.host import make_host_updater

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RULES = [
    AdamRule(lr=0.01, weight_decay=0.1),
    AdamRule(lr=0.01, weight_decay=0.1, decoupled=False, maximize=True),
    AdamRule(lr=0.01, amsgrad=True, beta1=0.3, eps=1e-4),
    SgdRule(lr=0.01),
    SgdRule(lr=0.01, momentum=0.9, dampening=0.2, weight_decay=0.1),
    SgdRule(lr=0.01, momentum=0.9, nesterov=True, maximize=True),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def updater():
    made = DeviceUpdater(torch.device("cuda", 0))
    assert load_kernel() is not None, "the Triton kernel must run where there is a CUDA device"
    return made


def make_states(state_format: StateFormat, master: torch.Tensor, device: str) -> ChunkStates:
    master = master.to(device)
    moments = [torch.zeros_like(master) for _ in range(3)]
    if state_format is StateFormat.SPLIT:
        return ChunkStates(*split_master(master), *moments)
    if state_format is StateFormat.FP32:
        return ChunkStates(master.clone(), None, *moments)
    return ChunkStates(master.half(), master.clone(), *moments)


def random(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_states_close(mine: ChunkStates, theirs: ChunkStates) -> None:
    for name in ("moment1", "moment2", "moment2_max"):
        moments = (getattr(states, name).cpu() for states in (mine, theirs))
        ours, other = (moment.where(moment.isfinite(), torch.nan) for moment in moments)
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=5e-7, equal_nan=True)
    masters = (mine.load_master().cpu(), theirs.load_master().cpu())
    torch.testing.assert_close(*masters, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_the_reference(updater, rule, state_format, gradient_dtype):
    size = 4097
    mine, theirs = make_states(state_format, random(size, 1), "cuda"), make_states(state_format, random(size, 1), "cpu")
    for step in range(1, 6):
        gradient = random(size, 10 + step).to(gradient_dtype)
        segments = [Segment(0, size, rule.scalars(step, 0.5))]
        updater.update(mine, gradient.cuda(), segments)
        reference_update(theirs, gradient, segments)
    assert_states_close(mine, theirs)
    high, _ = split_master(mine.load_master())
    assert torch.equal(mine.param, {0: high, 1: mine.param, 2: mine.load_master().half()}[int(state_format)])


@pytest.mark.parametrize("size", [1, 7, 4097])
def test_fifty_steps_equal_torch_adamw(updater, size):
    theirs = torch.nn.Parameter(random(size, 0).cuda())
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1, eps=1e-4)
    mine = make_states(StateFormat.FP32, theirs.detach(), "cuda")
    for step in range(1, 51):
        theirs.grad = random(size, step).cuda()
        optimizer.step()
        rule = AdamRule(lr=1e-3, weight_decay=0.1, eps=1e-4)
        updater.update(mine, theirs.grad, [Segment(0, size, rule.scalars(step))])
    torch.testing.assert_close(mine.param, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state_format", [StateFormat.SPLIT, StateFormat.FP16])
def test_masters_are_bit_equal_to_an_fp32_model(updater, state_format):
    size = 4097
    start = random(size, 3) * torch.logspace(-20, 3, size)
    mine, plain = make_states(state_format, start, "cuda"), make_states(StateFormat.FP32, start, "cuda")
    for step in range(1, 51):
        gradient = random(size, 100 + step).to(torch.bfloat16).cuda()
        for states in (mine, plain):
            updater.update(states, gradient, [Segment(0, size, AdamRule(weight_decay=0.1).scalars(step))])
    assert torch.equal(mine.load_master(), plain.param)
    assert not torch.equal(plain.param.cpu(), start)


def test_host_and_device_agree_over_fifty_steps(updater):
    size = 70_001
    device, host = (make_states(StateFormat.SPLIT, random(size, 3), where) for where in ("cuda", "cpu"))
    host_updater = make_host_updater()
    for step in range(1, 51):
        gradient = random(size, 100 + step).to(torch.bfloat16)
        segments = [Segment(0, size, AdamRule(weight_decay=0.1, eps=1e-4).scalars(step))]
        updater.update(device, gradient.cuda(), segments)
        host_updater.update(host, gradient, segments)
    host_updater.close()
    torch.testing.assert_close(device.load_master().cpu(), host.load_master(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state_format", list(StateFormat))
def test_cuts_change_no_bit(updater, state_format):
    size, scalars = 20_000, AdamRule(weight_decay=0.1).scalars(3)
    gradient = random(size, 5).to(torch.bfloat16).cuda()
    whole, pieces = (make_states(state_format, random(size, 4), "cuda") for _ in range(2))
    updater.update(whole, gradient, [Segment(0, size, scalars)])
    for begin, end in itertools.pairwise([0, 1, 63, 64, 1088, 5000, 6024, 6025, size]):
        updater.update(pieces, gradient, [Segment(begin, end, scalars)])
    assert torch.equal(whole.load_master(), pieces.load_master())
    assert torch.equal(whole.param, pieces.param)


def test_segments_have_their_own_rules_and_steps(updater):
    size = 40_000
    segments = [
        Segment(3, 10_000, AdamRule(lr=0.1).scalars(7)),
        Segment(10_000, 10_001, SgdRule(lr=0.5, momentum=0.9).scalars(1)),
        Segment(20_000, 20_000, SgdRule().scalars(1)),
        Segment(20_000, 30_000, AdamRule(lr=0.2, decoupled=False, weight_decay=0.5, amsgrad=True).scalars(2)),
        Segment(30_000, 39_990, AdamRule(lr=0.1).scalars(7)),
    ]
    mine, theirs = (make_states(StateFormat.SPLIT, random(size, 1), device) for device in ("cuda", "cpu"))
    gradient = random(size, 2).half()
    updater.update(mine, gradient.cuda(), segments)
    reference_update(theirs, gradient, segments)
    assert_states_close(mine, theirs)
    for begin, end in ((0, 3), (10_001, 20_000), (39_990, size)):
        assert torch.equal(mine.load_master()[begin:end].cpu(), random(size, 1)[begin:end])


@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("rule", RULES)
def test_infinite_and_nan_gradients_do_what_the_reference_does(updater, rule, state_format):
    mine, theirs = (make_states(state_format, random(40, 1), device) for device in ("cuda", "cpu"))
    for step in (1, 2, 3):
        gradient = random(40, step)
        if step == 2:
            gradient[5], gradient[17], gradient[33] = float("nan"), float("inf"), -float("inf")
        updater.update(mine, gradient.cuda(), [Segment(0, 40, rule.scalars(step))])
        reference_update(theirs, gradient, [Segment(0, 40, rule.scalars(step))])
    assert_states_close(mine, theirs)
    assert mine.param[5].isnan()


def test_the_multiplier_stays_on_the_device(updater):
    mine, theirs = (make_states(StateFormat.SPLIT, random(5000, 1), "cuda") for _ in range(2))
    gradient, rule = random(5000, 2).cuda(), AdamRule(lr=0.1, eps=0.1)
    multiplier = torch.tensor([0.25], device="cuda")
    updater.update(mine, gradient, [Segment(0, 5000, rule.scalars(1))], multiplier)  # warm up: uploads the table
    with torch.cuda.device(0):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            updater.update(mine, gradient, [Segment(0, 5000, rule.scalars(2))], multiplier)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for step in (1, 2):
        updater.update(theirs, gradient, [Segment(0, 5000, rule.scalars(step, 0.25))])
    assert torch.equal(mine.load_master(), theirs.load_master())


def test_no_allocation_after_the_first_call(updater):
    states = make_states(StateFormat.SPLIT, random(100_000, 1), "cuda")
    gradient = torch.ones(100_000, dtype=torch.bfloat16, device="cuda")
    updater.update(states, gradient, [Segment(0, 100_000, AdamRule().scalars(1))])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in range(2, 6):
        updater.update(states, gradient, [Segment(0, 100_000, AdamRule().scalars(step))])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
