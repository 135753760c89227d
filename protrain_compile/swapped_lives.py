"""What a plan swaps, on numbers: pass offload_activations restated for lowering and the memory model.

A segment swaps the storages that leave the forward for its backward alone; see the pass for the reasons. With
``swap_products`` these are fewer, as its recompute makes the others again, and some of them are free behind that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protrain_compile.plan import Policy
from protrain_compile.roles import SWAPS, RecomputeRole, Role
from protrain_compile.step_shape import Life, StepShape
from protrain_compile.swap_order import partners


class SwappedLife(NamedTuple):
    """A life that is swapped.

    Attributes:
        number: Its position in ``StepShape.lives``.
        moved_bytes: What crosses the link, each way.
        staged: Whether it does so through a staging buffer.
        last: The call behind which its memory is free when it has come back. What is staged comes back together.
    """

    number: int
    moved_bytes: int
    staged: bool
    last: Role


@dataclasses.dataclass(frozen=True)
class SwapPlan:
    """What is swapped.

    Attributes:
        lives: By the segment that swaps them.
        partner_of: See ``swap_order.partners``.
    """

    lives: dict[int, tuple[SwappedLife, ...]]
    partner_of: dict[int, int]

    def segment_of(self) -> dict[int, tuple[int, SwappedLife]]:
        """Return the segment that swaps each life, and how; by the life's number."""
        return {life.number: (segment, life) for segment, lives in self.lives.items() for life in lives}


NOTHING = SwapPlan({}, {})


def swap_plan(shape: StepShape, policies: Sequence[Policy], recomputed: Sequence[RecomputeRole | None]) -> SwapPlan:
    """Return what ``policies`` (one per block) swap."""
    if set(SWAPS).isdisjoint(policies) or not shape.differentiable:
        return NOTHING
    of_segments = [policies[each.block] if each.block >= 0 else "keep" for each in shape.segments]
    swaps = [each in SWAPS for each in of_segments]
    candidates = {number for segment in itertools.compress(shape.swappable, swaps) for number in segment}
    found: dict[int, list[SwappedLife]] = {}
    for number in sorted(candidates):
        life = shape.lives[number]
        reader = _only_reader(life, recomputed)
        if reader is None or not swaps[reader[0]] or life.segment > reader[0]:
            continue
        kept = recomputed[reader[0]] is None
        moved, staged = (life.swapped_bytes, life.staged) if kept else (life.products_bytes, life.products_staged)
        if moved:
            found.setdefault(reader[0], []).append(SwappedLife(number, moved, staged, reader[1]))
    lives = {segment: _together(found[segment]) for segment in sorted(found)}
    return SwapPlan(lives, partners([p if i in lives else "keep" for i, p in enumerate(of_segments)]))


def moved_bytes(lives: Iterable[SwappedLife]) -> int:
    """Return the bytes of one copy of ``lives``."""
    return sum(life.moved_bytes for life in lives)


def _together(lives: Sequence[SwappedLife]) -> tuple[SwappedLife, ...]:
    """Return the lives of one segment; those that are staged share memory, which is free behind the last use."""
    late = any(life.staged and life.last == "backward" for life in lives)
    return tuple(life._replace(last="backward") if late and life.staged else life for life in lives)


def _only_reader(life: Life, recomputed: Sequence[RecomputeRole | None]) -> tuple[int, Role] | None:
    """Return the one segment whose part of the backward takes a life, and its last call that does; or None."""
    found = None
    for use in life.uses:
        role = use.last(recomputed[use.segment])
        if role is not None:
            if found is not None:
                return None
            found = use.segment, role
    return found
