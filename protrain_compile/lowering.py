"""Lowering: the operations of one step under a plan, in the order in which the passes write them, as plain tuples.

The passes work on graphs; here each rule of theirs is restated on numbers, which takes under a millisecond::

    apply_policies    forward, recompute and backward of every segment      _calls
    offload_activations  swap_out, release, reload and wait of swapped values       _swap
    move_chunks       bind, wait and release around each stretch of use     _serve
    insert_updates    collect, offload and update behind the last gradient  _finish
    place             buffers and prefetches                                _place, which shares ``buffers``
    shard_collectives all_gather and reduce_scatter of what ranks divide    collective_ops

A test compares the result with the graphs of the pass pipeline, operation by operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from protrain_compile.buffers import Contents, Stay, place_stays
from protrain_compile.chunks import Residency
from protrain_compile.collective_ops import with_collectives
from protrain_compile.plan import Policy
from protrain_compile.roles import RecomputeRole, Role
from protrain_compile.step_shape import Life, StepShape
from protrain_compile.swapped_lives import SwapPlan, swap_plan

OpName = Literal[
    "snapshot",
    "forward",
    "recompute",
    "recompute_products",
    "recompute_pointwise",
    "backward",
    "bind",
    "wait",
    "release",
    "prefetch",
    "collect",
    "offload",
    "update",
    "swap_out",
    "release_swapped",
    "reload",
    "wait_reload",
    "all_gather",
    "reduce_scatter",
]


class Op(NamedTuple):
    """One operation: of a segment (a call, or on its swapped values), or on a chunk. What does not apply is -1."""

    op: OpName
    segment: int = -1
    chunk: int = -1
    buffer: int = -1


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan in full, as far as a step depends on it.

    Attributes:
        policies: One per block.
        residency: One per chunk.
        buffers: Standard chunk buffers.
    """

    policies: tuple[Policy, ...]
    residency: tuple[Residency, ...]
    buffers: int


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The operations of a step.

    Attributes:
        forward: The forward's (or the evaluation's).
        backward: The backward's.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]


def lower(shape: StepShape, choice: Choice) -> Lowered:
    """Return the operations of one step.

    Raises:
        PlanError: If one call uses more chunks than there are buffers.
    """
    recomputed = recomputed_segments(shape, choice.policies)
    swaps = swap_plan(shape, choice.policies, recomputed)
    calls = [_Call("forward", i, each.calls["forward"].chunks) for i, each in enumerate(shape.segments) if each.calls]
    _swap_out(calls, swaps)
    stays = [chunk.stays(each) for chunk, each in zip(shape.chunks, choice.residency, strict=True)]
    _serve(calls, stays)
    copies = [Op("snapshot") for life in shape.lives if life.birth == "snapshot" and kept_until(life, recomputed)]
    forward, left = _place(copies + _flat(calls), shape, choice, {})
    is_shared = shape.world.size > 1
    if is_shared:
        forward = with_collectives(forward, choice.residency, backward=False)
    if not shape.differentiable:
        return Lowered(tuple(forward), ())
    calls = _backward_calls(shape, recomputed)
    _reload(calls, swaps)
    last = _serve(calls, stays)
    early = _finish_all(shape, choice.residency, calls, last)
    backward, _ = _place(early + _flat(calls), shape, choice, left)
    if is_shared:
        backward = with_collectives(backward, choice.residency, backward=True)
    return Lowered(tuple(forward), tuple(backward))


def skeleton(shape: StepShape, policies: Sequence[Policy], residency: Sequence[Residency]) -> Lowered:
    """Return the calls and collects of a step: all that the memory of values depends on.

    Collects depend on the residency only where ``late_chunks`` says so.
    """
    recomputed = recomputed_segments(shape, policies)
    swaps = swap_plan(shape, policies, recomputed)
    forwards = [_Call("forward", i, ()) for i, each in enumerate(shape.segments) if each.calls]
    _swap_out(forwards, swaps)
    forward = _flat(forwards)
    if not shape.differentiable:
        return Lowered(tuple(forward), ())
    copies = [Op("snapshot") for life in shape.lives if life.birth == "snapshot" and kept_until(life, recomputed)]
    calls = _backward_calls(shape, recomputed)
    _reload(calls, swaps)
    last = {chunk: number for number, call in enumerate(calls) for chunk in call.chunks}
    made = {call.segment: number for number, call in enumerate(calls) if call.role == "backward"}
    behind: dict[int, list[Op]] = {}
    for chunk, each in enumerate(shape.chunks):
        if each.updated:
            released = -1 if each.stays(residency[chunk]) else last.get(chunk, -1)
            at = max(made.get(each.last_gradient, -1), released)
            behind.setdefault(at, []).append(Op("collect", chunk=chunk))
    backward = behind.get(-1, [])
    for number, call in enumerate(calls):
        backward += [*call.before, Op(call.role, segment=call.segment), *behind.get(number, ())]
    return Lowered((*copies, *forward), tuple(backward))


