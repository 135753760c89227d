"""Packing: what the first call of a prepared model decides, once: its chunks, where they live, their host memory.

``decide`` is the only place where that is decided, from what the call's graph uses, the Plan and the budgets;
``ManagedModel`` carries it out (allocates the store, moves the originals in).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from passes.pack_chunks import pack_chunks
from protrain_compile.chunks import Chunk, ChunkLayout, ParameterSpec, Residency
from protrain_compile.plan import Plan
from protrain_compile.planner import choose_residency, default_buffers
from protrain_compile.runtime.chunk_store import StoreSpec
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.runtime.ranks import Ranks
from protrain_compile.runtime.sharded_store import Division
from protrain_compile.shape_reader import Training
from protrain_compile.sharding_rule import choose_sharding, device_bytes
from protrain_compile.shards import ALONE, Sharding, allowed_sharding
from protrain_compile.update_book import UpdateBook

LANDINGS = 4
"""Landing slots for gradients where updates empty them in turn: one arriving, one being used, two to smooth the
pace."""


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What the user said to ``prepare``.

    Attributes:
        device: Where the model computes.
        memory_budget: Device bytes allowed; None for what is free.
        host_budget: Bounds on host memory.
        micro_batches: Most backwards before a step.
        accumulation_dtype: Data type in which the gradients of several declared backwards add up: fp32, or bf16 for the
            chunk's own.
        max_grad_norm: Clipping; None for none declared.
        plan: The plan to follow, or None.
        ranks: The ranks that share the model; None for one.
    """

    device: torch.device
    memory_budget: int | None
    host_budget: HostBudget
    micro_batches: int
    max_grad_norm: float | None
    plan: Plan | None
    accumulation_dtype: torch.dtype = torch.float32
    ranks: Ranks | None = None

    def host_free_bytes(self, held_bytes: int = 0) -> int | None:
        """Return the host memory that this rank may take now; None where nothing bounds it.

        Args:
            held_bytes: What the model holds there already.
        """
        sharers = 1 if self.ranks is None else self.ranks.world.node_ranks
        return self.host_budget.available_bytes(held_bytes, sharers)

    def free_bytes(self) -> int | None:
        """Return the device memory that may be used now, the least of all ranks; None where nothing bounds it."""
        here = self._free_here()
        return here if self.ranks is None else self.ranks.least(here, "the free device memory")

    def _free_here(self) -> int | None:
        if self.memory_budget is not None:
            return self.memory_budget
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.mem_get_info(self.device)[0])


@dataclasses.dataclass(frozen=True)
class Packing:
    """What was decided.

    Attributes:
        spec: What the chunk store has to hold.
        buffers: How many standard chunk buffers there are.
        division: How the chunks are divided, where ranks share them; ``spec`` is then about this rank's shards.
    """

    spec: StoreSpec
    buffers: int
    division: Division | None = None

    @property
    def layout(self) -> ChunkLayout:
        """The whole chunks."""
        return self.spec.layout if self.division is None else self.division.layout


def decide(
    specs: Sequence[ParameterSpec],
    first_uses: Sequence[Sequence[int]],
    read_as: Mapping[int, torch.dtype],
    plan: Plan,
    preparation: Preparation,
    book: UpdateBook,
) -> Packing:
    """Return how a model is packed.

    Args:
        specs: All parameters of the model, in module order.
        first_uses: Per segment of the call's graph, in execution order, the parameters that it uses (by index).
        read_as: Data type in which the graph reads a parameter; chunks hold it so.
        plan: The plan to follow.
        preparation: What the user said.
        book: Which update every parameter gets.

    Raises:
        PlanError: If the plan is for another number of chunks.
    """
    ranks = preparation.ranks
    layout = lay_out(specs, first_uses, read_as, plan.chunk_bytes, 1 if ranks is None else ranks.size)
    residency, wish = where_chunks_live(layout, plan, preparation, book)
    division, sharding = None, None
    if wish is not None:
        sharding = plan.fit_sharding(residency) or tuple(allowed_sharding(each, wish) for each in residency)
        division = Division(layout, sharding)
    spec = store_spec(layout, residency, preparation, book, hoisted=_is_hoisted(layout, specs))
    return Packing(spec, plan.buffers or default_buffers(residency, sharding), division)


