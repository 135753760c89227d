"""StepShape: all that planning needs to know of one program and its chunks, as plain numbers.

Nothing in it depends on the plan. What does is written down for every choice: a storage lists its uses under each
policy of the segment that uses it, a call the chunks that it reads. Only what ranks divide is fixed before: ``divided``
makes the shape as one rank of a world has it. ``lowering`` turns a StepShape and a Plan into
operations, ``memory_model`` and ``timeline`` into bytes and times. ``shape_reader`` makes it from a Program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from protrain_compile import json_data
from protrain_compile.chunks import Residency
from protrain_compile.profile import Format
from protrain_compile.roles import RecomputeRole, Role
from protrain_compile.shards import ALONE, Sharding, World

BLOCK_BYTES = 512
"""The caching allocator rounds every allocation up to a multiple of this."""
SEGMENT_BYTES = 2 << 20
"""It takes memory for large allocations from the device in multiples of this,"""
LARGE_BYTES = 10 << 20
"""large being this and more."""

UpdateMode = Literal["in_backward", "at_step"]
Birth = Literal["snapshot", "forward", "recompute", "recompute_products", "recompute_pointwise", "tangent", "backward"]
"""The operation that makes a storage; a tangent is handed over by autograd, with the backward."""


@dataclasses.dataclass(frozen=True)
class CallShape:
    """One part of a template, as one segment calls it.

    Attributes:
        chunks: The chunks whose parameters it reads, in the order of its arguments.
        returned_bytes: New memory that it returns, rounded to allocator blocks; what is dropped at once included.
    """

    chunks: tuple[int, ...]
    returned_bytes: int


@dataclasses.dataclass(frozen=True)
class SegmentShape:
    """One segment.

    Attributes:
        name: What messages call it, such as ``block 3``.
        block: Which block it is, counted from 0; -1 for what is no block.
        template: Its template, by position in ``Program.templates``.
        calls: Its calls.
        recompute_of: Of a block: by which of its calls each policy recomputes it; under the others it is kept.
    """

    name: str
    block: int
    template: int
    calls: Mapping[Role, CallShape]
    recompute_of: Mapping[str, RecomputeRole] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Use:
    """That a segment's backward or recompute takes a storage.

    Attributes:
        segment: The segment.
        kept: The last of its calls that takes it while the segment is kept, or None.
        recompute: The same while it is recomputed by the call of this name.
        recompute_products: Likewise.
        recompute_pointwise: Likewise.
    """

    segment: int
    kept: Role | None = None
    recompute: Role | None = None
    recompute_products: Role | None = None
    recompute_pointwise: Role | None = None

    def last(self, by: RecomputeRole | None) -> Role | None:
        """Return the last call that takes it while the segment is recomputed ``by`` a call, or kept (None)."""
        found: Role | None = self.kept if by is None else getattr(self, by)
        return found


@dataclasses.dataclass(frozen=True)
class Life:
    """Storages that are made, used and freed together.

    Attributes:
        birth: What makes them.
        segment: The segment that does; of a snapshot or tangent: 0 or the last one.
        forward_until: The last segment whose forward takes them; the number of segments for forward outputs; -1 for
            none.
        uses: What takes them in the backward, by ascending segment: the first that applies is the last in time.
        collects: Chunks whose ``collect`` takes them.
        returned: Whether they live until the backward is over: what leaves it, what autograd holds, and outputs that
            are no scalars, as the caller of ``out = model(...); out.loss.backward()`` holds them.
        size_bytes: Their bytes.
        block_bytes: Their bytes, each rounded up to the allocator's blocks.
        segment_bytes: Their bytes, large ones rounded up to what the allocator takes from the device.
        swapped_bytes: What crosses the link where they are swapped; 0 for what cannot be.
        staged: Whether they cross it through a staging buffer (see ``swap_layout``).
        products_bytes: As ``swapped_bytes``, where their reader is recomputed behind it (``swap_products``).
        products_staged: As ``staged``, there.
    """

    birth: Birth
    segment: int
    forward_until: int
    uses: tuple[Use, ...]
    collects: tuple[int, ...]
    returned: bool
    size_bytes: int
    block_bytes: int
    segment_bytes: int
    swapped_bytes: int = 0
    staged: bool = False
    products_bytes: int = 0
    products_staged: bool = False


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """One chunk.

    Attributes:
        size_bytes: Its parameters, as they travel.
        numel: Its elements, as far as this rank updates them.
        trainable: Whether it is updated.
        format: How its states are stored.
        companion_bytes: What completes its parameters to fp32 masters.
        moment_bytes: Its moments.
        gradient_bytes: Its gradient storage while it is persistent.
        accumulator_bytes: What gradients wait and add up in on the host, beyond their landing: over micro-batches, and
            in the first step, whose updates come after its backward.
        last_gradient: The segment whose backward makes the last of its gradients; -1 for none.
        last_item: Which of that backward's results it is.
        order: Its place among the chunks that this program updates; -1 for none.
        ranks: How many ranks divide it. Elements, states, gradient and accumulator are then one rank's.
        sharding: What of it they divide where it is persistent; None for one rank.
    """

    size_bytes: int
    numel: int
    trainable: bool
    format: Format
    companion_bytes: int = 0
    moment_bytes: int = 0
    gradient_bytes: int = 0
    accumulator_bytes: int = 0
    last_gradient: int = -1
    last_item: int = 0
    order: int = -1
    ranks: int = 1
    sharding: Sharding | None = None

    @property
    def shard_bytes(self) -> int:
        """What of its parameters lies in its home, and crosses the link: all, or one rank's shard."""
        return self.size_bytes // self.ranks

    @property
    def whole_gradient_bytes(self) -> int:
        """Device bytes of its whole gradient, where it is persistent and only its states are divided."""
        return self.gradient_bytes * self.ranks if self.sharding == "states" else 0

    def stays(self, residency: Residency) -> bool:
        """Whether its whole parameters stay on the device: it takes no chunk buffer to use them."""
        return residency == "persistent" and self.sharding != "parameters"

    def is_fetched(self, residency: Residency) -> bool:
        """Whether it takes a chunk buffer of standard size while it is used."""
        return residency != "split" and not self.stays(residency)

    def keeps_gradient(self, residency: Residency) -> bool:
        """Whether the device has storage for its whole gradient: it takes no chunk buffer to collect it."""
        return residency == "persistent" and self.sharding in (None, "states")

    def moves(self, residency: Residency) -> bool:
        """Whether it, or its gradient, takes a chunk buffer of standard size."""
        collects = residency == "persistent" and self.trainable and not self.keeps_gradient(residency)
        return collects or self.is_fetched(residency)

    @property
    def updated(self) -> bool:
        """Whether this program makes a gradient of it."""
        return self.order >= 0

    @property
    def state_bytes(self) -> int:
        """Its states beside parameters and gradients."""
        return self.companion_bytes + self.moment_bytes


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One training step (or, without a backward, one evaluation).

    Attributes:
        name: The model's class name.
        block_names: Module paths of the blocks.
        segments: In execution order.
        chunks: In first-use order; none for a model that is not prepared.
        lives: The memory of values between calls; every snapshot (a copy that the forward makes of an input to which it
            gives a new value) by itself.
        held_bytes: What the caller holds throughout, by kind: parameters (unmanaged), buffers, inputs.
        differentiable: Whether there is a backward.
        update_mode: When chunks are updated.
        landings: How many landing slots for gradients the host has; 0 for one to each chunk.
        clips: Whether ``step()`` waits for the gradient's norm.
        micro_batches: How many backwards make a step.
        world: The ranks that train the model.
    """

    name: str
    block_names: tuple[str, ...]
    segments: tuple[SegmentShape, ...]
    chunks: tuple[ChunkShape, ...]
    lives: tuple[Life, ...]
    held_bytes: Mapping[str, int]
    differentiable: bool = True
    update_mode: UpdateMode = "in_backward"
    landings: int = 4
    clips: bool = False
    micro_batches: int = 1
    world: World = ALONE

    @property
    def blocks(self) -> tuple[int, ...]:
        """The segments that are blocks."""
        return tuple(i for i, segment in enumerate(self.segments) if segment.block >= 0)

    @functools.cached_property
    def swappable(self) -> tuple[tuple[int, ...], ...]:
        """By the segment whose backward takes them: the lives that may leave for the host before, whatever the plan."""
        end = len(self.segments)
        found: list[list[int]] = [[] for _ in self.segments]
        for number, life in enumerate(self.lives):
            stays = life.forward_until >= end or life.returned or life.collects
            if life.birth in ("forward", "snapshot") and (life.swapped_bytes or life.products_bytes) and not stays:
                for use in life.uses:
                    found[use.segment].append(number)
        return tuple(map(tuple, found))

    def largest_bytes(self, residency: tuple[Residency, ...]) -> int:
        """Return the size of a standard chunk buffer: that of the largest chunk which takes one."""
        sizes = (c.size_bytes for c, each in zip(self.chunks, residency, strict=True) if c.moves(each))
        return max(sizes, default=0)

    def to_json(self) -> str:
        """Return the StepShape as JSON text."""
        return json_data.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> StepShape:
        """Return what ``to_json`` wrote; ProfileError, naming the field, if it is not one."""
        return json_data.from_json(cls, text, "step shape")


def block_rounded(size_bytes: int) -> int:
    """Return the bytes of the allocator's block for an allocation."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def segment_rounded(size_bytes: int) -> int:
    """Return the device bytes that an allocation takes at least: large ones have memory of their own."""
    step = SEGMENT_BYTES if size_bytes >= LARGE_BYTES else BLOCK_BYTES
    return -(-size_bytes // step) * step