def late_chunks(shape: StepShape) -> tuple[int, ...]:
    """Return the chunks that are read after their last gradient: there, a chunk on the host is collected later."""
    first_reader: dict[int, int] = {}
    for index in reversed(range(len(shape.segments))):
        for role, call in shape.segments[index].calls.items():
            for chunk in call.chunks if role != "forward" else ():
                first_reader[chunk] = index
    return tuple(
        chunk
        for chunk, each in enumerate(shape.chunks)
        if each.updated and first_reader.get(chunk, each.last_gradient) < each.last_gradient
    )


def recomputed_segments(shape: StepShape, policies: Sequence[Policy]) -> list[RecomputeRole | None]:
    """Return for every segment the call that recomputes it, or None."""
    return [each.recompute_of.get(policies[each.block]) if each.block >= 0 else None for each in shape.segments]


def kept_until(life: Life, recomputed: Sequence[RecomputeRole | None]) -> tuple[Role, int] | None:
    """Return the call of the backward that takes a life's storages last, or None if none does."""
    for use in life.uses:
        role = use.last(recomputed[use.segment])
        if role is not None:
            return role, use.segment
    return None


@dataclasses.dataclass(slots=True)
class _Call:
    """A call with what the passes put around it.

    Attributes:
        role: Which part it calls.
        segment: For which segment.
        chunks: Whose parameters it reads.
        before: Operations before it.
        releases: Chunks released right behind it, the last one written first.
        behind_release: Operations behind these releases; an empty list stands for the release alone.
        erased: Releases that were taken away again.
        behind_result: Operations behind its results, by their number.
        behind: Operations behind all of these.
    """

    role: Role
    segment: int
    chunks: tuple[int, ...]
    before: list[Op] = dataclasses.field(default_factory=list)
    releases: list[int] = dataclasses.field(default_factory=list)
    behind_release: dict[int, list[Op]] = dataclasses.field(default_factory=dict)
    erased: set[int] = dataclasses.field(default_factory=set)
    behind_result: dict[int, list[Op]] = dataclasses.field(default_factory=dict)
    behind: list[Op] = dataclasses.field(default_factory=list)


def _backward_calls(shape: StepShape, recomputed: Sequence[RecomputeRole | None]) -> list[_Call]:
    found = []
    for index in reversed(range(len(shape.segments))):
        calls = shape.segments[index].calls
        again = recomputed[index]
        roles: tuple[Role, ...] = ("backward",) if again is None else (again, "backward")
        found += [_Call(role, index, calls[role].chunks) for role in roles if "backward" in calls]
    return found


def _swap_out(calls: Sequence[_Call], swaps: SwapPlan) -> None:
    """Put swap_out behind each swapped segment's forward, and release behind its partner's."""
    events = [(segment, 1, segment) for segment in swaps.lives]
    events += [(partner, 2 if partner == segment else 0, segment) for segment, partner in swaps.partner_of.items()]
    for at, order, segment in sorted(events):
        ran = max((call for call in calls if call.segment <= at), key=lambda call: call.segment, default=calls[0])
        ran.behind.append(Op("swap_out" if order == 1 else "release_swapped", segment=segment))


def _reload(calls: Sequence[_Call], swaps: SwapPlan) -> None:
    """Put reload before what the partner runs first in the backward, and wait before the segment's own."""
    for segment in reversed(swaps.lives):
        first = next(call for call in calls if call.segment <= swaps.partner_of[segment])
        own = next(call for call in calls if call.segment == segment)
        first.before.append(Op("reload", segment=segment))
        own.before.append(Op("wait_reload", segment=segment))


def _serve(calls: Sequence[_Call], stays: Sequence[bool]) -> dict[int, int]:
    """Put bind, wait and release around every stretch; return the call behind which each chunk is released last.

    A chunk of which the whole ``stays`` on the device is bound once.
    """
    ends: dict[int, int] = {}
    stretches: list[list[int]] = []
    bound: dict[int, list[int]] = {}
    current: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        served = {}
        for chunk in call.chunks:
            known = bound if stays[chunk] else current
            if chunk not in known:
                known[chunk] = [chunk, number, number]
                stretches.append(known[chunk])
            known[chunk][2] = number
            if not stays[chunk]:
                served[chunk] = known[chunk]
        current = served or current
    for chunk, first, last in stretches:
        if stays[chunk]:
            calls[first].before.append(Op("bind", -1, chunk))
            continue
        calls[first].before.append(Op("wait", -1, chunk))
        calls[last].releases.insert(0, chunk)
        ends[chunk] = max(last, ends.get(chunk, last))
    return ends