def lay_out(
    specs: Sequence[ParameterSpec],
    first_uses: Sequence[Sequence[int]],
    read_as: Mapping[int, torch.dtype],
    chunk_bytes: int | None = None,
    ranks: int = 1,
) -> ChunkLayout:
    """Return the chunks of a model, which hold parameters as the graph reads them; see ``decide``."""
    travelling = [dataclasses.replace(spec, dtype=read_as.get(index, spec.dtype)) for index, spec in enumerate(specs)]
    return pack_chunks(travelling, first_uses, chunk_bytes, ranks)


def where_chunks_live(
    layout: ChunkLayout, plan: Plan, preparation: Preparation, book: UpdateBook
) -> tuple[tuple[Residency, ...], Sharding | None]:
    """Return the residency of every chunk, and what ranks that share them should divide of the persistent ones."""
    free_bytes, ranks = preparation.free_bytes(), preparation.ranks
    if ranks is None:
        return choose_residency(layout, plan, free_bytes, book.state_bytes), None
    accumulates = preparation.micro_batches > 1
    wish = plan.uniform_sharding or choose_sharding(
        layout, ranks.size, free_bytes, book.state_bytes, accumulates=accumulates
    )

    def bytes_beside(chunk: Chunk) -> int:
        return device_bytes(chunk, book.state_bytes(chunk), wish, ranks.size) - chunk.size_bytes

    return choose_residency(layout, plan, free_bytes, bytes_beside), wish


def training_of(
    layout: ChunkLayout,
    places: Mapping[int, int],
    specs: Sequence[ParameterSpec],
    preparation: Preparation,
    book: UpdateBook,
) -> Training:
    """Return how a model of these chunks trains, for planning.

    Args:
        layout: The chunks.
        places: Index of the managed parameter, by position among the graph's inputs.
        specs: All parameters of the model, as the user has them.
        preparation: What the user said.
        book: Which update every parameter gets.
    """
    ranks = preparation.ranks
    offloaded: Residency = "offloaded"
    residency = (offloaded,) * len(layout.chunks)
    spec = store_spec(layout, residency, preparation, book, hoisted=_is_hoisted(layout, specs))
    waits = preparation.max_grad_norm is not None
    half = any(each.trainable and each.dtype == torch.float16 for each in specs)
    return Training(
        layout=layout,
        place_of={position: layout.place_of[index] for position, index in places.items()},
        moments=tuple(len(spec.moment_parts(chunk)) for chunk in layout.chunks),
        update_mode="at_step" if waits or half else "in_backward",
        landings=spec.landings,
        clips=waits,
        gradient_dtype=spec.gradient_dtype,
        micro_batches=preparation.micro_batches,
        world=ALONE if ranks is None else ranks.world,
    )


def _is_hoisted(layout: ChunkLayout, specs: Sequence[ParameterSpec]) -> bool:
    """Whether a chunk holds a parameter in another type than the user has it in."""
    return any(ours.dtype != theirs.dtype for ours, theirs in zip(layout.parameters, specs, strict=True))


def store_spec(
    layout: ChunkLayout,
    residency: tuple[Residency, ...],
    preparation: Preparation,
    book: UpdateBook,
    *,
    hoisted: bool = False,
) -> StoreSpec:
    """Return what a store has to hold for chunks that live so: of this rank's shards, where ranks share them.

    Gradients of 16-bit chunks that wait beyond their landing add up in ``accumulation_dtype`` where several backwards
    before a step were declared, else in their own type, as in eager. Those of ``hoisted`` casts are fp32 parameters'.
    """
    ranks = preparation.ranks
    host = sum(chunk.trainable and residency[chunk.index] != "persistent" for chunk in layout.chunks)
    own_landings = preparation.max_grad_norm is not None and preparation.micro_batches == 1
    adds_up = preparation.micro_batches > 1 and preparation.accumulation_dtype == torch.float32
    return StoreSpec(
        layout=layout if ranks is None else layout.shard(ranks.rank, ranks.size),
        residency=residency,
        kinds=tuple(book.kind_of_chunk(chunk) for chunk in layout.chunks),
        device=preparation.device,
        landings=0 if own_landings else min(LANDINGS, host),
        gradient_dtype=torch.float32 if adds_up or hoisted else None,
    )
