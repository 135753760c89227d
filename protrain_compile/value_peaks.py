"""Peaks of values under many policies of one shape: what ``memory_model.find_peak`` finds, from parts that repeat.

When a value is born and freed depends only on the policies of the few segments that make and use it. So lives are
grouped by these segments, and each group has one list of changes for each combination of their policies. Positions are
the same for all: those of the step in which every block is recomputed, of which a kept block leaves its recompute out;
whichever recompute a block has, it is at the same place.
The changes of all groups add up to the bytes alive at every position.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

from protrain_compile.lowering import Lowered, Op, recomputed_segments, skeleton
from protrain_compile.memory_model import Places, inside_bytes
from protrain_compile.plan import Policy
from protrain_compile.profile import Profile
from protrain_compile.roles import RECOMPUTES, RecomputeRole
from protrain_compile.step_shape import Life, StepShape

_Changes = list[tuple[int, int]]
"""Positions, and bytes that are more from there on."""
_Recomputed = tuple[RecomputeRole | None, ...]


class ValuePeaks:
    """Peaks for one shape in which no chunk is read late (see ``lowering.late_chunks``) and nothing is swapped."""

    def __init__(self, shape: StepShape, profile: Profile) -> None:
        recompute: Policy = "recompute"
        lowered = skeleton(shape, [recompute] * len(shape.block_names), ["persistent"] * len(shape.chunks))
        self.shape = shape
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
        groups: dict[tuple[int, ...], list[Life]] = {}
        for life in shape.lives:
            groups.setdefault(self._deciding(life), []).append(life)
        self.groups: list[tuple[tuple[int, ...], list[Life], dict[_Recomputed, _Changes]]]
        self.groups = [(segments, lives, {}) for segments, lives in groups.items()]

    def bytes_of(self, policies: Sequence[Policy]) -> int:
        """Return the most of values and what is inside calls under ``policies``, one per block."""
        recomputed = recomputed_segments(self.shape, policies)
        changes = [0] * len(self.inside)
        for segments, lives, known in self.groups:
            key = tuple([recomputed[each] for each in segments])
            if key not in known:
                known[key] = self._changes(lives, recomputed)
            for position, size in known[key]:
                changes[position] += size
        inside = self.inside.copy()
        for segment, position in self.recomputes.items():
            role = recomputed[segment]
            inside[position] = self.inside_of[segment, role] if role is not None else 0
        peaks: Iterable[int] = map(operator.add, itertools.accumulate(changes), inside)
        return max(peaks)

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
        found: dict[int, int] = {}
        for life in lives:
            if life.birth in RECOMPUTES and life.birth != recomputed[life.segment]:
                continue
            for graph, begin, end in self.places.spans(self.shape, life, recomputed):
                for position, size in ((begin, life.block_bytes), (end, -life.block_bytes)):
                    at = self._at(graph, position)
                    found[at] = found.get(at, 0) + size
        return [(position, size) for position, size in found.items() if size]
