"""The order of steps over streams and from step to step: every wait that matters, and what else can go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.schedules import Blocks, changed, find, mixed_schedule, names_of, prepared_schedule

from passes import effects
from passes.chunk_views import schedule_operations
from passes.effects import EFFECTS, Call, Event, Ledger, Resource, Step, value
from passes.verify_order import verify_order
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule


def verify(schedule: Schedule) -> None:
    verify_order(schedule, "after x: ", schedule_operations(schedule))


def broken(schedule: Schedule, message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        verify(schedule)


def without(target: Callable[..., Any], kind: str) -> effects.Effect:
    """Return the row of an operation that does not wait for events of a kind."""
    row = EFFECTS[target]

    def changed_row(call: Call, ledger: Ledger) -> tuple[Step, ...]:
        return tuple(
            dataclasses.replace(step, waits=tuple(event for event in step.waits if event.kind != kind))
            for step in row(call, ledger)
        )

    return changed_row


WAITS = [
    (ops.prefetch, "read", r"prefetch_4 \(forward, chunk 5\): writes buffer 0, which may still be read by t1_forward "),
    (ops.prefetch, "left", r"prefetch \(backward, chunk 1\): writes buffer 0, which may still be read by offload_4 "),
    (ops.prefetch, "updated", r"prefetch \(forward, chunk 1\): reads home 1, which may still be written by step"),
    (ops.wait, "arrival", r"t1_forward \(forward, block 1\): reads buffer 0, which may still be written by prefetch "),
    (ops.offload, "read", r"offload_4 \(backward, chunk 5\): reads buffer 0, which may still be written by collect_5 "),
    (
        ops.offload,
        "emptied",
        r"offload_\d \(backward, chunk \d\): writes landing \d, which may still be read by update",
    ),
    (
        ops.update,
        "landed",
        r"update_5 \(backward, chunk 5\): reads landing 0, which may still be written by offload_4 ",
    ),
]


@pytest.mark.parametrize(("target", "kind", "message"), WAITS, ids=lambda value: getattr(value, "__name__", value))
def test_a_missing_wait(target: Callable[..., Any], kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verify(mixed_schedule())
    monkeypatch.setitem(EFFECTS, target, without(target, kind))
    broken(mixed_schedule(), message)


def test_a_missing_wait_before_a_gathered_value(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = changed(mixed_schedule())
    wait = find(schedule, "forward", names_of(schedule, "forward", ops.wait)[0])
    wait.target = ops.gather
    verify(schedule)
    monkeypatch.setitem(EFFECTS, ops.gather, without(ops.gather, "updated"))
    broken(schedule, r"wait \(forward, chunk 1\): reads home 1, which may still be written by step")


def test_gradients_over_the_parameters_of_a_fetch_that_nothing_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrival matters to ``collect`` where another graph left a buffer with a fetch under way."""
    schedule = changed(mixed_schedule())
    monkeypatch.setitem(EFFECTS, ops.wait, without(ops.wait, "arrival"))
    monkeypatch.setitem(EFFECTS, ops.collect, without(ops.collect, "arrival"))
    for module in schedule.graphs.values():
        for node in module.graph.nodes:
            if node.target in (ops.wait, ops.bind):
                for item in node.users:
                    for pack in list(item.users):
                        pack.args = tuple(each for each in pack.args if each is not item)
    broken(schedule, r"collect_5 \(backward, chunk 5\): writes buffer 0, which may still be written by prefetch_4 ")


def test_a_buffer_that_another_graph_may_fill_too_early() -> None:
    """Nothing in this schedule uses the buffer again, but a second forward may."""
    schedule = changed(mixed_schedule())
    release = find(schedule, "forward", names_of(schedule, "forward", ops.release)[-1])
    release.graph.erase_node(release)
    broken(schedule, r"t1_forward_4 \(forward, block 5\): another graph's prefetch of buffer 0 would not wait for it")


def test_a_landing_that_another_graph_may_fill_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    row = EFFECTS[ops.update]

    def forgetful(call: Call, ledger: Ledger) -> tuple[Step, ...]:
        return tuple(
            dataclasses.replace(step, records=tuple(event for event in step.records if event.kind != "emptied"))
            for step in row(call, ledger)
        )

    schedule = prepared_schedule(Blocks(1), ("offloaded",))
    monkeypatch.setitem(EFFECTS, ops.update, forgetful)
    broken(schedule, r"update \(backward, chunk 0\): another graph's offload of landing 0 would not wait for it")


def test_an_offload_without_gradients() -> None:
    schedule = changed(mixed_schedule())
    collect = find(schedule, "backward", names_of(schedule, "backward", ops.collect)[0])
    collect.graph.erase_node(collect)
    broken(
        schedule,
        r"offload_4 \(backward, chunk 5\): needs gradients of chunk 5 in buffer 0, which holds parameters of chunk 5 "
        r"prefetch_4 \(forward, chunk 5\)",
    )


def test_gradients_that_are_lost() -> None:
    schedule = changed(mixed_schedule())
    update = find(schedule, "backward", names_of(schedule, "backward", ops.update)[0])
    update.graph.erase_node(update)
    broken(schedule, r"offload.*: writes landing \d, whose gradients of chunk 5 nothing has read offload_4")


def test_parameters_from_before_their_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation leaves chunks in buffers, training updates their homes, and the next evaluation fetches anew."""
    schedule = prepared_schedule(Blocks(2), "offloaded", train=False)
    verify(schedule)
    monkeypatch.setattr(Ledger, "forget", lambda self, chunk: None)
    broken(schedule, r"reads old parameters of chunk 0 in buffer 0")


def test_a_chunk_that_the_contract_promises_is_missing() -> None:
    schedule = changed(mixed_schedule())
    prefetch = find(schedule, "backward", names_of(schedule, "backward", ops.prefetch)[0])
    prefetch.graph.erase_node(prefetch)
    broken(schedule, r"wait_4 \(backward, chunk 1\): waits for a chunk that nothing brought into its buffer")


def test_a_value_that_leaves_is_ordered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any operation with a row is checked: here one that copies a result away, and one that must wait for it."""
    schedule = changed(mixed_schedule())
    graph = schedule.graphs["forward"].graph
    call = find(schedule, "forward", "t0_forward")

    def leave(item: Any, *, stream: str) -> Any:
        return item

    with graph.inserting_after(call):
        graph.call_function(leave, (call,), {"stream": "d2h"})
    copied = value("copied")

    def row(call: Call, ledger: Ledger) -> tuple[Step, ...]:
        made = Event("made", 0)
        start = Step("compute", records=(made,))
        return (start, Step("d2h", waits=(made,), reads=call.inputs, writes=(copied,)))

    monkeypatch.setitem(EFFECTS, leave, row)
    verify(schedule)
    monkeypatch.setitem(EFFECTS, leave, lambda call, ledger: row(call, ledger)[1:])
    broken(schedule, r"leave.*: reads value forward.t0_forward, which may still be written by t0_forward")
    assert Resource("value", "forward.t0_forward") == value("forward.t0_forward").resource
