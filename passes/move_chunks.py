"""Pass move_chunks: artefacts read parameters from chunks instead of graph inputs.

For every stretch in which a chunk is used without another chunk's use in between::

    w = wait(residency, chunk=3, slots=(0, 1))    # compute: the chunk has arrived; views of its parameters
    t1_forward(pack(x, w[0], w[1]))
    release(residency, chunk=3)                   # compute: the buffer may be filled anew after this point

A persistent chunk is bound once, where it is first used (one whose parameters are divided among ranks moves too).
Buffers and prefetches are decided by ``place``. A graph that reads a parameter in another type than its chunk has (an
evaluation outside autocast) gathers the exact value instead.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import ClassVar

from torch import fx

from passes.schedule_graph import (
    ChunkCall,
    artefact_calls,
    gathered_placeholders,
    is_resident,
    managed_placeholders,
    packed_arguments,
    residency_placeholder,
    segment_of,
)
from protrain_compile import ops
from protrain_compile.chunks import ChunkBinding
from protrain_compile.schedule import Schedule

Places = dict[fx.Node, tuple[int, int]]


@dataclasses.dataclass
class Stretch:
    """Consecutive calls that use one chunk."""

    chunk: int
    calls: list[fx.Node]


class MoveChunks:
    """Insert bind, wait and release, and feed artefacts from them."""

    name: ClassVar[str] = "move_chunks"
    requires: ClassVar[frozenset[str]] = frozenset({"graphs"})
    provides: ClassVar[frozenset[str]] = frozenset({"chunks"})

    def run(self, schedule: Schedule) -> bool:
        """Rewrite every graph; does nothing for a model that is not prepared."""
        if schedule.chunks is None:
            return False
        for name, module in schedule.graphs.items():
            places = managed_placeholders(schedule, name)
            _gather(module, gathered_placeholders(schedule, name), places)
            residency_placeholder(module)
            for stretch in _stretches(module, places, schedule.chunks):
                _serve(module, stretch, places, schedule.chunks)
            if name == "backward":
                _drop_placeholders(schedule, module, places)
            module.recompile()
        return True


def _gather(module: fx.GraphModule, gathered: set[fx.Node], places: Places) -> None:
    """Feed every call from exact values where it reads parameters in another type than their chunk has."""
    for call in list(artefact_calls(module)):
        pack = packed_arguments(call)
        for argument in [each for each in pack.all_input_nodes if each in gathered]:
            chunk, slot = places[argument]
            with module.graph.inserting_before(pack):
                read = ChunkCall(ops.gather, chunk, "compute", segment_of(call), slots=(slot,), has_buffer=False)
                values = read.write(module)
                values.kwargs = {**values.kwargs, "dtype": argument.meta["val"].dtype}
                item = module.graph.call_function(operator.getitem, (values, 0))
            pack.replace_input_with(argument, item)


def _chunks_used(call: fx.Node, places: Places) -> list[int]:
    arguments = packed_arguments(call).all_input_nodes
    return list(dict.fromkeys(places[argument][0] for argument in arguments if argument in places))


def _stretches(module: fx.GraphModule, places: Places, chunks: ChunkBinding) -> list[Stretch]:
    """Return the stretches in order of their first call; a chunk that stays on the device has one."""
    found: list[Stretch] = []
    current: dict[int, Stretch] = {}
    for call in artefact_calls(module):
        used = _chunks_used(call, places)
        for chunk in used:
            if chunk not in current:
                current[chunk] = Stretch(chunk, [])
                found.append(current[chunk])
            current[chunk].calls.append(call)
        if not all(is_resident(chunks, chunk) for chunk in used):
            current = {c: stretch for c, stretch in current.items() if c in used or is_resident(chunks, c)}
    return found


def _serve(module: fx.GraphModule, stretch: Stretch, places: Places, chunks: ChunkBinding) -> None:
    packs = [packed_arguments(call) for call in stretch.calls]
    wanted = {
        argument: places[argument][1]
        for pack in packs
        for argument in pack.all_input_nodes
        if argument in places and places[argument][0] == stretch.chunk
    }
    resident = is_resident(chunks, stretch.chunk)
    slots = tuple(sorted(set(wanted.values())))
    segment = segment_of(stretch.calls[0])
    target = ops.bind if resident else ops.wait
    first = ChunkCall(target, stretch.chunk, "compute", segment, slots=slots, has_buffer=not resident)
    with module.graph.inserting_before(packs[0]):
        views = first.write(module)
        items = {}
        for number, slot in enumerate(slots):
            items[slot] = module.graph.call_function(operator.getitem, (views, number))
    for argument, slot in wanted.items():
        items[slot].meta.setdefault("chunk_view", stretch.chunk)
        for pack in packs:
            pack.replace_input_with(argument, items[slot])
    if not resident:
        with module.graph.inserting_after(stretch.calls[-1]):
            ChunkCall(ops.release, stretch.chunk, "compute", segment_of(stretch.calls[-1])).write(module)


def _drop_placeholders(schedule: Schedule, module: fx.GraphModule, places: Places) -> None:
    """Take managed parameters out of the backward's inputs: contexts then hold none."""
    for node in places:
        assert not node.users, f"{node.name} is read outside of artefacts"
        module.graph.erase_node(node)
    assert schedule.chunks is not None
    inputs = schedule.backward_inputs
    remaining = tuple(i for i in inputs.primals if i not in schedule.chunks.place_of)
    schedule.backward_inputs = dataclasses.replace(inputs, primals=remaining)
