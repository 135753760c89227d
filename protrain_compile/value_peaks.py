"""Peaks of values under many policies of one shape: what ``memory_model.find_peak`` finds, from parts that repeat.

When a value is born and freed depends only on the policies of the few segments that make and use it. So lives are
grouped by these segments, and each group has one list of changes for each combination of their policies. Positions are
the same for all: those of the step in which every block is recomputed, of which a kept block leaves its recompute out;
whichever recompute a block has, it is at the same place.
The changes of all groups add up to the bytes alive at every position. Policies are looked at one after the other that
differ little: sums stay, and only the groups that differ are replaced.

With swaps there are positions for their operations, too. What a segment swaps are changes in place of those that its
lives make without; they depend on the segment, its partner, and how it is recomputed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from protrain_compile.lowering import Lowered, Op, recomputed_segments, skeleton
from protrain_compile.memory_model import Places, inside_bytes
from protrain_compile.plan import Policy
from protrain_compile.profile import Profile
from protrain_compile.roles import RECOMPUTES, RecomputeRole
from protrain_compile.step_shape import Life, StepShape
from protrain_compile.swapped_lives import SwappedLife, swap_plan

_Changes = list[tuple[int, int]]
"""Positions, and bytes that are more from there on."""
_Recomputed = tuple[RecomputeRole | None, ...]
_Span = tuple[int, int, int, int]
"""Graph, positions of begin and end, bytes."""

GAP = Op("wait")
"""Stands at a position for operations on swapped values."""

BEHIND_FORWARD = (1, 2, 3)
"""Positions behind a segment's forward: what others release there, its own values leave, and are released."""


class _Group(NamedTuple):
    """Lives whose begins and ends the same segments decide.

    Attributes:
        segments: These segments.
        lives: The lives.
        changes: What they change, by how each of the segments is recomputed.
    """

    segments: tuple[int, ...]
    lives: list[Life]
    changes: dict[_Recomputed, _Changes]


