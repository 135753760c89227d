"""Memory model: the bytes alive at every operation of a step, where they peak, and what lies on the host.

Three kinds of memory add up on the device::

    standing(shape, choice)   all the time: what the caller holds; chunk buffers; parameters, states and gradient
                              storage of persistent chunks                                          by kind
    values(...)               between calls: saved values, activations, gradients. As in ``liveness``, born when the
                              call that makes them returns, freed inside the call that takes them last
    inside(...)               during a call: everything that it returns, what is dropped at once included, and its
                              workspace, which the profile knows

Allocations of side streams do not occur: they only touch standing memory. So a value is free for the next one as soon
as the call that takes it last has been launched. Every allocation is rounded up to the allocator's 512-byte blocks
(``peak_bytes``); ``reserved_bytes`` counts what large ones take from the device, in units of 2 MiB.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from protrain_compile.chunks import Residency
from protrain_compile.lowering import Choice, Lowered, Op, kept_until, recomputed_segments
from protrain_compile.plan import Policy
from protrain_compile.profile import Profile
from protrain_compile.roles import ROLES, RecomputeRole, Role
from protrain_compile.step_shape import ChunkShape, Life, StepShape, block_rounded, segment_rounded
from protrain_compile.swapped_lives import NOTHING, SwappedLife, moved_bytes, swap_plan

Unit = Literal["size_bytes", "block_bytes", "segment_bytes"]
HOST_ALIGNMENT_BYTES = 256
"""Parts of a slab of host memory start at multiples of this (see ``runtime.host_memory``)."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Where the most memory is alive.

    Attributes:
        values_bytes: Bytes of values at that point.
        inside_bytes: Bytes inside the operation: results that are dropped at once, and workspace.
        graph: ``forward`` or ``backward``.
        position: The operation, counted in its graph; -1 for the start of the graph.
    """

    values_bytes: int
    inside_bytes: int
    graph: str
    position: int

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.values_bytes + self.inside_bytes


def standing_bytes(shape: StepShape, choice: Choice) -> dict[str, int]:
    """Return the device bytes that are always taken, by kind."""
    found = {"inputs": 0, "buffers": 0, "parameters": 0, **shape.held_bytes}
    found |= {"states": 0, "gradients": 0}
    for chunk, residency in zip(shape.chunks, choice.residency, strict=True):
        parameters, states, gradients = chunk_standing_bytes(chunk, residency)
        found["parameters"] += parameters
        found["states"] += states
        found["gradients"] += gradients
    found["chunk buffers"] = choice.buffers * block_rounded(shape.largest_bytes(choice.residency))
    return found


def chunk_standing_bytes(chunk: ChunkShape, residency: Residency) -> tuple[int, int, int]:
    """Return the device bytes that one chunk always takes: of parameters, states and gradients."""
    if residency == "offloaded":
        return 0, 0, 0
    if residency == "split":
        return block_rounded(chunk.size_bytes), 0, 0
    return (
        block_rounded(chunk.size_bytes if chunk.stays(residency) else chunk.shard_bytes),
        block_rounded(chunk.companion_bytes) + block_rounded(chunk.moment_bytes),
        block_rounded(chunk.gradient_bytes) + block_rounded(chunk.whole_gradient_bytes),
    )


def reserved_slack_bytes(shape: StepShape, choice: Choice) -> int:
    """Return what the allocator takes for standing memory beyond its blocks."""
    sizes = []
    for chunk, residency in zip(shape.chunks, choice.residency, strict=True):
        if residency != "offloaded":
            sizes.append(chunk.size_bytes if residency == "split" or chunk.stays(residency) else chunk.shard_bytes)
        if residency == "persistent":
            sizes += [chunk.companion_bytes, chunk.moment_bytes // 2, chunk.moment_bytes // 2, chunk.gradient_bytes]
            sizes.append(chunk.whole_gradient_bytes)
    if any(chunk.moves(each) for chunk, each in zip(shape.chunks, choice.residency, strict=True)):
        sizes += [shape.largest_bytes(choice.residency)] * choice.buffers
    return sum(segment_rounded(size) - block_rounded(size) for size in sizes)


def live_values(shape: StepShape, choice: Choice, lowered: Lowered, unit: Unit = "block_bytes") -> list[list[int]]:
    """Return, for forward and backward, the bytes of values at the start and right after every operation."""
    lengths = (len(lowered.forward), len(lowered.backward))
    changes = [[0] * (length + 2) for length in lengths]
    places = Places(lowered)
    recomputed = recomputed_segments(shape, choice.policies)
    swapped_by = swap_plan(shape, choice.policies, recomputed).segment_of()
    for number, life in enumerate(shape.lives):
        size = getattr(life, unit)
        if number in swapped_by:
            segment, swapped = swapped_by[number]
            swapped = swapped._replace(moved_bytes=swapped.moved_bytes + size - life.size_bytes)
            for graph, begin, end, held in places.swapped_spans(life, segment, size, swapped):
                changes[graph][begin] += held
                changes[graph][end] -= held
            continue
        for graph, begin, end in places.spans(shape, life, recomputed):
            changes[graph][begin] += size
            changes[graph][end] -= size
    return [list(itertools.accumulate(each))[: length + 1] for each, length in zip(changes, lengths, strict=True)]


def find_peak(shape: StepShape, profile: Profile, choice: Choice, lowered: Lowered, unit: Unit = "block_bytes") -> Peak:
    """Return the peak of values and of what is inside calls; standing memory comes on top."""
    best = Peak(0, 0, "forward", -1)
    live = live_values(shape, choice, lowered, unit)
    for graph, ops, alive in zip(("forward", "backward"), (lowered.forward, lowered.backward), live, strict=True):
        for position, op in enumerate(ops):
            if op.segment < 0:
                continue
            inside = inside_bytes(shape, profile, op)
            if alive[position] + inside > best.bytes:
                best = Peak(alive[position], inside, graph, position)
        if max(alive) > best.bytes:
            best = Peak(max(alive), 0, graph, alive.index(max(alive)) - 1)
    return best


def inside_bytes(shape: StepShape, profile: Profile, op: Op) -> int:
    """Return the most that a call allocates beyond what is alive before it; nothing for other operations."""
    if op.op not in ROLES:
        return 0
    segment = shape.segments[op.segment]
    role: Role = op.op
    cost = profile.templates[segment.template].parts.get(role)
    return segment.calls[role].returned_bytes + (cost.workspace_bytes if cost is not None else 0)


class Places:
    """Where operations are: positions count from 1, so that 0 is the start of a graph.

    Attributes:
        ends: Behind each graph.
        call: Calls and operations on swapped values, by their name and segment.
        collect: Collects, by chunk.
    """

    def __init__(self, lowered: Lowered, snapshots: Iterator[int] | None = None) -> None:
        """Look up the operations; ``snapshots`` replaces the positions of those."""
        self.ends = (len(lowered.forward) + 1, len(lowered.backward) + 1)
        ops = [(op, i + 1) for graph in (lowered.forward, lowered.backward) for i, op in enumerate(graph)]
        self.call = {(op.op, op.segment): at for op, at in ops if op.segment >= 0}
        self.collect = {op.chunk: at for op, at in ops if op.op == "collect"}
        self._snapshots = snapshots or iter([at for op, at in ops if op.op == "snapshot"])

    def spans(
        self, shape: StepShape, life: Life, recomputed: Sequence[RecomputeRole | None]
    ) -> list[tuple[int, int, int]]:
        """Return graph (0 or 1), begin and end of the positions after which storages are alive."""
        last = kept_until(life, recomputed)
        in_backward = (1, 0, self.call[last]) if last is not None else None
        if life.birth in ("forward", "snapshot"):
            return self._from_forward(shape, life, in_backward)
        begin = 0 if life.birth == "tangent" else self.call.get((life.birth, life.segment))
        if begin is None:
            return []
        ends = [in_backward[2]] if in_backward is not None else []
        ends += [self.collect[chunk] for chunk in life.collects]
        end = self.ends[1] if life.returned else max(ends, default=begin)
        return [(1, begin, end)]

    def swapped_spans(
        self, life: Life, segment: int, size: int, swapped: SwappedLife
    ) -> list[tuple[int, int, int, int]]:
        """Return graph, begin, end and bytes of a life that ``segment`` swaps, and of the memory for its copies."""
        left, released = self.call["swap_out", segment], self.call["release_swapped", segment]
        begin = next(self._snapshots) if life.birth == "snapshot" else self.call["forward", life.segment]
        used = self.call.get(("forward", life.forward_until), begin)
        found = [(0, begin, max(left if swapped.staged else released, used), size)]
        if swapped.staged:
            found.append((0, left, released, swapped.moved_bytes))
        return [*found, (1, self.call["reload", segment], self.call[swapped.last, segment], swapped.moved_bytes)]

    def _from_forward(
        self, shape: StepShape, life: Life, in_backward: tuple[int, int, int] | None
    ) -> list[tuple[int, int, int]]:
        if in_backward is None and life.forward_until < 0:
            return []
        begin = next(self._snapshots) if life.birth == "snapshot" else self.call["forward", life.segment]
        if life.returned:
            return [(0, begin, self.ends[0]), (1, 0, self.ends[1])]
        if in_backward is not None:
            return [(0, begin, self.ends[0]), in_backward]
        output = life.forward_until >= len(shape.segments)
        return [(0, begin, self.ends[0] if output else self.call["forward", life.forward_until])]


# ---- the host ------------------------------------------------------------------------------------------------------


def host_bytes(shape: StepShape, choice: Choice) -> dict[str, int]:
    """Return the host bytes that chunks and swapped values take at most, by kind.

    That is in the first step, whose gradients all wait for the end of its backward.
    """
    found = {"parameters": 0, "states": 0, "gradients": 0}
    landings = []
    for chunk, residency in zip(shape.chunks, choice.residency, strict=True):
        parameters, states, gradients, landing = chunk_host_bytes(chunk, residency)
        found["parameters"] += parameters
        found["states"] += states
        found["gradients"] += gradients
        landings.append(landing)
    found["gradients"] += landing_bytes(shape, landings)
    return found | swapped_host_bytes(shape, choice.policies)


def chunk_host_bytes(chunk: ChunkShape, residency: Residency) -> tuple[int, int, int, int]:
    """Return the host bytes of one chunk: of parameters, states, waiting gradients, and a landing if it needs one."""
    if residency == "persistent":
        return 0, 0, 0, 0
    return (
        _aligned(chunk.shard_bytes),
        _aligned(chunk.companion_bytes) + _aligned(chunk.moment_bytes),
        _aligned(chunk.accumulator_bytes),
        _aligned(chunk.shard_bytes) if chunk.trainable else 0,
    )


def landing_bytes(shape: StepShape, needs: Sequence[int]) -> int:
    """Return the bytes of all landings where chunks need landings of these bytes: of shared ones, the largest."""
    return sum(sorted(needs, reverse=True)[: shape.landings or None])


def swapped_host_bytes(shape: StepShape, policies: Sequence[Policy]) -> dict[str, int]:
    """Return the host bytes of swapped values, by kind: none where nothing is swapped."""
    swaps = swap_plan(shape, policies, recomputed_segments(shape, policies)) if policies else NOTHING
    slabs = [_aligned(moved_bytes(lives)) for lives in swaps.lives.values()]
    return {"activations": sum(slabs)} if slabs else {}


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES


def total(kinds: Mapping[str, int]) -> int:
    """Return the bytes of all kinds."""
    return sum(kinds.values())
