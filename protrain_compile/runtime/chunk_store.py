"""The chunk store: where every chunk's parameters, states and gradients lie, and how values get in and out.

=============  ===========================================  ==============================================
residency      device                                       host
=============  ===========================================  ==============================================
persistent     parameters, states, gradient storage         nothing
offloaded      nothing of its own (chunk buffers)           parameters (pinned), states
split          a buffer of its own (see the residency)      parameters (pinned), states
=============  ===========================================  ==============================================

Only what crosses the link is pinned: parameters and gradient landings. A trainable bf16 parameter takes 12 bytes: bf16
and the remainder of its fp32 master, and two moments. Frozen chunks have no states and no gradients. Landings for
gradients are a few slots that the updates empty in turn, or one for each chunk when gradients must wait on the host for
``step()`` (clipping); gradients that must wait beyond their landing add up in accumulators, which are pageable and made
when needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from protrain_compile.chunks import Chunk, ChunkLayout, Residency
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory, Slab, layout_offsets
from protrain_compile.updates.definition import UpdateKind
from protrain_compile.updates.formats import ChunkStates, StateFormat

MOMENTS = ("moment1", "moment2", "moment2_max")


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """What the store has to hold.

    Attributes:
        layout: The chunks.
        residency: Per chunk.
        kinds: Per chunk, the update formulas of its parameters; None for a frozen chunk.
        device: Where persistent chunks and buffers are.
        landings: How many landing slots there are for gradients; 0 gives every chunk one of its own.
        gradient_dtype: Data type in which gradients add up; None for the chunk's own.
    """

    layout: ChunkLayout
    residency: tuple[Residency, ...]
    kinds: tuple[UpdateKind | None, ...]
    device: torch.device
    landings: int
    gradient_dtype: torch.dtype | None = None

    def host_chunks(self) -> list[Chunk]:
        """Return the chunks whose parameters lie on the host."""
        return [chunk for chunk in self.layout.chunks if self.residency[chunk.index] != "persistent"]

    def pinned_parts(self) -> list[int]:
        """Bytes of each pinned part: parameters of the host chunks, then landings."""
        host = self.host_chunks()
        return [chunk.size_bytes for chunk in host] + self.landing_bytes()

    def landing_bytes(self) -> list[int]:
        """Bytes of each landing: its chunk's, or, of shared slots, the largest chunks' (a long one costs one)."""
        trainable = [chunk.size_bytes for chunk in self.host_chunks() if chunk.trainable]
        return sorted(trainable, reverse=True)[: self.landings] if self.landings else trainable

    def companion_parts(self, chunk: Chunk) -> dict[str, torch.dtype]:
        """Return the data type of what completes a trainable chunk's parameters to fp32 masters, if anything."""
        dtype = StateFormat.of(chunk.dtype).companion_dtype if chunk.trainable else None
        return {} if dtype is None else {"companion": dtype}

    def moment_parts(self, chunk: Chunk) -> dict[str, torch.dtype]:
        """Return the data type of each moment of a chunk."""
        kind = self.kinds[chunk.index]
        return {} if kind is None else {name: torch.float32 for name in MOMENTS if getattr(kind, f"has_{name}")}

    def sizes_of(self, parts: Callable[[Chunk], dict[str, torch.dtype]]) -> list[int]:
        """Return the bytes of the host chunks' companions or moments, in order."""
        return [chunk.numel * dtype.itemsize for chunk in self.host_chunks() for dtype in parts(chunk).values()]

    def host_bytes(self) -> int:
        """Host bytes that the store allocates at once: all but accumulators."""
        return self.packing_bytes() + layout_offsets(self.sizes_of(self.moment_parts))[1]

    def packing_bytes(self) -> int:
        """Those that it allocates while the originals of the parameters are still alive: all but moments."""
        parts = (self.pinned_parts(), self.sizes_of(self.companion_parts))
        return sum(layout_offsets(each)[1] for each in parts)

    def accumulator_bytes(self) -> int:
        """Host bytes of gradients that wait beyond their landing, if every chunk's does: so in the first step, too."""
        if not self.landings:
            return 0
        chunks = [chunk for chunk in self.host_chunks() if chunk.trainable]
        return sum(chunk.numel * (self.gradient_dtype or chunk.dtype).itemsize for chunk in chunks)

    def most_host_bytes(self) -> int:
        """Host bytes at most, accumulators included."""
        return self.host_bytes() + self.accumulator_bytes()


