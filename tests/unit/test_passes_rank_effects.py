"""The order of collectives: every wait that matters where ranks share chunks is asked for by the verifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.rank_schedules import shared_schedule
from support.schedules import changed, find, names_of

from passes.effects import Call, Ledger, Step
from passes.rank_effects import RANK_EFFECTS, RankLedger
from passes.verify import verify_schedule
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule

OFFLOADED = ("offloaded", "parameters")
DIVIDED = ("persistent", "parameters")
WHOLE = ("persistent", "states")
HALF = ("persistent", "gradients")
MIXED = [("mixed", sharding) for sharding in ("states", "gradients", "parameters")]


def broken(schedule: Schedule, message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        verify_schedule(schedule, "x")


@pytest.mark.parametrize("shared", [OFFLOADED, DIVIDED, WHOLE, HALF, *MIXED], ids="-".join)
def test_whole_schedules(shared: tuple[str, str]) -> None:
    verify_schedule(shared_schedule(*shared), "x")


WAITS = [
    (ops.prefetch, "read", OFFLOADED, r"prefetch_4 .*: writes buffer 0, which may still be written by all_gather "),
    (ops.prefetch, "left", OFFLOADED, r"prefetch .*: writes buffer 0, which may still be written by reduce_scatter_4 "),
    (ops.prefetch, "updated", OFFLOADED, r"prefetch .*: reads home 0, which may still be written by step"),
    (ops.all_gather, "arrival", OFFLOADED, r"all_gather .*: reads buffer 0, which may still be written by prefetch "),
    (ops.all_gather, "written", DIVIDED, r"all_gather .*: reads parameters 0, which may still be written by step"),
    (ops.all_gather, "written", WHOLE, r"all_gather .*: reads parameters 0, which may still be written by step"),
    (ops.all_gather, "read", DIVIDED, r"all_gather_4 .*: writes buffer 0, which may still be read by t0_forward "),
    (ops.wait, "arrival", DIVIDED, r"t0_forward .*: reads buffer 0, which may still be written by all_gather "),
    (ops.bind, "gathered", WHOLE, r"t0_forward .*: reads parameters 0, which may still be written by all_gather "),
    (ops.collect, "left", HALF, r"collect .*: writes buffer 0, which may still be written by reduce_scatter "),
    (ops.collect, "reduced", WHOLE, r"collect_4 .*: writes whole gradients 4, which may still be written by reduce_sc"),
    (ops.reduce_scatter, "read", OFFLOADED, r"reduce_scatter .*: reads buffer 0, which may still be written by coll"),
    (ops.reduce_scatter, "collected", WHOLE, r"reduce_scatter .*: reads whole gradients 4, which may still be writt"),
    (ops.offload, "reduced", OFFLOADED, r"offload_4 .*: reads buffer 0, which may still be written by reduce_scatter "),
    (ops.update, "reduced", HALF, r"update_4 .*: reads gradients 4, which may still be written by reduce_scatter "),
    (ops.update, "landed", OFFLOADED, r"update_4 .*: reads landing 0, which may still be written by offload_4 "),
]


@pytest.mark.parametrize(("target", "kind", "shared", "message"), WAITS)
def test_a_missing_wait(
    target: Callable[..., Any], kind: str, shared: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = RANK_EFFECTS[target]

    def changed_row(call: Call, ledger: Ledger) -> tuple[Step, ...]:
        steps = row(call, ledger)
        return tuple(dataclasses.replace(s, waits=tuple(e for e in s.waits if e.kind != kind)) for s in steps)

    monkeypatch.setitem(RANK_EFFECTS, target, changed_row)
    broken(shared_schedule(*shared), message)


def test_parameters_that_were_not_gathered_after_their_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would go on with the other ranks' old shards."""
    row = RANK_EFFECTS[ops.update]

    def forgetful(call: Call, ledger: Ledger) -> tuple[Step, ...]:
        assert isinstance(ledger, RankLedger)
        steps = row(call, ledger)
        ledger.stale.clear()
        return steps

    monkeypatch.setitem(RANK_EFFECTS, ops.update, forgetful)
    broken(shared_schedule(*WHOLE), r"needs parameters of chunk 0 in parameters 0, which holds shard of chunk 0 ")


def test_a_gather_that_the_contract_promises_is_missing() -> None:
    schedule = changed(shared_schedule(*DIVIDED))
    gather = find(schedule, "forward", names_of(schedule, "forward", ops.all_gather)[2])
    gather.graph.erase_node(gather)
    broken(schedule, r"wait_2 \(forward, chunk 2\): waits for a chunk that nothing brought into buffer 2")


def test_gradients_that_are_not_reduced() -> None:
    schedule = changed(shared_schedule(*OFFLOADED))
    reduce = find(schedule, "backward", names_of(schedule, "backward", ops.reduce_scatter)[0])
    reduce.graph.erase_node(reduce)
    broken(schedule, r"offload_4 \(backward, chunk 4\): offloads gradients that buffer 0 does not hold")


def test_a_chunk_that_is_used_before_its_gather() -> None:
    schedule = changed(shared_schedule(*OFFLOADED))
    find(schedule, "forward", names_of(schedule, "forward", ops.wait)[1]).append(
        find(schedule, "forward", names_of(schedule, "forward", ops.all_gather)[1])
    )
    broken(schedule, r"wait_1 \(forward, chunk 1\): uses the chunk before it is gathered in buffer 1")
    schedule = changed(shared_schedule(*WHOLE))
    find(schedule, "forward", names_of(schedule, "forward", ops.bind)[1]).append(
        find(schedule, "forward", names_of(schedule, "forward", ops.all_gather)[1])
    )
    broken(schedule, r"bind_1 \(forward, chunk 1\): uses the chunk before it is gathered\n")


@pytest.mark.parametrize("shared", [OFFLOADED, WHOLE, HALF], ids="-".join)
def test_gradients_that_are_reduced_before_they_are_collected(shared: tuple[str, str]) -> None:
    schedule = changed(shared_schedule(*shared))
    collect = find(schedule, "backward", names_of(schedule, "backward", ops.collect)[1])
    collect.prepend(find(schedule, "backward", names_of(schedule, "backward", ops.reduce_scatter)[1]))
    broken(schedule, r"reduce_scatter_1 \(backward, chunk 3\): reduces gradients that were not collected there")
