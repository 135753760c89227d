"""The cost model: an example by hand, bounds that no simulation may break, and knobs that move it the right way."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from support.made_shapes import MB, Stack, critical_path, plain_hardware, prefix, random_hardware, random_stack

from protrain_compile import Plan
from protrain_compile.cost_model import Prediction, rates_of, simulate
from protrain_compile.lowering import Choice, lower
from protrain_compile.memory_model import host_bytes
from protrain_compile.profile import Profile
from protrain_compile.step_jobs import step_jobs
from protrain_compile.step_shape import StepShape
from protrain_compile.timeline import MAX_STEPS, repeated_ms, simulate_jobs, speeds

SAME = 1e-6


def plan_of(choice: Choice) -> Plan:
    return Plan(policies=choice.policies, residency=choice.residency, buffers=choice.buffers)


def predict(stack: Stack, persistent: int, policies: str, buffers: int = 3, **hardware: float) -> Prediction:
    shape = stack.shape()
    return simulate(shape, stack.profile(**hardware), plan_of(prefix(shape, persistent, policies, buffers)))


def test_everything_resident_by_hand() -> None:
    stack = Stack(blocks=2, launches=0)
    found = predict(stack, 4, "kk", device_gb_per_s=3_000.0)
    calls = 2 * (4.0 + 8.0) + 2 * (1.0 + 1.0)
    collects = 3 * 300 * MB / 3_000e6  # four chunks of 50, 100, 100 and 50 MB
    updates = 150 * MB / 100e6  # their parameters
    assert found.step_ms == pytest.approx(calls + collects + updates + 0.002, abs=0.01)
    assert found.compute_ms == pytest.approx(calls + collects + updates)
    assert found.device_bytes["parameters"] == pytest.approx(300 * MB, rel=1e-4)
    assert found.device_bytes["states"] == pytest.approx(5 * 300 * MB, rel=1e-4)
    assert found.device_bytes["gradients"] == pytest.approx(300 * MB, rel=1e-4)
    assert found.host_bytes == 0
    assert sum(found.device_bytes.values()) == found.peak_bytes


def test_the_tail_of_updates_by_hand() -> None:
    """With clipping, chunks are updated in forward order, 10 ms each, and every block waits for its own."""
    stack = Stack(blocks=6, ends_mb=10, forward_ms=4.0, clips=True, launches=0)
    found = predict(stack, 0, "k" * 6, buffers=4)
    begins = [op.begin_ms for op in found.operations if op.op == "forward"]
    between = [after - before for before, after in itertools.pairwise(begins[2:7])]
    assert between == pytest.approx([10.0] * 4, abs=0.01)
    assert found.exposed_updates_ms == pytest.approx(found.step_ms - found.compute_ms - found.exposed_copies_ms)
    assert found.exposed_updates_ms > 2 * found.exposed_copies_ms


def test_the_peak_by_hand() -> None:
    """All kept: at the epilogue's backward everything saved is alive, and the call makes its gradients."""
    stack = Stack(blocks=2, ends_mb=100)
    found = predict(stack, 0, "kk")
    saved = 3 * 40 + 3 * 4
    inside = (4 + 100) + 10
    assert found.peak_at == "backward of epilogue"
    assert found.device_bytes["activations"] + found.device_bytes["inside calls"] == (saved + inside) * MB
    assert found.device_bytes["chunk buffers"] == pytest.approx(3 * 100 * MB, rel=1e-4)


def test_parts_of_a_step_add_up() -> None:
    draw = random.Random(0)
    for _ in range(40):
        stack = random_stack(draw, draw.randint(1, 5))
        shape = stack.shape()
        profile = stack.profile(**random_hardware(draw))
        found = simulate(shape, profile, plan_of(any_choice(shape, draw)))
        parts = (found.compute_ms, found.exposed_copies_ms, found.exposed_updates_ms, found.exposed_launches_ms)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(found.step_ms, rel=1e-6) or not repeats(found)
        assert found.reserved_bytes >= found.peak_bytes
        assert all(op.live_bytes <= found.peak_bytes for op in found.operations)


