"""Which policies of blocks are worth mixing, and how: kept bytes against time.

Give all blocks one policy: what then lies between forward and backward, and what is computed again, is a point. The
policies that the search mixes are those on the lower convex hull of the points::

    time  recompute
          |  .
          |     recompute_products
          |           .                       above the line between its neighbours: not offered
          |               recompute_pointwise
          |                              .  keep
          +------------------------------------ bytes

The least time for given bytes is then had by two neighbours on the hull, as in any such choice of fractions; with whole
blocks, up to one block. So a pattern gives the first blocks one policy and the others its neighbour that keeps more:
what is kept last is needed first. Policies that are carried out alike for every template are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from protrain_compile.lowering import kept_until, recomputed_segments
from protrain_compile.plan import Policy
from protrain_compile.profile import Profile
from protrain_compile.roles import RECOMPUTES, RecomputeRole
from protrain_compile.step_shape import StepShape

Point = tuple[int, float]
"""Bytes kept between forward and backward, and ms of recomputing, with one policy for all blocks."""


def mixed_policies(shape: StepShape, profile: Profile) -> tuple[Policy, ...]:
    """Return the policies worth mixing, from keep to the one that keeps least."""
    everything: tuple[Policy, ...] = ("keep", *RECOMPUTES)
    points: dict[Policy, Point] = {}
    seen = set()
    for policy in everything:
        recomputed = tuple(recomputed_segments(shape, (policy,) * len(shape.block_names)))
        if recomputed not in seen:
            seen.add(recomputed)
            points[policy] = _point(shape, profile, recomputed)
    order = ("keep", *reversed(RECOMPUTES))
    return _hull({policy: points[policy] for policy in order if policy in points})


def patterns(blocks: int, policies: Sequence[Policy]) -> tuple[tuple[Policy, ...], ...]:
    """Return the mixes of neighbours among ``policies`` over that many blocks, the most kept first."""
    found = [(policies[0],) * blocks]
    for more, less in itertools.pairwise(policies):
        found += [(less,) * first + (more,) * (blocks - first) for first in range(1, blocks + 1)]
    return tuple(found)


def _point(shape: StepShape, profile: Profile, recomputed: Sequence[RecomputeRole | None]) -> Point:
    lives = (life for life in shape.lives if life.birth in ("forward", "snapshot"))
    kept = sum(life.block_bytes for life in lives if kept_until(life, recomputed) is not None)
    ms = 0.0
    for segment, role in zip(shape.segments, recomputed, strict=True):
        cost = profile.templates[segment.template].parts.get(role) if role is not None else None
        ms += cost.ms if cost is not None else 0.0
    return kept, ms


def _hull(points: dict[Policy, Point]) -> tuple[Policy, ...]:
    """Return the policies on the lower convex hull; the first and the last stay in any case."""
    found: list[Policy] = []
    last = list(points)[-1]
    for policy, point in points.items():
        if policy != last and found and not _saves_more(points[found[0]], point, points[last]):
            continue
        while len(found) > 1 and not _saves_more(points[found[-2]], points[found[-1]], point):
            found.pop()
        found.append(policy)
    return tuple(found)


def _saves_more(start: Point, middle: Point, end: Point) -> bool:
    """Whether ``middle`` lies below the line from ``start`` to ``end``, and between them."""
    (most, least_ms), (bytes_, ms), (least, most_ms) = start, middle, end
    below = (ms - least_ms) * (most - least) < (most_ms - least_ms) * (most - bytes_)
    return below and least < bytes_ < most