class ChunkStore:
    """Allocates what a StoreSpec says, and reads and writes parameters and states by slot.

    Moments come last (``add_moments``): the originals of the parameters are freed before, so that both are never alive.
    """

    def __init__(self, spec: StoreSpec, budget: HostBudget, memory: HostMemory | None = None) -> None:
        """Allocate parameters and gradients.

        Raises:
            HostMemoryError: If the host budget is too small; nothing is allocated then.
        """
        self.spec = spec
        self.pinned = memory if memory is not None else _pinned_memory(spec.device)
        self.pageable = HostMemory()
        budget.require(spec.most_host_bytes(), "the states of the model")
        self.parameters: list[torch.Tensor] = []
        self.states: dict[int, ChunkStates] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.accumulators: dict[int, torch.Tensor] = {}
        self._accumulator_slabs: dict[int, Slab] = {}
        self._landing_slabs: dict[int, Slab] = {}
        pinned = HostParts(self.pinned, spec.pinned_parts(), "chunk parameters and gradients")
        self.parameters = [self._allocate(chunk, pinned) for chunk in spec.layout.chunks]
        self.landings = pinned.remaining()
        companions = HostParts(self.pageable, spec.sizes_of(spec.companion_parts), "fp32 masters")
        for chunk in spec.layout.chunks:
            if chunk.trainable:
                made = self._make(chunk, spec.companion_parts(chunk), companions)
                self.states[chunk.index] = ChunkStates(self.parameters[chunk.index], **made)

    def held_bytes(self) -> int:
        """Return the host bytes that the store holds, swapped values in its pinned memory included."""
        return self.pinned.held_bytes + self.pageable.held_bytes

    def add_moments(self) -> None:
        """Allocate the moments, all or (if an error is raised) none."""
        pageable = HostParts(self.pageable, self.spec.sizes_of(self.spec.moment_parts), "optimizer states")
        completed = {}
        try:
            for index, states in self.states.items():
                chunk = self.spec.layout.chunks[index]
                made = self._make(chunk, self.spec.moment_parts(chunk), pageable)
                completed[index] = dataclasses.replace(states, **made)
        except BaseException:
            pageable.close()
            raise
        self.states.update(completed)

    def _allocate(self, chunk: Chunk, pinned: HostParts) -> torch.Tensor:
        """Return the flat home of a chunk's parameters."""
        if self.spec.residency[chunk.index] != "persistent":
            return pinned.take(chunk.numel, chunk.dtype)
        parameters = torch.zeros(chunk.numel, dtype=chunk.dtype, device=self.spec.device)
        if chunk.trainable:
            self.gradients[chunk.index] = torch.zeros_like(parameters, dtype=self.spec.gradient_dtype or chunk.dtype)
        return parameters

    def _make(self, chunk: Chunk, parts: dict[str, torch.dtype], host: HostParts) -> dict[str, torch.Tensor]:
        """Return zeros for each of a chunk's ``parts`` where the chunk lies."""
        if self.spec.residency[chunk.index] != "persistent":
            return {name: host.take(chunk.numel, dtype) for name, dtype in parts.items()}
        return {name: torch.zeros(chunk.numel, dtype=dtype, device=self.spec.device) for name, dtype in parts.items()}

    def landing(self, chunk: int, turn: int) -> tuple[int, torch.Tensor]:
        """Return the landing for a chunk's gradient and its number; ``turn`` counts the offloads so far."""
        layout = self.spec.layout.chunks
        if self.spec.landings:
            large_enough = sum(flat.nbytes >= layout[chunk].size_bytes for flat in self.landings)  # the first ones
            number = turn % large_enough
        else:
            number = sum(c.trainable and c.index < chunk for c in self.spec.host_chunks())
        flat = self.landings[number]
        numel, dtype = layout[chunk].numel, layout[chunk].dtype
        return number, flat[: numel * dtype.itemsize].view(dtype)

    def accumulator(self, chunk: int) -> torch.Tensor:
        """Return a host chunk's gradient accumulator; it is made when first asked for."""
        if chunk not in self.accumulators:
            layout = self.spec.layout.chunks[chunk]
            dtype = self.spec.gradient_dtype or layout.dtype
            slab = self.pageable.allocate(layout.numel * dtype.itemsize, "gradient accumulation")
            self._accumulator_slabs[chunk] = slab
            self.accumulators[chunk] = slab.tensor(0, layout.numel, dtype)
        return self.accumulators[chunk]

    def renew_gradient(self, chunk: int) -> None:
        """Leave a chunk's gradient to whoever refers to its memory: the next one has other memory."""
        if chunk in self.gradients:
            self.gradients[chunk] = torch.zeros_like(self.gradients[chunk])
        elif chunk in self.accumulators:
            del self.accumulators[chunk]
            self._accumulator_slabs.pop(chunk).close()
        if chunk not in self.gradients and not self.spec.landings:
            number, landing = self.landing(chunk, 0)
            slab = self.pinned.allocate(landing.nbytes, "gradients")
            self.landings[number] = slab.tensor(0, landing.nbytes, torch.uint8)
            before, self._landing_slabs[number] = self._landing_slabs.get(number), slab
            if before is not None:
                before.close()

    def drop_accumulators(self) -> None:
        """Give the accumulators' memory back."""
        self.accumulators.clear()
        for slab in self._accumulator_slabs.values():
            slab.close()
        self._accumulator_slabs.clear()

    def slot_range(self, parameter: int) -> tuple[int, slice]:
        """Return the chunk of a parameter and its elements there."""
        chunk, number = self.spec.layout.place_of[parameter]
        slot = self.spec.layout.chunks[chunk].slots[number]
        return chunk, slice(slot.offset, slot.offset + slot.numel)

    def read(self, parameter: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's value as a fresh tensor where its chunk lies, exact in ``dtype``."""
        # Copied last: a view would be refused by autograd where a parameter is not.
        return self.whole(parameter, self._read_here(parameter, dtype)).to(dtype, copy=True)

    def _read_here(self, parameter: int, dtype: torch.dtype) -> torch.Tensor:
        chunk, where = self.slot_range(parameter)
        states = self.states.get(chunk)
        if states is None or states.companion is None or dtype == states.param.dtype:
            return self.parameters[chunk][where]
        return states.narrow(where.start, where.stop).load_master()

    def whole(self, parameter: int, part: torch.Tensor) -> torch.Tensor:
        """Return a flat part of something of a parameter as the whole, in the parameter's shape: all lies here."""
        return part.view(self.spec.layout.parameters[parameter].shape)

    def part_here(self, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """Return, flat, what of a parameter's ``value`` (or gradient, or moment) lies here: all of it."""
        return value.detach().reshape(-1)

    def write(self, parameter: int, value: torch.Tensor) -> None:
        """Set a parameter and its fp32 master to ``value``.

        A 16-bit value that a parameter has already leaves its master as it is: a model and its optimizer may be loaded
        in either order.
        """
        chunk, where = self.slot_range(parameter)
        flat = self.part_here(parameter, value)
        states = self.states.get(chunk)
        if states is None or states.companion is None:
            self.parameters[chunk][where].copy_(flat)
            return
        part = states.narrow(where.start, where.stop)
        flat = flat.to(part.param.device)
        master = flat.float()
        if flat.dtype == part.param.dtype:
            master = torch.where(flat == part.param, part.load_master(), master)
        part.store_master(master)

    def has_companion(self, parameter: int) -> bool:
        """Whether a parameter has an fp32 master besides its value."""
        states = self.states.get(self.slot_range(parameter)[0])
        return states is not None and states.companion is not None

    def refine(self, parameter: int, master: torch.Tensor) -> None:
        """Set a parameter's fp32 master where it rounds to the parameter's present value."""
        chunk, where = self.slot_range(parameter)
        part = self.states[chunk].narrow(where.start, where.stop)
        wanted = self.part_here(parameter, master).to(part.param.device, torch.float32)
        before = part.param.clone()
        part.store_master(wanted)
        part.store_master(torch.where(part.param == before, wanted, before.float()))

    def _moment_here(self, parameter: int, name: str) -> torch.Tensor | None:
        chunk, where = self.slot_range(parameter)
        tensor: torch.Tensor | None = getattr(self.states[chunk], name) if chunk in self.states else None
        return None if tensor is None else tensor[where]

    def read_moment(self, parameter: int, name: str) -> torch.Tensor | None:
        """Return one moment of a parameter, a fresh tensor on the host; None if its update keeps none."""
        part = self._moment_here(parameter, name)
        return None if part is None else self.whole(parameter, part.clone()).cpu()

    def write_moment(self, parameter: int, name: str, value: torch.Tensor | None) -> None:
        """Set one moment of a parameter, if its update keeps it; None stands for zero."""
        part = self._moment_here(parameter, name)
        if part is None:
            return
        if value is None:
            part.zero_()
        else:
            part.copy_(self.part_here(parameter, value))

    def close(self) -> None:
        """Give all host memory back as soon as no tensor refers to it, the last made first."""
        self.drop_accumulators()
        self.parameters.clear()
        self.states.clear()
        self.landings = []
        self.gradients.clear()
        self.pageable.close()
        self.pinned.close()


def _pinned_memory(device: torch.device) -> HostMemory:
    return HostMemory(CudaRegistrar() if device.type == "cuda" else None)


class HostParts:
    """One slab given out in aligned parts, in order."""

    def __init__(self, memory: HostMemory, sizes: Sequence[int], purpose: str) -> None:
        self._sizes = list(sizes)
        self._offsets, total = layout_offsets(self._sizes)
        self._slab = memory.allocate(total, purpose) if total else None
        self._next = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next part as ``count`` elements of ``dtype``."""
        assert self._slab is not None
        assert count * dtype.itemsize == self._sizes[self._next]
        tensor = self._slab.tensor(self._offsets[self._next], count, dtype)
        self._next += 1
        return tensor

    def close(self) -> None:
        """Give the slab back as soon as no tensor refers to it."""
        if self._slab is not None:
            self._slab.close()

    def remaining(self) -> list[torch.Tensor]:
        """Return the parts not taken yet, as bytes."""
        if self._slab is None:
            return []
        return [self.take(self._sizes[self._next], torch.uint8) for _ in range(len(self._sizes) - self._next)]
