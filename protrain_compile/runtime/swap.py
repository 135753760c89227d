"""Swap: the executor that moves a block's saved values to pinned host slabs and back.

One swapped block, with what orders the streams (``|`` waits)::

    forward    swap_out         d2h      | compute so far; source -> slab; records ``left``
               release_swapped  compute  | left; the sources die: the copy has read them
    backward   reload           h2d      | left, compute so far (the new memory may have had a reader); slab -> memory;
                                         records ``arrived`` and the slab's ``read``
               wait_reload      compute  | arrived; the values, rebuilt
    next use of the slab        d2h      | read

Device memory is allocated on the compute stream only, and what a copy touches is kept here until compute has waited for
it, whatever happens in between: after an exception ``settle`` lets compute wait for the copies that are under way.

The slab belongs to the handle that ``swap_out`` returns, which the forward's context keeps. When that dies (after the
backward, with an abandoned forward, after an exception) its slab goes back to the pool, so that after the first steps
nothing is allocated.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from protrain_compile.runtime.host_budget import HostBudget, HostMemoryError
from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory, Slab
from protrain_compile.runtime.streams import Event, Streams, make_streams
from protrain_compile.swap_layout import Bundle, Piece, SwapLayout, lay_out

PURPOSE = "swapped activations"


class HostPlace:
    """A slab of the pool, and the events behind which it may be read and rewritten."""

    def __init__(self, slab: Slab, streams: Streams) -> None:
        self.slab = slab
        self.made = streams.event()
        self.left = streams.event()
        self.read = streams.event()

    def bytes_of(self, bundle: Bundle) -> torch.Tensor:
        """Return a bundle's bytes in the slab."""
        return self.slab.tensor(bundle.offset, bundle.size_bytes, torch.uint8)


class Swapped:
    """A segment's values on the host: what a context keeps of them. Its death gives the slab back."""

    def __init__(self, number: int, layout: SwapLayout, place: HostPlace | None) -> None:
        self.number = number
        self.layout = layout
        self.place = place


class Reloaded:
    """A segment's values on their way back: memory for every bundle, and the event of their arrival."""

    def __init__(self, number: int, layout: SwapLayout, bundles: list[torch.Tensor], arrived: Event) -> None:
        self.number = number
        self.layout = layout
        self.bundles = bundles
        self.arrived = arrived