def repeats(found: Prediction) -> bool:
    """Whether the simulation reached a step that repeats the one before: compute ends at its end."""
    ends = [op.begin_ms + op.ms for op in found.operations if op.stream == "compute"]
    return max(ends) == pytest.approx(found.step_ms, rel=1e-6)


def any_choice(shape: StepShape, draw: random.Random) -> Choice:
    policies = "".join(draw.choice("kr") for _ in shape.block_names)
    rest = draw.choice(("offloaded", "offloaded", "split"))
    return prefix(shape, draw.randint(0, len(shape.chunks)), policies, draw.randint(3, 6), rest)


def test_between_the_critical_path_and_the_serial_sum() -> None:
    """Nothing is faster than the longest chain of jobs at their speeds alone, or slower than one job after another."""
    draw = random.Random(1)
    for _ in range(40):
        stack = random_stack(draw, draw.randint(1, 5))
        shape, profile = stack.shape(), stack.profile(**random_hardware(draw))
        choice = any_choice(shape, draw)
        jobs = step_jobs(shape, profile, choice, lower(shape, choice))
        rates = speeds(profile.hardware)
        found = simulate_jobs(jobs, rates)
        path = critical_path(jobs, 12) - critical_path(jobs, 6)
        assert found.step_ms >= path / 6 - SAME
        slowest = [min(each[stream] for each in rates) for stream in range(3)]
        serial = sum(job.ms / (slowest[job.stream - 1] if job.stream else 1.0) for job in jobs.jobs)
        assert found.step_ms <= serial + max(job.launched_ms for job in jobs.jobs) + SAME


def test_without_disturbance_it_is_the_critical_path() -> None:
    """Where nothing slows anything down, the simulation and networkx find the same time."""
    draw = random.Random(2)
    for _ in range(20):
        stack = random_stack(draw, draw.randint(1, 4))
        shape, profile = stack.shape(), stack.profile()
        choice = any_choice(shape, draw)
        jobs = step_jobs(shape, profile, choice, lower(shape, choice))
        found = simulate_jobs(jobs, speeds(profile.hardware))
        ten = critical_path(jobs, 20) - critical_path(jobs, 10)
        assert found.step_ms == pytest.approx(ten / 10, rel=2e-2)


def cases(seed: int, count: int = 25) -> list[tuple[Stack, StepShape, Profile, Choice]]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        stack = random_stack(draw, draw.randint(2, 6))
        shape = stack.shape()
        found.append((stack, shape, stack.profile(), any_choice(shape, draw)))
    return found


def time_of(shape: StepShape, profile: Profile, choice: Choice) -> float:
    return repeated_ms(step_jobs(shape, profile, choice, lower(shape, choice)), rates_of(shape, profile))


@pytest.mark.parametrize("name", ["h2d", "d2h", "host_updates", "device_gb_per_s", "launch_us"])
def test_a_faster_machine_is_not_slower(name: str) -> None:
    for _, shape, profile, choice in cases(3):
        fast = plain_hardware(link=100.0, both=100.0, beside=100.0, host=10.0, beside_copies=10.0)
        fast = dataclasses.replace(fast, device_gb_per_s=6_000.0, launch_us=0.1)
        better = dataclasses.replace(profile.hardware, **{name: getattr(fast, name)})
        faster = dataclasses.replace(profile, hardware=better)
        assert time_of(shape, faster, choice) <= time_of(shape, profile, choice) + SAME


def test_more_buffers_are_not_slower_and_take_memory() -> None:
    for _, shape, profile, choice in cases(4):
        more = dataclasses.replace(choice, buffers=choice.buffers + 1)
        assert time_of(shape, profile, more) <= time_of(shape, profile, choice) + SAME
        before, after = (simulate(shape, profile, plan_of(each)) for each in (choice, more))
        assert after.peak_bytes >= before.peak_bytes