class ValuePeaks:
    """Peaks for one shape in which no chunk is read late (see ``lowering.late_chunks``)."""

    def __init__(self, shape: StepShape, profile: Profile, *, swaps: bool = False) -> None:
        """Prepare.

        Args:
            shape: The step; with swaps every segment has a forward.
            profile: What it costs.
            swaps: Whether policies may swap.
        """
        recompute: Policy = "recompute"
        lowered = skeleton(shape, [recompute] * len(shape.block_names), ["persistent"] * len(shape.chunks))
        lowered = _with_gaps(lowered) if swaps else lowered
        self.shape = shape
        self.swaps = swaps
        # Snapshots come before all calls: as well all at once.
        self.places = Places(lowered, itertools.repeat(0))
        self.behind_forward = len(lowered.forward) + 2
        self.inside = self._insides(profile, lowered)
        again = {s: at for (role, s), at in self.places.call.items() if role == "recompute"}
        self.places.call.update(((role, s), at) for s, at in again.items() for role in RECOMPUTES)
        self.recomputes = {s: self._at(1, at - 1) for s, at in again.items()}
        self.inside_of = {
            (s, role): inside_bytes(shape, profile, Op(role, s)) for s in again for role in self._roles(s)
        }
        lives: dict[tuple[int, ...], list[Life]] = {}
        for life in shape.lives:
            lives.setdefault(self._deciding(life), []).append(life)
        self._swapped: dict[tuple[int, int, RecomputeRole | None, tuple[SwappedLife, ...]], _Changes] = {}
        groups = [_Group(segments, each, {}) for segments, each in lives.items()]
        self.groups_of: dict[int, list[_Group]] = {}
        for group in groups:
            for segment in group.segments:
                self.groups_of.setdefault(segment, []).append(group)
        self._recomputed = recomputed_segments(shape, [recompute] * len(shape.block_names))
        self._alive = [0] * len(self.inside)
        self._add(groups, 1)

    def bytes_of(self, policies: Sequence[Policy]) -> int:
        """Return the most of values and what is inside calls under ``policies``, one per block."""
        recomputed = recomputed_segments(self.shape, policies)
        self._turn_to(recomputed)
        changes = self._alive
        if self.swaps:
            changes = changes.copy()
            for position, size in self._swap_changes(policies, recomputed):
                changes[position] += size
        peaks: Iterable[int] = map(operator.add, itertools.accumulate(changes), self.inside)
        return max(peaks)

    def _turn_to(self, recomputed: list[RecomputeRole | None]) -> None:
        """Replace what the last policies looked at and these do not share."""
        pairs = enumerate(zip(self._recomputed, recomputed, strict=True))
        differ = [segment for segment, (before, now) in pairs if before != now]
        groups = {id(each): each for segment in differ for each in self.groups_of.get(segment, ())}.values()
        self._add(groups, -1)
        self._recomputed = recomputed
        self._add(groups, 1)
        for segment in differ:
            role = recomputed[segment]
            if segment in self.recomputes:
                self.inside[self.recomputes[segment]] = self.inside_of[segment, role] if role is not None else 0

    def _add(self, groups: Iterable[_Group], sign: int) -> None:
        """Add, or take away, what groups change under the policies at hand."""
        for segments, lives, known in groups:
            key = tuple([self._recomputed[each] for each in segments])
            if key not in known:
                known[key] = self._changes(lives, self._recomputed)
            for position, size in known[key]:
                self._alive[position] += sign * size

    def _roles(self, segment: int) -> list[RecomputeRole]:
        return [role for role in RECOMPUTES if role in self.shape.segments[segment].calls]

    def _at(self, graph: int, position: int) -> int:
        return graph * self.behind_forward + position

    def _insides(self, profile: Profile, lowered: Lowered) -> list[int]:
        """Return what is inside the operation that follows each position."""
        found = [0] * self._at(1, len(lowered.backward) + 2)
        for graph, ops in enumerate((lowered.forward, lowered.backward)):
            for position, op in enumerate(ops):
                if op.segment >= 0:
                    found[self._at(graph, position)] = inside_bytes(self.shape, profile, op)
        return found

    def _deciding(self, life: Life) -> tuple[int, ...]:
        """Return the segments whose policies decide when a life begins and ends."""
        segments = {use.segment for use in life.uses} | ({life.segment} if life.birth in RECOMPUTES else set())
        return tuple(sorted(segments & self.recomputes.keys()))

    def _changes(self, lives: Sequence[Life], recomputed: Sequence[RecomputeRole | None]) -> _Changes:
        spans: list[_Span] = []
        for life in lives:
            if life.birth not in RECOMPUTES or life.birth == recomputed[life.segment]:
                spans += self._spans(life, recomputed)
        return self._added(spans)

    def _spans(self, life: Life, recomputed: Sequence[RecomputeRole | None]) -> list[_Span]:
        return [(*span, life.block_bytes) for span in self.places.spans(self.shape, life, recomputed)]

    def _added(self, spans: Iterable[_Span]) -> _Changes:
        found: dict[int, int] = {}
        for graph, begin, end, size in spans:
            begin, end = self._at(graph, begin), self._at(graph, end)
            found[begin] = found.get(begin, 0) + size
            found[end] = found.get(end, 0) - size
        return [(position, size) for position, size in found.items() if size]

    # ---- swapped values ------------------------------------------------------------------------------------------

    def _swap_changes(
        self, policies: Sequence[Policy], recomputed: Sequence[RecomputeRole | None]
    ) -> Iterator[tuple[int, int]]:
        plan = swap_plan(self.shape, policies, recomputed)
        for segment, lives in plan.lives.items():
            partner = plan.partner_of[segment]
            key = (segment, partner, recomputed[segment], lives)
            if key not in self._swapped:
                self._swapped[key] = self._added(self._swapped_spans(segment, partner, recomputed, lives))
            yield from self._swapped[key]

    def _swapped_spans(
        self,
        segment: int,
        partner: int,
        recomputed: Sequence[RecomputeRole | None],
        lives: Sequence[SwappedLife],
    ) -> Iterator[_Span]:
        """Yield what lives take that ``segment`` swaps, less what they would take otherwise."""
        call, (by_others, leaves, by_itself) = self.places.call, BEHIND_FORWARD
        call["swap_out", segment] = call["forward", segment] + leaves
        call["release_swapped", segment] = call["forward", partner] + (by_itself if partner == segment else by_others)
        call["reload", segment] = self._first_in_backward(partner) - 1
        for each in lives:
            life = self.shape.lives[each.number]
            for graph, begin, end, size in self._spans(life, recomputed):
                yield graph, begin, end, -size
            moved = each._replace(moved_bytes=each.moved_bytes + life.block_bytes - life.size_bytes)
            yield from self.places.swapped_spans(life, segment, life.block_bytes, moved)

    def _first_in_backward(self, segment: int) -> int:
        """Return the position of what the backward runs first of ``segment`` or those before it."""
        calls = (self.places.call.get((role, s)) for s in range(segment, -1, -1) for role in ("recompute", "backward"))
        return next(each for each in calls if each is not None)


def _with_gaps(lowered: Lowered) -> Lowered:
    """Return the operations with positions for those on swapped values."""
    forward, backward, before = [], [], -1
    for op in lowered.forward:
        forward += [op, *(GAP for _ in BEHIND_FORWARD)] if op.op == "forward" else [op]
    for op in lowered.backward:
        is_first = op.segment >= 0 and op.segment != before
        backward += [GAP, op] if is_first else [op]
        before = op.segment if op.segment >= 0 else before
    return Lowered(tuple(forward), tuple(backward))
