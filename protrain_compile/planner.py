"""Where chunks live by default, until the search exists: a simple greedy rule.

Chunks are persistent from the front while they fit into half of the free device memory, the other half being left to
activations: the first chunks are updated last in a step, where nothing is left to hide their update.
"""

from __future__ import annotations

from collections.abc import Callable

from protrain_compile.chunks import Chunk, ChunkLayout, Residency
from protrain_compile.plan import MIN_BUFFERS, Loss, Plan
from protrain_compile.program import Program
from protrain_compile.row_loop import loop_of, row_loops

DEFAULT_BUFFERS = 4
"""One more than the least, so that a copy that is late does not stop compute at once."""

SHARE_FOR_CHUNKS = 0.5
"""Of the free device memory; the rest is for activations and workspace. A guess that the search will replace."""

SLICED_LOGITS_BYTES = 256 << 20
"""Logits from this size on are sliced by default: a loop over smaller ones would save little of any device's memory."""


def choose_residency(
    layout: ChunkLayout, plan: Plan | None, free_bytes: int | None, state_bytes: Callable[[Chunk], int]
) -> tuple[Residency, ...]:
    """Return the residency of every chunk: the Plan's, or greedy.

    Args:
        layout: The chunks.
        plan: The Plan that the user gave, or None.
        free_bytes: Free device memory; None if nothing bounds it.
        state_bytes: Bytes of a chunk's states and gradients.

    Raises:
        PlanError: If the Plan is for another number of chunks.
    """
    given = plan.fit_chunks(len(layout.chunks)) if plan is not None else None
    if given is not None:
        return given
    persistent: Residency = "persistent"
    everything = (persistent,) * len(layout.chunks)
    if free_bytes is None:
        return everything
    room = int(free_bytes * SHARE_FOR_CHUNKS)
    costs = [chunk.size_bytes + state_bytes(chunk) for chunk in layout.chunks]
    if sum(costs) <= room:
        return everything
    room -= DEFAULT_BUFFERS * layout.largest_bytes
    chosen: list[Residency] = []
    for cost in costs:
        fits = cost <= room
        room -= cost if fits else 0
        chosen.append("persistent" if fits else "offloaded")
    return tuple(chosen)


def default_buffers(residency: tuple[Residency, ...]) -> int:
    """Return how many standard chunk buffers there are where nobody says: enough to copy ahead."""
    offloaded = sum(each == "offloaded" for each in residency)
    return max(MIN_BUFFERS, min(DEFAULT_BUFFERS, offloaded))


def choose_loss(program: Program, plan: Plan) -> Loss:
    """Return how the loss is computed: as the Plan says, or in slices where whole logits would be large."""
    if plan.loss is not None:
        return plan.loss
    sliced = [program.templates[program.sliced[i]] for i in set(program.template_of) if i in program.sliced]
    loops = [loop_of(node) for template in sliced for node in row_loops(template.joint.graph)]
    return "sliced" if any(loop.wide_bytes >= SLICED_LOGITS_BYTES for loop in loops) else "whole"
