"""The walk over a graph's chunk operations: every check has a graph that breaks it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.schedules import changed, find, mixed_schedule, names_of
from torch import fx

from passes.schedule_graph import NO_BUFFER
from passes.verify_chunks import verify_chunks
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Operation, Schedule


@pytest.fixture
def schedule() -> Schedule:
    """A schedule of six blocks with chunks of every residency, which a test may break."""
    return changed(mixed_schedule())


def broken(schedule: Schedule, message: str) -> str:
    with pytest.raises(VerifierError, match=message) as raised:
        verify_chunks(schedule, "after x: ")
    return str(raised.value)


def nodes(schedule: Schedule, graph: str, target: Any) -> list[fx.Node]:
    return [find(schedule, graph, name) for name in names_of(schedule, graph, target)]


def of_chunk(schedule: Schedule, graph: str, target: Any, chunk: int) -> fx.Node:
    return next(node for node in nodes(schedule, graph, target) if node.kwargs["chunk"] == chunk)


def repeated(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


def changed_kwargs(node: fx.Node, **values: Any) -> None:
    node.kwargs = {**node.kwargs, **values}


def test_the_schedule_itself_is_clean_and_moves_chunks(schedule: Schedule) -> None:
    verify_chunks(schedule, "")
    assert len(nodes(schedule, "forward", ops.prefetch)) == 5
    assert len(nodes(schedule, "backward", ops.offload)) == 5
    assert len(nodes(schedule, "backward", ops.update)) == 6


def test_a_failure_names_pass_and_nodes_and_shows_ten_rows(schedule: Schedule) -> None:
    release = nodes(schedule, "forward", ops.release)[2]
    repeated(release)
    rows = broken(schedule, "").splitlines()
    assert rows[0] == ("after x: release_5 (forward, chunk 3): releases buffer 6, in which the chunk does not stay"), (
        rows[0]
    )
    assert rows[1].split() == ["node", "stream", "op", "what", "buffer"]
    assert len(rows) == 2 + 10
    assert [row.split() for row in rows if row.startswith(">")] == [
        [">", "release_5", "compute", "release", "chunk", "3", "6"]
    ]


def test_two_nodes_far_apart_share_the_rows(schedule: Schedule) -> None:
    collect = of_chunk(schedule, "backward", ops.collect, 5)
    late = of_chunk(schedule, "backward", ops.update, 1)
    late.append(collect.graph.node_copy(collect))
    rows = broken(schedule, r"collect_6 \(backward, chunk 5\): collects .* updated already \(update_5\)").splitlines()
    assert len(rows) == 2 + 10
    assert sum(row.startswith(">") for row in rows) == 2


def test_an_operation_without_effects(schedule: Schedule) -> None:
    node = nodes(schedule, "forward", ops.release)[0]
    node.meta["operation"] = Operation("teleport", "chunk 1", "compute", 1, chunk=1)
    node.target = lambda residency, **_: None  # type: ignore[assignment]
    broken(schedule, r"release \(forward, chunk 1\): has no row in the table of effects")


def test_a_use_before_its_wait(schedule: Schedule) -> None:
    wait = of_chunk(schedule, "forward", ops.wait, 2)
    of_chunk(schedule, "forward", ops.wait, 1).prepend(wait)
    release = of_chunk(schedule, "forward", ops.release, 2)
    next(iter(wait.users)).prepend(release)
    broken(schedule, r"t1_forward_1 \(forward, block 2\): reads chunk 2 after it has left its buffer, or before")


def test_a_use_of_a_persistent_chunk_after_its_update(schedule: Schedule) -> None:
    pack = next(iter(of_chunk(schedule, "backward", ops.bind, 0).users)).next
    while pack.target is not ops.pack:
        pack = pack.next
    call = next(iter(pack.users))
    update = of_chunk(schedule, "backward", ops.update, 0)
    with update.graph.inserting_after(update):
        again = update.graph.node_copy(pack)
    with update.graph.inserting_after(again):
        update.graph.node_copy(call, lambda node: again if node is pack else node)
    broken(schedule, r"t0_recompute.* reads chunk 0 after gradients took its place \(update\)")


@pytest.mark.parametrize(("chunk", "buffer"), [(1, 99), (1, 6), (3, 0)])
def test_a_buffer_that_is_not_the_chunks(schedule: Schedule, chunk: int, buffer: int) -> None:
    changed_kwargs(of_chunk(schedule, "forward", ops.wait, chunk), buffer=buffer)
    broken(schedule, rf"wait.* \(forward, chunk {chunk}\): uses buffer {buffer}, which is not for ")


def test_a_prefetch_before_its_buffer_is_free(schedule: Schedule) -> None:
    late = of_chunk(schedule, "forward", ops.prefetch, 5)
    of_chunk(schedule, "forward", ops.wait, 1).append(late)
    broken(schedule, r"prefetch_4 \(forward, chunk 5\): fills buffer 0 while chunk 1 stays in it \(wait\)")


def test_a_prefetch_after_the_gradient(schedule: Schedule) -> None:
    late = of_chunk(schedule, "backward", ops.update, 1)
    with late.graph.inserting_after(late):
        again = late.graph.node_copy(of_chunk(schedule, "backward", ops.prefetch, 1))
    assert again.target is ops.prefetch
    broken(schedule, r"fetches the chunk after its gradient was updated \(update_1\)")


def test_a_wait_for_what_nothing_brought(schedule: Schedule) -> None:
    prefetch = of_chunk(schedule, "forward", ops.prefetch, 5)
    prefetch.graph.erase_node(prefetch)
    broken(schedule, r"wait_4 \(forward, chunk 5\): waits for a chunk that nothing brought into buffer 0")


def test_two_chunks_in_one_buffer(schedule: Schedule) -> None:
    for target in (ops.prefetch, ops.wait, ops.release):
        changed_kwargs(of_chunk(schedule, "forward", target, 2), buffer=0)
    wait, other = of_chunk(schedule, "forward", ops.wait, 2), of_chunk(schedule, "forward", ops.prefetch, 2)
    of_chunk(schedule, "forward", ops.prefetch, 1).prepend(other)
    first = of_chunk(schedule, "forward", ops.wait, 1)
    first.prepend(wait)
    broken(schedule, r"waits for a chunk that nothing brought into buffer 0")
    first.prepend(other)
    first.prepend(wait)
    broken(schedule, r"nothing brought into buffer 0|uses buffer 0 while chunk 2 stays in it")


def test_a_missing_release(schedule: Schedule) -> None:
    release = of_chunk(schedule, "forward", ops.release, 1)
    release.graph.erase_node(release)
    broken(schedule, r"prefetch_4 \(forward, chunk 5\): fills buffer 0 while chunk 1 stays in it")


def test_gradients_in_a_buffer_in_which_another_chunk_stays(schedule: Schedule) -> None:
    collect, wait = of_chunk(schedule, "backward", ops.collect, 4), of_chunk(schedule, "backward", ops.wait, 2)
    changed_kwargs(collect, buffer=1)
    of_chunk(schedule, "backward", ops.wait, 4).prepend(wait)
    broken(schedule, r"collect_4 \(backward, chunk 4\): writes gradients into buffer 1 while chunk 2 stays in it")


def test_gradients_of_a_frozen_chunk(schedule: Schedule) -> None:
    assert schedule.chunks is not None
    layout = schedule.chunks.layout
    frozen = tuple(dataclasses.replace(chunk, trainable=chunk.index != 4) for chunk in layout.chunks)
    schedule.chunks = dataclasses.replace(schedule.chunks, layout=dataclasses.replace(layout, chunks=frozen))
    broken(schedule, r"collect_4 \(backward, chunk 4\): collects gradients of a frozen chunk")


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_gradients_collected_or_updated_twice(schedule: Schedule, chunk: int) -> None:
    again = repeated(of_chunk(schedule, "backward", ops.update, chunk))
    broken(schedule, "updates with a gradient that is updated, not ")
    again.graph.erase_node(again)
    repeated(of_chunk(schedule, "backward", ops.collect, chunk))
    broken(schedule, "collects gradients that were collected already")


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_gradients_without_an_update(schedule: Schedule, chunk: int) -> None:
    update = of_chunk(schedule, "backward", ops.update, chunk)
    update.graph.erase_node(update)
    broken(schedule, r"the gradient is \w+ but its chunk is never updated with it")


def test_an_offload_without_gradients(schedule: Schedule) -> None:
    collect = of_chunk(schedule, "backward", ops.collect, 4)
    collect.graph.erase_node(collect)
    broken(schedule, r"offload_3 \(backward, chunk 4\): offloads gradients that buffer 2 does not hold")


def test_an_offload_from_another_buffer(schedule: Schedule) -> None:
    changed_kwargs(of_chunk(schedule, "backward", ops.offload, 4), buffer=1)
    broken(schedule, r"offloads buffer 1, in which the chunk does not stay")


def test_an_update_without_its_offload(schedule: Schedule) -> None:
    offload = of_chunk(schedule, "backward", ops.offload, 4)
    offload.graph.erase_node(offload)
    broken(schedule, r"update_4 \(backward, chunk 4\): updates with a gradient that is collected, not offloaded")


def test_an_update_of_other_slots(schedule: Schedule) -> None:
    changed_kwargs(of_chunk(schedule, "backward", ops.update, 4), slots=(0, 1))
    broken(schedule, r"updates slots \(0, 1\) with gradients of slots \(0, 1, 2, 3\) \(offload_3\)")


def test_before_buffers_are_placed_the_order_is_checked_already(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("passes.verify_chunks.verify_order", lambda *_: pytest.fail("buffers are not known yet"))
    for module in schedule.graphs.values():
        for node in list(module.graph.nodes):
            if node.target is ops.prefetch:
                module.graph.erase_node(node)
            elif "buffer" in node.kwargs:
                changed_kwargs(node, buffer=NO_BUFFER)
    verify_chunks(schedule, "")
    release = of_chunk(schedule, "forward", ops.release, 2)
    of_chunk(schedule, "forward", ops.wait, 2).append(release)
    broken(schedule, "reads chunk 2 after it has left")
