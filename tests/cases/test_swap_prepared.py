"""Prepared models whose blocks are swapped: copies of values and of chunks share the streams and the host budget."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from support.capture import mixed
from support.prepared import CHUNKS, Stack, assert_same_values, batch, check, forced, prepared, warmed

import protrain_compile
from protrain_compile import HostMemoryError, Plan, ops
from protrain_compile.schedule import operation_of

STEPS = (0, 1, 2)


def plan_of(policies: str, residency: str) -> Plan:
    whole = forced(residency, chunks=CHUNKS)
    return dataclasses.replace(whole, uniform_policy=None, policies=mixed(policies).policies)


@pytest.mark.parametrize("residency", ["persistent", "offloaded", "mixed"])
@pytest.mark.parametrize("limit", [None, 0.1])
def test_equals_eager_and_keep(residency: str, limit: float | None) -> None:
    arguments = {"max_grad_norm": limit}
    if limit is None:
        check(lambda trainee: trainee.steps(*STEPS), plan_of("sss", residency), **arguments)
    model = Stack()
    trainees = [
        prepared(model, plan_of(policies, residency), **arguments) for policies in ("kkk", "sss", "srs", "xxx", "xrs")
    ]
    losses = [trainee.steps(*STEPS) for trainee in trainees]
    for trainee, loss in zip(trainees[1:], losses[1:], strict=True):
        assert torch.equal(loss, losses[0])
        assert_same_values(trainee.model, trainees[0].model, rtol=0.0)
        assert trainee.managed.packed.counters.misses == 0


@pytest.mark.parametrize("policies", ["sks", "xkx"])
def test_two_forwards_in_flight_and_an_abandoned_one(policies: str) -> None:
    trainee = warmed(prepared(Stack(), plan_of(policies, "offloaded"), gradient_accumulation_steps=2))
    space = trainee.managed.swap_space()
    first, second, _ = trainee.forward(0), trainee.forward(1), trainee.forward(2)
    second.backward()
    first.backward()
    trainee.update()
    del first, second, _
    slabs = space.slabs
    assert slabs == space.free_slabs == 6
    trainee.steps(3, 4)
    assert space.slabs == space.free_slabs == slabs


def test_copies_share_one_stream_in_program_order() -> None:
    """Reloads and prefetches are issued in the order in which the backward needs them."""
    trainee = warmed(prepared(Stack(blocks=6), plan_of("sksksk", "offloaded")))
    assert trainee.managed.swap_space().streams is trainee.managed.packed.streams
    schedule = protrain_compile.schedule(trainee.called).parts[0].schedule
    backward = list(schedule.graphs["backward"].graph.nodes)
    for node in backward:
        if node.target is ops.reload:
            (waits,) = (user for user in node.users if user.target is ops.wait_reload)
            between = backward[backward.index(node) : backward.index(waits)]
            assert any(getattr(operation_of(each), "op", "") == "backward" for each in between)
    forward = schedule.graphs["forward"].graph
    assert [node.target for node in forward.nodes if node.op == "placeholder"][:2] == ["residency", "swap"]


def test_the_host_budget_counts_it() -> None:
    """Refused before the forward that would swap, with what is needed; nothing of the step has run."""
    data = functools.partial(batch, rows=300)
    roomy = warmed(prepared(Stack(), plan_of("sss", "offloaded"), data=data))
    store, space = roomy.managed.packed.store, roomy.managed.swap_space()
    held = store.pinned.held_bytes + store.pageable.held_bytes
    assert space.host_bytes > 0
    budget = held - space.host_bytes // 2
    trainee = prepared(Stack(), plan_of("sss", "offloaded"), data=data, host_memory_budget=budget)
    with pytest.raises(HostMemoryError, match="swapped activations needs"):
        trainee.step()
    trainee.managed.close()


def test_closing_gives_slabs_back() -> None:
    trainee = warmed(prepared(Stack(), plan_of("sss", "offloaded")))
    store = trainee.managed.packed.store
    trainee.managed.close()
    assert store.pinned.held_bytes == 0
