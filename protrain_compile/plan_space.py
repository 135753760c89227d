"""The plans that the search chooses from, and the memory of each.

Axes (DESIGN 5, Placement)::

    policies    mixes of two, the one that keeps less for the first blocks (see ``policy_mix``)
    residency   the first p chunks persistent: they are updated last in a backward, where nothing hides an update;
                the others offloaded, or all split
    buffers     from the fewest that work to as many as there are offloaded chunks

Memory is separable: ``peak = standing(residency, buffers) + values(policies)``. Values depend on the residency only
through the chunks of ``lowering.late_chunks``, of which most models have none. A Plan that the user gives in part
leaves one point on each axis that it sets.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from protrain_compile.chunks import RESIDENCIES, Residency
from protrain_compile.errors import PlanError
from protrain_compile.lowering import Choice, late_chunks, lower, recomputed_segments, skeleton
from protrain_compile.memory_model import (
    chunk_host_bytes,
    chunk_standing_bytes,
    find_peak,
    landing_bytes,
    standing_bytes,
    swapped_host_bytes,
    total,
)
from protrain_compile.plan import MIN_BUFFERS, Plan, Policy
from protrain_compile.policy_mix import mixed_policies, patterns
from protrain_compile.profile import LinkRate, Profile
from protrain_compile.roles import SWAPS, Role
from protrain_compile.shards import allowed_sharding
from protrain_compile.step_shape import ChunkShape, StepShape, block_rounded
from protrain_compile.swap_order import FARTHEST
from protrain_compile.swapped_lives import moved_bytes, swap_plan
from protrain_compile.value_peaks import ValuePeaks

Policies = tuple[Policy, ...]
Residencies = tuple[Residency, ...]


SWAP_STEPS = 12
"""How many numbers of first blocks are looked at, of deep models."""


def swap_interval(shape: StepShape, profile: Profile, swap: Policy = "swap") -> int:
    """Return the least distance of blocks with a policy at which compute hides their copies, both ways; 0 if none does.

    Copies hide behind the forwards, and on the way back the backwards, of that many blocks; the link is taken as busy
    in both directions.
    """
    everything: Policies = (swap,) * len(shape.block_names)
    swaps = swap_plan(shape, everything, recomputed_segments(shape, everything))
    costs = [profile.templates[shape.segments[i].template].parts for i in swaps.lives]
    hardware = profile.hardware
    found = 0
    ways: tuple[tuple[Role, LinkRate], ...] = (("forward", hardware.d2h), ("backward", hardware.h2d))
    for role, link in ways:
        times = [cost[role].ms for cost in costs if role in cost]
        if not times or min(times) <= 0:
            return 0
        copy_ms = max(moved_bytes(lives) for lives in swaps.lives.values()) / link.both_gb_per_s / 1e6
        found = max(found, math.ceil(copy_ms / min(times)))
    return found if found <= FARTHEST else 0


def _interleaved(blocks: int, first: int, interval: int, swap: Policy, rest: Policy, last: Policy) -> Policies:
    """Return ``last``, but for the ``first`` blocks: every ``interval``-th has ``swap``, the others have ``rest``."""
    begin = tuple(swap if i % interval == 0 else rest for i in range(first))
    return begin + (last,) * (blocks - first)


class _ChunkBytes(NamedTuple):
    """What one chunk takes: standing on the device, of a chunk buffer, on the host, and of a landing there."""

    standing: int
    buffer: int
    host: int
    landing: int

    @classmethod
    def of(cls, chunk: ChunkShape, residency: Residency) -> _ChunkBytes:
        *host, landing = chunk_host_bytes(chunk, residency)
        buffer = block_rounded(chunk.size_bytes) if chunk.moves(residency) else 0
        return cls(sum(chunk_standing_bytes(chunk, residency)), buffer, sum(host), landing)


class PlanSpace:
    """All plans that a user's Plan leaves open."""

    def __init__(self, shape: StepShape, profile: Profile, given: Plan | None = None) -> None:
        """Span the space.

        Args:
            shape: The step.
            profile: What it costs.
            given: What the user wants; None for nothing in particular.
        """
        self.shape = shape
        self.profile = profile
        self.given = given
        self.buffer_counts = functools.cache(self._buffer_counts)
        self.standing_bytes = functools.cache(self._standing_bytes)
        self.buffer_bytes = functools.cache(self._buffer_bytes)
        self.values_of = functools.cache(self._values_of)
        self._figures = functools.cache(self._figures_of)
        self.swapped_bytes = functools.cache(self._swapped_bytes)
        self._on_host = functools.cache(self._host_bytes)

    @functools.cached_property
    def policy_patterns(self) -> tuple[Policies, ...]:
        """The policies of all blocks to choose from, the most kept first."""
        given, names = self.given, self.shape.block_names
        if given is not None and (given.policies is not None or given.uniform_policy is not None):
            fitted = given.fit(names).policies
            assert fitted is not None
            return (fitted,)
        return patterns(len(names), self.mixed)

    @functools.cached_property
    def mixed(self) -> tuple[Policy, ...]:
        """The policies that the search mixes, swap left aside; the one that keeps most first."""
        return mixed_policies(self.shape, self.profile)

    @functools.cached_property
    def swap_ladders(self) -> tuple[tuple[Policies, ...], ...]:
        """More policies: every n-th of the first blocks is swapped, those between have one of the others.

        The blocks behind have the neighbour that keeps more (see ``policy_mix``). ``swap_products`` moves less than
        ``swap``, so more blocks can; it is left out where both are carried out alike. One block closer than compute
        hides is tried, too: the interval is rounded up.
        Up a ladder more is swapped: it takes less memory and more time. They are tried on the best plan without swap;
        none where the user gave policies or nothing hides the copies.
        """
        given, names = self.given, self.shape.block_names
        if given is not None and (given.policies or given.uniform_policy):
            return ()
        firsts = [*range(1, len(names), max(1, len(names) // SWAP_STEPS)), len(names)]
        behind = (self.mixed[0], *self.mixed[:-1])
        found: dict[tuple[Policies, ...], None] = {}
        for swap in self._swaps():
            least = swap_interval(self.shape, self.profile, swap)
            intervals = range(least, max(least - 2, 0), -1)
            for interval, (rest, last) in itertools.product(intervals, zip(self.mixed, behind, strict=True)):
                ladder = (_interleaved(len(names), first, interval, swap, rest, last) for first in firsts)
                found[tuple(dict.fromkeys(ladder))] = None
        return tuple(found)

    def _swaps(self) -> tuple[Policy, ...]:
        """Return the policies that swap and differ."""
        found: tuple[Policy, ...] = ("swap", "swap_products")
        is_recomputed = any(each.recompute_of.get("swap_products") for each in self.shape.segments)
        return found if is_recomputed else found[:1]

    @functools.cached_property
    def residencies(self) -> tuple[Residencies, ...]:
        """The residencies of all chunks to choose from."""
        count = len(self.shape.chunks)
        fixed = self.given.fit_chunks(count) if self.given is not None else None
        if fixed is not None:
            return (fixed,)
        resident: Residency = "persistent"
        rests: tuple[Residency, ...] = ("offloaded", "split")
        partly = [(resident,) * p + (rest,) * (count - p) for p in range(count) for rest in rests]
        found = (*partly, (resident,) * count)
        given = self.given.sharding if self.given is not None else None
        if given is None:
            return found
        return tuple(each for each in found if tuple(map(allowed_sharding, each, given)) == given)

    def _buffer_counts(self, residency: Residencies) -> range:
        """Return the numbers of buffers to choose from; none where the given number is too small."""
        fewest = self._fewest_buffers(residency)
        if self.given is not None and self.given.buffers is not None:
            return range(self.given.buffers, self.given.buffers + 1) if self.given.buffers >= fewest else range(0)
        moving = sum([each.buffer > 0 for each in self._figures(residency)])
        return range(fewest, max(fewest, moving) + 1)

    def _fewest_buffers(self, residency: Residencies) -> int:
        """Return how many buffers there must be at least: three, or more where one call uses many chunks."""
        chunks = self.shape.chunks
        most = max((sum(chunks[c].is_fetched(residency[c]) for c in each) for each in self._many_at_once), default=0)
        # One call's chunks and one that takes gradients are all that is in use at once.
        if most < MIN_BUFFERS:
            return MIN_BUFFERS
        return next(count for count in range(MIN_BUFFERS, len(residency) + 2) if self._works(residency, count))

    @functools.cached_property
    def _many_at_once(self) -> set[tuple[int, ...]]:
        """The chunks of calls that may need more than the least buffers."""
        calls = (call for segment in self.shape.segments for call in segment.calls.values())
        return {call.chunks for call in calls if len(call.chunks) >= MIN_BUFFERS}

    def _works(self, residency: Residencies, buffers: int) -> bool:
        try:
            for policies in (self.policy_patterns[0], self.policy_patterns[-1]):
                lower(self.shape, Choice(policies, residency, buffers))
        except PlanError:
            return False
        return True

    # ---- memory --------------------------------------------------------------------------------------------------

    def peak_bytes(self, choice: Choice) -> int:
        """Return the most device memory that is allocated at once; what ``cost_model.simulate`` finds, faster."""
        values = self.values_of(choice.policies, self.late_of(choice.residency))
        return self.standing_bytes(choice.residency) + choice.buffers * self.buffer_bytes(choice.residency) + values

    def _standing_bytes(self, residency: Residencies) -> int:
        """Return the device bytes that are always taken, buffers apart."""
        return self._held_bytes + sum([each.standing for each in self._figures(residency)])

    @functools.cached_property
    def _held_bytes(self) -> int:
        """Device bytes that are always taken and not for chunks."""
        return total(standing_bytes(dataclasses.replace(self.shape, chunks=()), Choice((), (), 0)))

    def _buffer_bytes(self, residency: Residencies) -> int:
        """Return the bytes of one standard chunk buffer."""
        return max([each.buffer for each in self._figures(residency)], default=0)

    def _figures_of(self, residency: Residencies) -> list[_ChunkBytes]:
        """Return the bytes of each chunk."""
        return [known[each] for known, each in zip(self._chunk_bytes, residency, strict=True)]

    @functools.cached_property
    def _chunk_bytes(self) -> list[dict[Residency, _ChunkBytes]]:
        return [{each: _ChunkBytes.of(chunk, each) for each in RESIDENCIES} for chunk in self.shape.chunks]

    def late_of(self, residency: Residencies) -> tuple[bool, ...]:
        """Return what values depend on of a residency: whether each of ``late_chunks`` is persistent."""
        return tuple([residency[chunk] == "persistent" for chunk in self._late])

    @functools.cached_property
    def _late(self) -> tuple[int, ...]:
        return late_chunks(self.shape)

    def _values_of(self, policies: Policies, late: tuple[bool, ...]) -> int:
        """Return the most of values and what is inside calls; ``late`` is from ``late_of``."""
        if not late and (self._value_peaks.swaps or set(SWAPS).isdisjoint(policies)):
            return self._value_peaks.bytes_of(policies)
        residency: list[Residency] = ["persistent"] * len(self.shape.chunks)
        for chunk, resident in zip(self._late, late, strict=True):
            residency[chunk] = "persistent" if resident else "offloaded"
        choice = Choice(policies, tuple(residency), MIN_BUFFERS)
        return find_peak(self.shape, self.profile, choice, skeleton(self.shape, policies, residency)).bytes

    @functools.cached_property
    def _value_peaks(self) -> ValuePeaks:
        swaps = all("forward" in each.calls for each in self.shape.segments)
        return ValuePeaks(self.shape, self.profile, swaps=swaps)

    def host_bytes(self, residency: Residencies, policies: Policies) -> int:
        """Return the host bytes of a residency and policies."""
        return self._on_host(residency) + self.swapped_bytes(policies)

    def _host_bytes(self, residency: Residencies) -> int:
        figures = self._figures(residency)
        return sum([each.host for each in figures]) + landing_bytes(self.shape, [each.landing for each in figures])

    def _swapped_bytes(self, policies: Policies) -> int:
        """Return the host bytes of what policies swap."""
        return total(swapped_host_bytes(self.shape, policies))

    # ---- all of it -----------------------------------------------------------------------------------------------

    def choices(self) -> Iterator[Choice]:
        """Yield every choice."""
        for policies in self.policy_patterns:
            for residency in self.residencies:
                for buffers in self.buffer_counts(residency):
                    yield Choice(policies, residency, buffers)

    def plan(self, choice: Choice) -> Plan:
        """Return a choice as a Plan."""
        prepared = bool(self.shape.chunks)
        plan = dataclasses.replace(
            self.given or Plan(),
            policies=choice.policies,
            uniform_policy=None,
            blocks=self.shape.block_names,
            residency=choice.residency if prepared else None,
            uniform_residency=None,
            buffers=choice.buffers if prepared else None,
        )
        if self.shape.world.size == 1 or not prepared:
            return plan
        wanted = [chunk.sharding or "parameters" for chunk in self.shape.chunks]
        sharding = tuple(map(allowed_sharding, choice.residency, wanted))
        return dataclasses.replace(plan, sharding=sharding, uniform_sharding=None)