def test_recomputing_takes_time_and_frees_memory() -> None:
    for stack, shape, profile, choice in cases(5):
        keep = dataclasses.replace(choice, policies=("keep",) * stack.blocks)
        again = dataclasses.replace(choice, policies=("recompute",) * stack.blocks)
        kept, recomputed = (simulate(shape, profile, plan_of(each)) for each in (keep, again))
        assert recomputed.compute_ms == pytest.approx(kept.compute_ms + stack.blocks * stack.forward_ms)
        assert recomputed.peak_bytes <= kept.peak_bytes + stack.saved_mb * MB


def test_a_persistent_chunk_more_moves_its_states_to_the_device() -> None:
    stack = Stack(blocks=5)
    one, two = predict(stack, 1, "rrrrr"), predict(stack, 2, "rrrrr")
    # Parameters, companion, two moments and gradients: 7 times the parameters' 100 MB.
    assert two.peak_bytes - one.peak_bytes == pytest.approx(700 * MB, rel=1e-3)
    # Parameters, companion and moments leave the host; landings are a few slots.
    assert one.host_bytes - two.host_bytes == pytest.approx(600 * MB, rel=1e-3)


def test_landings_of_the_host() -> None:
    """A few slots for the largest chunks, or one to each chunk."""
    for clips, expected in ((False, 50 + 3 * 100), (True, 2 * 50 + 3 * 100)):
        shape = Stack(blocks=3, clips=clips).shape()
        found = host_bytes(shape, prefix(shape, 0, "rrr"))
        assert found["gradients"] == pytest.approx(expected * MB, rel=1e-3)


def test_copies_slow_each_other_down() -> None:
    stack = Stack(blocks=6, forward_ms=0.1, backward_ms=0.1, ends_ms=0.1)
    alone = predict(stack, 0, "kkkkkk", host=1000.0, beside_copies=1000.0)
    shared = predict(stack, 0, "kkkkkk", host=1000.0, beside_copies=1000.0, both=25.0, beside=25.0)
    assert shared.step_ms > alone.step_ms * 1.1


def test_a_launching_thread_that_is_too_slow() -> None:
    stack = Stack(blocks=4, launches=1000)
    found = predict(stack, 6, "kkkk", launch_us=10.0)
    assert found.exposed_launches_ms > 50.0
    assert found.step_ms == pytest.approx(found.compute_ms + found.exposed_launches_ms)


def test_an_empty_shape() -> None:
    stack = Stack()
    shape = dataclasses.replace(stack.shape(), segments=(), chunks=(), lives=(), block_names=())
    found = simulate(shape, stack.profile(), Plan(policies=()))
    assert found.step_ms == 0
    assert found.peak_bytes == MB


def test_it_settles_soon() -> None:
    """A step repeats the one before after a few: the search simulates thousands."""
    assert MAX_STEPS <= 12
    found = predict(Stack(blocks=8), 2, "rrrrrrrr", buffers=4)
    assert repeats(found)


def test_swapped_blocks_move_their_values() -> None:
    """Each way once a step, behind compute; they lie on the host between."""
    stack = Stack(blocks=3)
    kept, swapped = (simulate(stack.shape(), stack.profile(), Plan.uniform(each)) for each in ("keep", "swap"))
    assert swapped.peak_bytes < kept.peak_bytes
    assert kept.step_ms <= swapped.step_ms <= 1.03 * kept.step_ms
    assert swapped.host_bytes - kept.host_bytes == swapped.host_kinds["activations"] > 3 * stack.saved_mb * MB
    for op, stream in (("swap_out", "d2h"), ("reload", "h2d")):
        moves = [each for each in swapped.operations if each.op == op]
        assert [each.stream for each in moves] == [stream] * 3
        assert all(each.ms >= stack.saved_mb * MB / 50e6 for each in moves)
