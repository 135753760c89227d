"""The pass shard_collectives: where collectives stand, what they move, and that each of them matters."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from support.prepared import CHUNKS
from support.rank_schedules import RANKS, TURNS, shared_schedule, single_schedule
from torch import fx

from passes.verify_chunks import verify_chunks
from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule, operation_of
from protrain_compile.schedule_digest import collective_lines


def operations(schedule: Schedule, graph: str, chunk: int) -> list[str]:
    """Return what happens to a chunk in a graph, in order."""
    found = (operation_of(node) for node in schedule.graphs[graph].graph.nodes)
    return [each.op for each in found if each is not None and each.chunk == chunk]


GATHERED = ["all_gather", "wait", "release"]
EXPECTED = {
    ("offloaded", "parameters"): (["prefetch", *GATHERED], ["collect", "reduce_scatter", "offload", "update"]),
    ("persistent", "states"): (["all_gather", "bind"], ["collect", "reduce_scatter", "update"]),
    ("persistent", "gradients"): (["all_gather", "bind"], ["collect", "reduce_scatter", "release", "update"]),
    ("persistent", "parameters"): (GATHERED, ["collect", "reduce_scatter", "release", "update"]),
}


@pytest.mark.parametrize(("residency", "sharding"), EXPECTED)
def test_operations_of_every_chunk(residency: str, sharding: str) -> None:
    schedule = shared_schedule(residency, sharding)
    forward, ending = EXPECTED[residency, sharding]
    for chunk in range(CHUNKS):
        assert operations(schedule, "forward", chunk) == forward
        assert operations(schedule, "backward", chunk)[-len(ending) :] == ending


def test_split_chunks_are_gathered_once_and_reduced() -> None:
    schedule = shared_schedule("mixed", "parameters")
    assert operations(schedule, "forward", 2) == ["prefetch", *GATHERED]
    assert operations(schedule, "backward", 2) == ["wait", "collect", "reduce_scatter", "offload", "update"]


def test_copies_move_shards_and_collectives_the_rest() -> None:
    schedule = shared_schedule("offloaded", "parameters")
    assert schedule.chunks is not None
    for module in schedule.graphs.values():
        for node in module.graph.nodes:
            operation = operation_of(node)
            if operation is None or operation.chunk < 0:
                continue
            size = schedule.chunks.layout.chunks[operation.chunk].size_bytes
            expected = {"prefetch": size // RANKS, "offload": size // RANKS}
            expected |= dict.fromkeys(("all_gather", "reduce_scatter"), size // RANKS * (RANKS - 1))
            assert operation.moved_bytes == expected.get(operation.op, 0)
            assert (operation.stream == "gather") == (operation.op in ("all_gather", "reduce_scatter"))


def test_resident_chunks_are_gathered_in_order_of_use() -> None:
    """Each behind the gather of the use before it: at the front where no buffer has to become free first."""
    nodes = [n for n in shared_schedule("persistent", "states").graphs["forward"].graph.nodes if operation_of(n)]
    assert [node.target for node in nodes[:CHUNKS]] == [ops.all_gather] * CHUNKS
    assert [node.kwargs["chunk"] for node in nodes[:CHUNKS]] == list(range(CHUNKS))
    mixed = shared_schedule("mixed", "states").graphs["forward"].graph
    gathers = [node.kwargs["chunk"] for node in mixed.nodes if node.target is ops.all_gather]
    assert gathers == list(range(CHUNKS))


def test_one_rank_has_no_collectives() -> None:
    single = single_schedule()
    assert not single.divided
    targets = {node.target for module in single.graphs.values() for node in module.graph.nodes}
    assert not targets & {ops.all_gather, ops.reduce_scatter}


@pytest.mark.parametrize(("residency", "sharding"), [*EXPECTED, ("mixed", "gradients")])
def test_every_missing_collective_is_found(residency: str, sharding: str) -> None:
    schedule = shared_schedule(residency, sharding)
    verify_chunks(schedule, "")
    for graph in ("forward", "backward"):
        for name in [n.name for n in schedule.graphs[graph].graph.nodes if moves(n)]:
            broken = mutant(schedule)
            node = find(broken, graph, name)
            node.graph.erase_node(node)
            with pytest.raises(VerifierError, match="chunk"):
                verify_chunks(broken, "")


def test_a_collective_at_the_wrong_place_is_found() -> None:
    schedule = shared_schedule("offloaded", "parameters")
    gather = next(n for n in schedule.graphs["forward"].graph.nodes if n.target is ops.all_gather)
    for graph, target, anchor, message in (
        ("forward", ops.all_gather, ops.wait, "before it is gathered"),
        ("backward", ops.reduce_scatter, ops.offload, "offloads gradients"),
    ):
        broken = mutant(schedule)
        nodes = broken.graphs[graph].graph.nodes
        late = next(n for n in nodes if n.target is target)
        behind = next(n for n in nodes if n.target is anchor and n.kwargs["chunk"] == late.kwargs["chunk"])
        behind.append(late)
        with pytest.raises(VerifierError, match=message):
            verify_chunks(broken, "")
    broken = mutant(schedule)
    node = find(broken, "forward", gather.name)
    node.kwargs = {**node.kwargs, "buffer": 2}
    with pytest.raises(VerifierError, match="gathers in buffer 2, which has no shard of it"):
        verify_chunks(broken, "")


def test_the_digest_tells_layout_and_collectives_but_no_shapes() -> None:
    lines = list(collective_lines(shared_schedule("mixed", "states")))
    assert lines[0] == "4 buffers, 4 ranks"
    assert lines[1].startswith("chunk 0: offloaded, parameters divided, ")
    assert lines[1].endswith("stem.bias at 0, stem.weight at 64")
    assert "forward: all_gather of chunk 0 in buffer 0" in lines
    assert "forward: all_gather of chunk 1" in lines
    assert "backward: reduce_scatter of chunk 1" in lines
    assert list(collective_lines(shared_schedule("mixed", "gradients"))) != lines


def moves(node: fx.Node) -> bool:
    return node.target in (ops.prefetch, ops.all_gather, ops.reduce_scatter)


def mutant(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, graphs={name: copy.deepcopy(g) for name, g in schedule.graphs.items()})


def find(schedule: Schedule, graph: str, name: str) -> fx.Node:
    return next(node for node in schedule.graphs[graph].graph.nodes if node.name == name)


@pytest.mark.parametrize("residency", ["persistent", "mixed"])
def test_updates_on_the_device_wait_for_the_next_calls_gradients(residency: str) -> None:
    """Else compute would wait for a reduce_scatter that has just begun; each is still updated once."""
    nodes = list(shared_schedule(residency, "gradients").graphs["backward"].graph.nodes)
    calls = [i for i, node in enumerate(nodes) if isinstance(node.target, Artefact)]

    def position(target: object, chunk: int) -> int:
        (found,) = (i for i, n in enumerate(nodes) if (n.target, n.kwargs.get("chunk")) == (target, chunk))
        return found

    for chunk in range(CHUNKS):
        reduced, updated = position(ops.reduce_scatter, chunk), position(ops.update, chunk)
        hidden = any(reduced < call < updated for call in calls)
        assert hidden == (TURNS[residency][chunk] == "persistent" and reduced < calls[-1])