class SwapSpace:
    """Carries out a schedule's operations on swapped values (see ``ops.SwapOperations``).

    Attributes:
        streams: The device's streams; a prepared model's chunks use the same, so copies of one direction queue up.
        swapped_bytes: Bytes moved to the host so far.
        reloaded_bytes: Bytes moved back so far.
    """

    def __init__(
        self,
        streams: Streams,
        memory: HostMemory | None = None,
        budget: HostBudget | None = None,
        held_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Make an empty space.

        Args:
            streams: The device's streams.
            memory: Where slabs come from; default: memory of its own, pinned for a CUDA device.
            budget: Bounds on host memory; default: what is available.
            held_bytes: Says what counts against the budget already; default: what ``memory`` holds.
        """
        self.streams = streams
        own = HostMemory(CudaRegistrar() if streams.device.type == "cuda" else None)
        self._memory = memory if memory is not None else own
        self._budget = budget if budget is not None else HostBudget()
        self._held_bytes = held_bytes
        self._free: list[HostPlace] = []
        self._returned: collections.deque[HostPlace] = collections.deque()
        self._slabs: list[Slab] = []
        self._numbers = itertools.count()
        self._layouts: dict[tuple[object, ...], SwapLayout] = {}
        self._leaving: dict[int, tuple[Event, list[torch.Tensor]]] = {}
        self._arriving: dict[int, tuple[Event, list[torch.Tensor]]] = {}
        self.swapped_bytes = 0
        self.reloaded_bytes = 0
        weakref.finalize(self, streams.synchronize).atexit = False  # before slabs that a copy may use are unmapped

    # ---- operations of a schedule ----------------------------------------------------------------------------

    def swap_out(self, values: list[torch.Tensor]) -> Swapped:
        """See :meth:`protrain_compile.ops.SwapOperations.swap_out`."""
        layout = self._layout(values)
        number = next(self._numbers)
        place = self._take(layout.slab_bytes) if layout.bundles else None
        swapped = Swapped(number, layout, place)
        if place is None:
            return swapped
        weakref.finalize(swapped, self._returned.append, place).atexit = False
        sources = [self._collect(bundle, layout.pieces, values) for bundle in layout.bundles]
        self._leaving[number] = (place.left, sources)
        self.streams.record(place.made, "compute")
        self.streams.wait(place.made, "d2h")
        self.streams.wait(place.read, "d2h")
        for bundle, source in zip(layout.bundles, sources, strict=True):
            self.streams.copy(place.bytes_of(bundle), source, "d2h")
        self.streams.record(place.left, "d2h")
        self.swapped_bytes += layout.moved_bytes
        return swapped

    def release(self, swapped: Swapped) -> None:
        """See :meth:`protrain_compile.ops.SwapOperations.release`."""
        if swapped.number in self._leaving:
            left, _ = self._leaving.pop(swapped.number)
            self.streams.wait(left, "compute")

    def reload(self, swapped: Swapped) -> Reloaded:
        """See :meth:`protrain_compile.ops.SwapOperations.reload`."""
        layout, place = swapped.layout, swapped.place
        flats = [self._room(bundle) for bundle in layout.bundles]
        arrived = self.streams.event()
        reloaded = Reloaded(next(self._numbers), layout, flats, arrived)
        if place is None:
            return reloaded
        self._arriving[reloaded.number] = (arrived, flats)
        self.streams.record(arrived, "compute")
        self.streams.wait(arrived, "h2d")
        self.streams.wait(place.left, "h2d")
        for bundle, flat in zip(layout.bundles, flats, strict=True):
            self.streams.copy(flat, place.bytes_of(bundle), "h2d")
        self.streams.record(arrived, "h2d")
        self.streams.record(place.read, "h2d")
        self.reloaded_bytes += layout.moved_bytes
        return reloaded

    def wait_reload(self, reloaded: Reloaded) -> tuple[torch.Tensor, ...]:
        """See :meth:`protrain_compile.ops.SwapOperations.wait_reload`."""
        if reloaded.number in self._arriving:
            del self._arriving[reloaded.number]
            self.streams.wait(reloaded.arrived, "compute")
        flats, reloaded.bundles = reloaded.bundles, []
        return self._rebuild(reloaded.layout, flats)

    # ---- memory ------------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of all slabs, in use or free."""
        return sum(slab.size_bytes for slab in self._slabs)

    @property
    def free_slabs(self) -> int:
        """How many slabs nothing uses."""
        self._take_back()
        return len(self._free)

    @property
    def slabs(self) -> int:
        """How many slabs there are."""
        return len(self._slabs)

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Allocate what is missing for one forward that swaps ``sizes_bytes`` at once.

        Raises:
            HostMemoryError: If the host budget does not allow it; nothing is allocated then.
        """
        self._take_back()
        have = sorted(self._free, key=lambda place: place.slab.size_bytes)
        missing = []
        for size in sorted(sizes_bytes, reverse=True):
            if have and have[-1].slab.size_bytes >= size:
                have.pop()
            else:
                missing.append(size)
        if missing:
            self._make_room(sum(missing), have)
            self._free += [self._allocate(size) for size in missing]

    def _make_room(self, size_bytes: int, unused: list[HostPlace]) -> None:
        """Return if ``size_bytes`` more may be taken, after giving back ``unused`` slabs if need be."""
        while True:
            try:
                return self._budget.require(size_bytes, PURPOSE, self._held())
            except HostMemoryError:
                if not unused:
                    raise
                self._discard(unused.pop())

    def settle(self) -> None:
        """Let compute wait for every copy whose memory nothing will wait for any more, after an exception."""
        for under_way in (self._leaving, self._arriving):
            for event, _ in under_way.values():
                self.streams.wait(event, "compute")
            under_way.clear()

    def close(self) -> None:
        """Give the slabs back; values that are swapped now cannot be reloaded."""
        self.settle()
        self.streams.synchronize()
        self._free.clear()
        self._returned.clear()
        while self._slabs:
            self._slabs.pop().close()

    def _layout(self, values: list[torch.Tensor]) -> SwapLayout:
        """Return the layout of ``values``, which is the same in every step; finding it anew takes 0.2 ms."""
        pointers = [value.untyped_storage().data_ptr() for value in values]
        first: dict[int, int] = {}
        storages = [first.setdefault(pointer, number) for number, pointer in enumerate(pointers)]
        places = [(value.dtype, value.storage_offset(), value.shape, value.stride()) for value in values]
        key = (*storages, *places)
        if key not in self._layouts:
            self._layouts[key] = lay_out(values, storages)
        return self._layouts[key]

    def _held(self) -> int:
        return self._memory.held_bytes if self._held_bytes is None else self._held_bytes()

    def _take_back(self) -> None:
        # Handles die on any thread, also in the middle of this method: they only append.
        while self._returned:
            self._free.append(self._returned.popleft())

    def _take(self, size_bytes: int) -> HostPlace:
        """Return the smallest free slab that is large enough, or a new one in place of a free one."""
        self._take_back()
        fitting = [place for place in self._free if place.slab.size_bytes >= size_bytes]
        if fitting:
            best = min(fitting, key=lambda place: place.slab.size_bytes)
            self._free.remove(best)
            return best
        if self._free:
            self._discard(max(self._free, key=lambda place: place.slab.size_bytes))
        self._budget.require(size_bytes, PURPOSE, self._held())
        return self._allocate(size_bytes)

    def _allocate(self, size_bytes: int) -> HostPlace:
        slab = self._memory.allocate(size_bytes, PURPOSE)
        self._slabs.append(slab)
        return HostPlace(slab, self.streams)

    def _discard(self, place: HostPlace) -> None:
        """Give a free slab back: too small, as when sequences get longer."""
        place.left.synchronize()
        place.read.synchronize()
        self._free.remove(place)
        self._slabs.remove(place.slab)
        place.slab.close()

    # ---- on the device -----------------------------------------------------------------------------------------

    @staticmethod
    def _collect(bundle: Bundle, pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of a bundle on the device: where they lie if it is one piece, else a staging buffer."""
        views = [_storage_bytes(values[pieces[i].source], pieces[i]) for i in bundle.pieces]
        if not bundle.staged:
            return views[0]
        staging = torch.empty(bundle.size_bytes, dtype=torch.uint8, device=views[0].device)
        places = [staging[pieces[i].offset : pieces[i].offset + pieces[i].size_bytes] for i in bundle.pieces]
        torch._foreach_copy_(places, views)
        return staging

    def _room(self, bundle: Bundle) -> torch.Tensor:
        """Return new device memory for a bundle."""
        return torch.empty(bundle.size_bytes, dtype=torch.uint8, device=self.streams.device)

    def _rebuild(self, layout: SwapLayout, flats: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the values as views of the bundles' memory."""
        device = self.streams.device
        return tuple(
            torch.empty_strided(placed.shape, placed.stride, dtype=placed.dtype, device=device)
            if placed.bundle < 0
            else torch.empty(0, dtype=placed.dtype, device=device).set_(
                flats[placed.bundle].untyped_storage(), placed.offset, placed.shape, placed.stride
            )
            for placed in layout.values
        )


def make_swap_space(device: torch.device) -> SwapSpace:
    """Return a space of its own for a model on ``device`` that is not prepared."""
    return SwapSpace(make_streams(device))


def _storage_bytes(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece of the storage behind ``value`` as bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=value.device)
    return flat.set_(value.untyped_storage(), piece.start, (piece.size_bytes,), (1,))
