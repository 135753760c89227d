"""What a plan swaps, on numbers: pass offload_activations restated for lowering and the memory model.

A segment swaps the storages that leave the forward for its backward alone; see the pass for the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protrain_compile.plan import Policy
from protrain_compile.roles import RecomputeRole
from protrain_compile.step_shape import Life, StepShape
from protrain_compile.swap_order import partners


@dataclasses.dataclass(frozen=True)
class SwapPlan:
    """What is swapped.

    Attributes:
        lives: Positions in ``StepShape.lives``, by the segment that swaps them.
        partner_of: See ``swap_order.partners``.
    """

    lives: dict[int, tuple[int, ...]]
    partner_of: dict[int, int]

    def segment_of(self) -> dict[int, int]:
        """Return the segment that swaps each life."""
        return {life: segment for segment, lives in self.lives.items() for life in lives}


NOTHING = SwapPlan({}, {})


def swap_plan(shape: StepShape, policies: Sequence[Policy], recomputed: Sequence[RecomputeRole | None]) -> SwapPlan:
    """Return what ``policies`` (one per block) swap."""
    if "swap" not in policies or not shape.differentiable:
        return NOTHING
    of_segments = [policies[each.block] if each.block >= 0 else "keep" for each in shape.segments]
    found: dict[int, list[int]] = {}
    for number, life in enumerate(shape.lives):
        segment = _only_reader(life, recomputed)
        if segment is not None and of_segments[segment] == "swap" and _can_leave(shape, life, segment):
            found.setdefault(segment, []).append(number)
    lives = {segment: tuple(found[segment]) for segment in sorted(found)}
    return SwapPlan(lives, partners([p if i in lives else "keep" for i, p in enumerate(of_segments)]))


def moved_bytes(shape: StepShape, lives: Sequence[int]) -> int:
    """Return the bytes of one copy of ``lives``."""
    return sum(shape.lives[number].swapped_bytes for number in lives)


def _only_reader(life: Life, recomputed: Sequence[RecomputeRole | None]) -> int | None:
    """Return the one segment whose part of the backward takes a life, or None."""
    readers = {use.segment for use in life.uses if use.last(recomputed[use.segment])}
    return readers.pop() if len(readers) == 1 else None


def _can_leave(shape: StepShape, life: Life, segment: int) -> bool:
    return (
        life.birth in ("forward", "snapshot")
        and life.swapped_bytes > 0
        and life.segment <= segment
        and life.forward_until < len(shape.segments)
        and not life.returned
        and not life.collects
    )