def _finish_all(
    shape: StepShape, residency: Sequence[Residency], calls: Sequence[_Call], released: dict[int, int]
) -> list[Op]:
    """Put collect, offload and update behind each chunk's last gradient or release; return what comes before all."""
    number_of = {call.segment: number for number, call in enumerate(calls) if call.role == "backward"}
    early: list[Op] = []
    updated = sorted((each.order, chunk) for chunk, each in enumerate(shape.chunks) if each.updated)
    for _, chunk in updated:
        each = shape.chunks[chunk]
        made = number_of.get(each.last_gradient, -1)
        release = released.get(chunk, -1)
        operations = [Op("collect", -1, chunk), Op("update", -1, chunk)]
        if not each.keeps_gradient(residency[chunk]):
            operations.insert(1, Op("release" if residency[chunk] == "persistent" else "offload", -1, chunk))
        if made >= release and made >= 0:
            behind = calls[made].behind_result.setdefault(each.last_item, [])
        elif release >= 0:
            behind = calls[release].behind_release.setdefault(chunk, [])
        else:
            behind = early
        behind[:0] = operations
        if release >= 0 and not _waits_between(calls, release, made, chunk):
            calls[release].erased.add(chunk)
    return early


def _waits_between(calls: Sequence[_Call], release: int, made: int, chunk: int) -> bool:
    """Whether another chunk is waited for between a chunk's release and its last gradient."""
    between = (op for call in calls[release + 1 : made + 1] for op in call.before)
    return any(op.op == "wait" and op.chunk != chunk for op in between)


def _flat(calls: Sequence[_Call]) -> list[Op]:
    found: list[Op] = []
    for call in calls:
        found += call.before
        found.append(Op(call.role, call.segment))
        for chunk in call.releases:
            if chunk not in call.erased:
                found.append(Op("release", -1, chunk))
            found += call.behind_release.get(chunk, ())
        if call.behind_result:
            for item in sorted(call.behind_result):
                found += call.behind_result[item]
        found += call.behind
    return found


OCCUPIES = frozenset(("wait", "release", "collect", "offload"))


def _place(ops: Sequence[Op], shape: StepShape, choice: Choice, entry: Contents) -> tuple[list[Op], Contents]:
    """Give every stay its buffer and insert the prefetches."""
    own = [chunk.keeps_gradient(each) for chunk, each in zip(shape.chunks, choice.residency, strict=True)]
    stays, members = _stays(ops, own)
    split = frozenset(chunk for chunk, each in enumerate(choice.residency) if each == "split")
    placed, left = place_stays(stays, choice.buffers, split, entry)
    written = list(ops)
    fronts: list[Op] = []
    behind: dict[int, Op] = {}
    for stay, placing, positions in zip(stays, placed, members, strict=True):
        for position in positions:
            name, segment, chunk, _ = ops[position]
            written[position] = Op(name, segment, chunk, placing.buffer)
        if not placing.fetched:
            continue
        prefetch = Op("prefetch", -1, stay.chunk, placing.buffer)
        if placing.behind < 0:
            fronts.append(prefetch)
        else:
            behind[stays[placing.behind].end] = prefetch
    found = fronts
    for position, op in enumerate(written):
        found.append(op)
        if position in behind:
            found.append(behind[position])
    return found, left


def _stays(ops: Sequence[Op], own: Sequence[bool]) -> tuple[list[Stay], list[list[int]]]:
    """Return the stays of chunks in buffers, in order of their begin, and the positions of each one's operations.

    Chunks with memory of their ``own`` for parameters and gradient have none.
    """
    members: list[list[int]] = []
    current: dict[int, list[int]] = {}
    for position, (name, _, chunk, _) in enumerate(ops):
        if name not in OCCUPIES or own[chunk]:
            continue
        if chunk not in current:
            current[chunk] = []
            members.append(current[chunk])
        current[chunk].append(position)
        if name in ("release", "offload"):
            del current[chunk]
    stays = []
    for positions in members:
        names = [ops[position].op for position in positions]
        first = ops[positions[0]]
        stays.append(Stay(first.chunk, positions[0], positions[-1], names[0] == "wait", "collect" not in names))
    return stays, members
