"""ManagedModel: the parameters that ``prepare`` took over, from recording them to training from chunks.

Life of a parameter::

    prepare            storage emptied; the original ("source") is kept aside, on the host
    first compiled call   ``packing`` lays chunks out, the stores are allocated, sources copied and freed in turn
    training           the value lies in its chunk (see ``residency``)

Everything that a user can do to a parameter arrives here as a read, a write, or a gradient access, before and after
packing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from protrain_compile.chunks import ChunkBinding, ChunkLayout, ParameterSpec
from protrain_compile.errors import DoorError
from protrain_compile.guards import manage, release
from protrain_compile.packing import Packing, Preparation, decide
from protrain_compile.plan import Plan
from protrain_compile.residency import ChunkResidency, SegmentsOf
from protrain_compile.runtime.agreement import Agreement
from protrain_compile.runtime.chunk_store import ChunkStore
from protrain_compile.runtime.host_worker import HostWorker
from protrain_compile.runtime.sharded_store import ShardedStore
from protrain_compile.runtime.streams import make_streams
from protrain_compile.runtime.swap import SwapSpace
from protrain_compile.sharded_residency import ShardedResidency
from protrain_compile.shards import Sharding
from protrain_compile.shared_gradients import SharedGradients
from protrain_compile.sizes import size_bytes
from protrain_compile.update_book import UpdateBook
from protrain_compile.update_guard import UpdateGuard
from protrain_compile.updates.definition import Segment
from protrain_compile.waiting_gradients import (
    WaitingGradients,
    forget_outside_gradients,
    no_gradient_waits,
    refuse_outside_gradients,
)

log = logging.getLogger("protrain_compile.managed")


class ManagedModel:
    """Owner of a prepared model's parameters, states and gradients."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], book: UpdateBook, preparation: Preparation) -> None:
        """Record ``named`` parameters and empty their storage on the device; nothing is packed yet."""
        self.preparation = preparation
        self.agreement = Agreement(preparation.ranks)
        self.book = book
        self.specs = tuple(ParameterSpec.of(name, parameter) for name, parameter in named)
        self.layout: ChunkLayout | None = None
        self.residency: ChunkResidency | None = None
        self.swap: SwapSpace | None = None
        self.snapshot_depth = 0
        self.gradients: WaitingGradients | None = None
        self.versions: list[int] = []
        self.buffers = 0
        self._owner = os.getpid()
        self.guard = UpdateGuard(
            clips=preparation.max_grad_norm is not None,
            micro_batches=preparation.micro_batches,
            half=any(spec.trainable and spec.dtype == torch.float16 for spec in self.specs),
        )
        self._waiting_forwards: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sources: list[torch.Tensor | None] = []
        self._moved_in = False
        self.parameters = [weakref.ref(parameter) for _, parameter in named]
        for index, (_, parameter) in enumerate(named):
            self._sources.append(parameter.detach())
            parameter.data = _empty_like(parameter, preparation.device)
            manage(parameter, self, index)

    def hand_back(self) -> None:
        """Undo what making this did, before anything is packed: plain parameters hold their values again."""
        assert self.layout is None
        for reference, source in zip(self.parameters, self._sources, strict=True):
            parameter = reference()
            if parameter is not None and source is not None:
                release(parameter, source)

    @property
    def sharding(self) -> tuple[Sharding, ...] | None:
        """What ranks divide of each packed chunk; None where one rank has the model."""
        return self.residency.store.division.sharding if isinstance(self.residency, ShardedResidency) else None

    def source_device(self, index: int) -> torch.device:
        """Return where a parameter was before anything is packed."""
        source = self._sources[index]
        assert source is not None
        return source.device

    # ---- packing and binding -----------------------------------------------------------------------------------

    def bind(
        self,
        places: Mapping[int, int],
        first_uses: Sequence[Sequence[int]],
        plan: Plan,
        read_as: Mapping[int, torch.dtype],
    ) -> ChunkBinding:
        """Return how a call's parameters lie in chunks; the first call packs them.

        Args:
            places: Index of the managed parameter, by position among the call's arguments.
            first_uses: Positions that each segment uses, in execution order.
            plan: The plan to follow; its residency counts for the first call.
            read_as: Data type in which the graph reads each of the positions.
        """
        with torch.inference_mode(False), torch.no_grad():  # what an evaluation allocates, training writes
            if self.residency is None:
                self._allocate(
                    [[places[i] for i in used if i in places] for used in first_uses],
                    plan,
                    {places[i]: dtype for i, dtype in read_as.items()},
                )
            if not self._moved_in:
                self._move_in(self.packed.store)
        assert self.layout is not None
        assert self.residency is not None
        spec, ranks = self.residency.store.spec, self.preparation.ranks
        place_of = {position: self.layout.place_of[index] for position, index in places.items()}
        chunks = self.layout.chunks
        gathered = frozenset(i for i, (chunk, _) in place_of.items() if chunks[chunk].dtype != read_as[i])
        return ChunkBinding(
            self.layout,
            spec.residency,
            self.buffers,
            place_of,
            gathered,
            ranks=1 if ranks is None else ranks.size,
            sharding=self.sharding,
        )

    def _allocate(self, first_uses: Sequence[Sequence[int]], plan: Plan, read_as: dict[int, torch.dtype]) -> None:
        """Decide how the model is packed, and allocate all but moments; an error leaves everything as it was."""
        packing = decide(self.specs, first_uses, read_as, plan, self.preparation, self.book)
        versions = [0] * len(packing.layout.chunks)
        with contextlib.ExitStack() as undo:
            residency = self._make_residency(packing, versions, undo)
            undo.pop_all()
        self.layout, self.buffers, self.versions = packing.layout, packing.buffers, versions
        self.residency = residency
        if isinstance(residency, ShardedResidency):
            self.gradients = SharedGradients(self.specs, self.parameters, residency, self.guard)
        else:
            self.gradients = WaitingGradients(self.specs, self.parameters, residency, self.guard)

    def _make_residency(
        self, packing: Packing, versions: list[int], undo: contextlib.ExitStack
    ) -> ChunkResidency | ShardedResidency:
        preparation, spec = self.preparation, packing.spec
        segments_of = _segments_of(self.book, versions, spec.layout)
        measures_norms = preparation.max_grad_norm is not None
        store = ChunkStore(spec, preparation.host_budget) if packing.division is None else self._make_shards(packing)
        undo.callback(store.close)
        worker = HostWorker()
        undo.callback(worker.close)
        streams, buffers = make_streams(preparation.device), packing.buffers
        if isinstance(store, ShardedStore):
            return ShardedResidency(store, streams, worker, buffers, segments_of, measures_norms=measures_norms)
        return ChunkResidency(store, streams, worker, buffers, segments_of, measures_norms=measures_norms)

    def _make_shards(self, packing: Packing) -> ShardedStore:
        assert packing.division is not None
        assert self.preparation.ranks is not None
        return ShardedStore(packing.spec, packing.division, self.preparation.ranks, self.preparation.host_budget)

    def unpacked_bytes(self) -> int:
        """Return the device bytes that originals take which are not packed yet."""
        device = self.preparation.device
        return size_bytes(source for source in self._sources if source is not None and source.device == device)

    def _move_in(self, store: ChunkStore) -> None:
        """Write the originals into their chunks, freeing each, then the optimizer's states.

        If it breaks off, every value is in one of the two places, can be read there, and the next call goes on.
        """
        for slot in (slot for chunk in store.spec.layout.chunks for slot in chunk.slots):
            source = self._sources[slot.parameter]
            if source is not None:
                store.write(slot.parameter, source)
                self._sources[slot.parameter] = source = None
        store.add_moments()
        self.book.install(store)
        self._moved_in = True
        self.values_changed()
        log.info("packed %d parameters into %d chunks", len(self.specs), len(store.spec.layout.chunks))

    def _check_process(self) -> None:
        """Refuse a forked child: it has inherited neither the host's chunks nor the thread that updates them."""
        if os.getpid() != self._owner and self.residency is not None:
            raise DoorError(
                "this process was forked from the one that trains the prepared model, whose chunks and host updates "
                "are not inherited: use the model in that process, or give this one a state_dict() (or start it with "
                "the spawn method)"
            )

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Check that a forward may run."""
        self._check_process()
        self.snapshot_depth = 0
        self.guard.before_forward()

    def opened(self, context: Any) -> None:
        """Note a forward that waits for its backward."""
        self._waiting_forwards.add(context)

    def begin_backward(self, context: Any, *, keep: bool) -> None:
        """Decide when the chunks of this backward are updated."""
        self._check_process()
        residency = self.packed
        self._check_accumulates(context)
        self._waiting_forwards.discard(context)
        alone = not keep and all(each.consumed for each in self._waiting_forwards)
        assert self.gradients is not None
        self.gradients.take_back()
        waiting = bool(residency.pending)
        mode = self.guard.mode_of_backward(alone=alone, waiting=waiting, rules=self.book.rules())
        residency.begin_backward(mode, last=not self.guard.expects_more)
        if mode == "in_backward" and not waiting and self.preparation.micro_batches == 1:
            residency.release_accumulators()

    def _check_accumulates(self, context: Any) -> None:
        """Refuse ``torch.autograd.grad``, which must not touch any ``.grad``, and ``backward(inputs=...)``."""
        assert self.layout is not None
        for chunk, slot in context.schedule.chunks.place_of.values():
            index = self.layout.chunks[chunk].slots[slot].parameter
            parameter = self.parameters[index]()
            if self.specs[index].trainable and parameter is not None and not _accumulates(parameter):
                raise DoorError(
                    "torch.autograd.grad or backward(inputs=...) through the compiled model: the gradient of "
                    f"{self.specs[index].name} would be used for an update all the same; call loss.backward(), or "
                    "use a model without prepare"
                )

    def backward_raised(self) -> None:
        """Note that a backward broke off."""
        trainable = sum(chunk.trainable for chunk in self.packed.store.spec.layout.chunks)
        self.guard.broke_off(len(self.packed.updated) / max(1, trainable))

    def step(self) -> None:
        """Do what ``optimizer.step()`` has to do: run the updates that wait, or confirm those that ran."""
        if self.residency is None or self.gradients is None:
            refuse_outside_gradients(self.specs, self.parameters)
            return
        self._check_process()
        self.residency.worker.check()
        self.gradients.complete()
        self.guard.before_step(self.book.rules(), waiting=bool(self.residency.pending))
        multiplier = self._clipping(self.residency)
        with self.gradients.leaving_to_holders():
            for chunk in sorted(self.residency.pending):
                self.residency.apply(chunk, multiplier)
        self.residency.updated.clear()

    def _clipping(self, residency: ChunkResidency) -> float:
        """Return what ``clip_grad_norm_`` would multiply the gradients by."""
        limit = self.preparation.max_grad_norm
        if limit is None or limit == float("inf") or not residency.pending:
            return 1.0
        coefficient = limit / (residency.gradient_norm(exact=self.guard.gradients_were_read) + 1e-6)
        return 1.0 if coefficient > 1.0 else coefficient

    @property
    def packed(self) -> ChunkResidency:
        """The residency, once the model has run."""
        assert self.residency is not None
        return self.residency

    def swap_space(self) -> SwapSpace:
        """Return where swapped blocks' values go: on the streams of the chunks, within the host budget."""
        if self.swap is None:
            store, budget = self.packed.store, self.preparation.host_budget
            self.swap = SwapSpace(self.packed.streams, store.pinned, budget, store.held_bytes)
        return self.swap

    def swap_room_bytes(self) -> int | None:
        """Return the host bytes that swapped values may take, those that they have included; None without a bound."""
        free = self.preparation.host_free_bytes(self.packed.store.held_bytes())
        return free if free is None or self.swap is None else free + self.swap.host_bytes

    def zero_grad(self, *, to_none: bool = True) -> None:
        """Forget the gradients that wait; unless ``to_none``, zeros take their place, as in eager."""
        self.guard.before_zero_grad()
        forget_outside_gradients(self.parameters)
        if self.gradients is not None:
            self.gradients.drop(to_none=to_none)

    # ---- doors ---------------------------------------------------------------------------------------------------

    def name_of(self, index: int) -> str:
        """Return a parameter's name."""
        return self.specs[index].name

    def may_travel(self, index: int) -> bool:
        """Whether a chunk may hold a parameter as 16 bits: the master of a trainable one keeps the exact value."""
        if self.layout is not None:
            chunk, _ = self.layout.place_of[index]
            return self.specs[index].trainable and self.layout.chunks[chunk].dtype != self.specs[index].dtype
        return self.specs[index].trainable

    def read(self, index: int) -> torch.Tensor:
        """Return a parameter's newest value, a fresh tensor: on the model's device, or on the host for a state dict."""
        spec = self.specs[index]
        source = self._sources[index]
        if source is None:
            self._check_process()
            assert self.residency is not None
            chunk, _ = self.residency.store.slot_range(index)
            self.residency.settle(chunk)
            source = self.residency.store.read(index, spec.dtype)
        else:
            source = source.clone()
        return source.cpu() if self.snapshots else source.to(self.preparation.device)

    def write(self, index: int, value: torch.Tensor) -> None:
        """Set a parameter's value.

        Raises:
            DoorError: If the shape differs.
        """
        spec = self.specs[index]
        if tuple(value.shape) != spec.shape:
            raise DoorError(
                f"{spec.name} has the shape {spec.shape}; a value of shape {tuple(value.shape)} does not fit"
            )
        source = self._sources[index]
        if source is not None:
            source.copy_(value.detach())
            return
        self._check_process()
        assert self.residency is not None
        chunk, _ = self.residency.store.slot_range(index)
        self.residency.worker.drain()
        self.residency.streams.synchronize()
        self.residency.store.write(index, value)
        self.residency.written(chunk)
        self.versions[chunk] += 1

    def gradient(self, index: int) -> torch.Tensor | None:
        """Return a view of the gradient that waits for ``step()``, or None."""
        self._check_process()
        return None if self.gradients is None else self.gradients.get(index)

    def set_gradient(self, index: int, value: torch.Tensor | None) -> None:
        """Replace or drop the gradient that waits for ``step()``.

        Raises:
            DoorError: If no gradient waits, or the value does not fit.
        """
        if self.gradients is not None:
            self.gradients.replace(index, value)
        elif value is not None:
            raise no_gradient_waits(self.specs[index].name)

    def check_trainable(self, index: int, trainable: bool) -> None:
        """Refuse to freeze or unfreeze a parameter: chunks and their states are laid out once.

        Raises:
            DoorError: If that would change anything.
        """
        spec = self.specs[index]
        if trainable != spec.trainable:
            raise DoorError(
                f"requires_grad of {spec.name} cannot change after prepare, which lays out states for trainable "
                "parameters only: call requires_grad_() on the model before calling prepare"
            )

    @property
    def snapshots(self) -> bool:
        """Whether a state dict is being made: detached values are then plain tensors on the host."""
        return self.snapshot_depth > 0

    def settled_store(self) -> ChunkStore | None:
        """Return the store once every update has run; None before everything has moved in."""
        if self.residency is None or not self._moved_in:
            return None
        self._check_process()
        self.residency.worker.drain()
        return self.residency.store

    def values_changed(self) -> None:
        """Note that parameters were written in their homes."""
        if self.residency is not None:
            for chunk in range(len(self.versions)):
                self.residency.written(chunk)

    def close(self) -> None:
        """End the worker and give all memory back; parameters cannot be read afterwards."""
        if self.swap is not None:
            self.swap.close()
        if self.residency is not None:
            self.residency.close()


def _segments_of(book: UpdateBook, versions: list[int], layout: ChunkLayout) -> SegmentsOf:
    # Holds what it needs and not the ManagedModel: no reference cycle keeps a dropped model's memory.
    def segments(chunk: int, slots: Sequence[int], multiplier: float) -> list[Segment]:
        versions[chunk] += 1
        return book.segments(layout.chunks[chunk], slots, multiplier)

    return segments


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the running backward adds to ``parameter.grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the parameter is an input of torch.autograd.grad
        return False


def _empty_like(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Return a tensor that looks like ``parameter`` on ``device`` and takes no memory there."""
    like = torch.empty(0, dtype=parameter.dtype, device=device)
    like.set_(like.untyped_storage(), 0, parameter.shape, _contiguous_strides(parameter.shape))
    like.untyped_storage().resize_(0)
    return like


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = list(itertools.accumulate((max(1, size) for size in reversed(shape)), lambda a, b: a * b, initial=1))
    return tuple(reversed(strides[:-1])) if shape else ()
