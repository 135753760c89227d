"""Where the copies of swapped blocks end and start. One pure function, for the schedule and for its simulation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from protrain_compile.roles import SWAPS

FARTHEST = 6
"""Segments. A block of width h saves about 30 h bytes a token and computes 24 h^2 operations a token in its forward:
at h = 4096, 50 GB/s and 500 TFLOPS it takes three forwards to hide its copy, at h = 2048 six; half as many backwards.
"""


def partners(policies: Sequence[str]) -> dict[int, int]:
    """Return the partner of every swapped segment: what its copies must hide behind.

    A segment's values must have left when its partner's forward has run, and start to come back before its partner's
    backward does. The partner is the next swapped segment, but at most ``FARTHEST`` away: so that at most two segments'
    values are on the device at once, and copies have the compute between them to hide behind. The last one's is as far
    away as its predecessor (alone, as ``FARTHEST``), never beyond the last segment::

        policies   keep swap keep recompute swap keep keep
        partners        1->4                4->6
    """
    swapped = [index for index, policy in enumerate(policies) if policy in SWAPS]
    found = {}
    distance = FARTHEST
    for index, following in itertools.zip_longest(swapped, swapped[1:]):
        distance = distance if following is None else min(following - index, FARTHEST)
        found[index] = min(index + distance, len(policies) - 1)
    return found
