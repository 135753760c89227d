"""How the saved values of one segment lie in a host slab: what is copied, in how many copies, and how it is rebuilt.

Values are views of storages, and several may view one. What is copied is the stretches (*pieces*) of storages that the
values cover, each once, bit by bit::

    q, k, v = qkv.unbind(2)     # three views of one storage     -> one piece
    x.expand(8, -1, -1)         # covers the bytes of x          -> one piece, of x's bytes

Pieces travel in *bundles*, one copy each. A large piece is a bundle of its own, copied from where it lies and reloaded
to memory of its own, which dies at its last use. Small pieces share one bundle, through a staging buffer. A value is
rebuilt in its bundle's memory with its shape and strides.

Works on real and on fake values alike; of symbolic sizes the traced ones count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from protrain_compile.sizes import hint

SMALL_BYTES = 4 << 20
"""Pieces below this share a bundle: a copy of 4 MiB takes 0.08 ms at 50 GB/s, about ten times what its launch takes."""
ALIGNMENT_BYTES = 256
"""Of pieces in a bundle and bundles in a slab; a multiple of every element's size."""
_START_BYTES = 16
"""Pieces start at a multiple of this in their storage, so that values keep the alignment that kernels rely on."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes ``[start, end)`` of the storage behind value number ``source``, which lie at ``offset`` in ``bundle``."""

    source: int
    start: int
    end: int
    bundle: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """How many bytes it covers."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where a value lies: its bundle (-1 for a value without bytes), and its offset there in elements."""

    bundle: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One copy: ``size_bytes`` at ``offset`` in the slab, holding ``pieces``; small ones through a staging buffer."""

    offset: int
    size_bytes: int
    pieces: tuple[int, ...]
    staged: bool


@dataclasses.dataclass(frozen=True)
class SwapLayout:
    """The pieces, the values in the order in which they were given, and the bundles of one segment."""

    pieces: tuple[Piece, ...]
    values: tuple[Placed, ...]
    bundles: tuple[Bundle, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the link, one way."""
        return sum(bundle.size_bytes for bundle in self.bundles)

    @property
    def slab_bytes(self) -> int:
        """Bytes of host memory."""
        return max((bundle.offset + align(bundle.size_bytes) for bundle in self.bundles), default=0)


def lay_out(values: Sequence[torch.Tensor], storages: Sequence[Hashable]) -> SwapLayout:
    """Return the layout of ``values``; ``storages`` names the storage behind each."""
    stretches = [_stretch(value) for value in values]
    merged, piece_of = _merge(stretches, storages)
    pieces, bundles = _bundle(merged)
    placed = []
    for value, (start, end), number in zip(values, stretches, piece_of, strict=True):
        bundle, offset = -1, 0
        if end > start:
            piece = pieces[number]
            bundle, offset = piece.bundle, (piece.offset + start - piece.start) // value.dtype.itemsize
        shape, stride = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
        placed.append(Placed(bundle, offset, value.dtype, shape, stride))
    return SwapLayout(pieces, tuple(placed), bundles)


def _stretch(value: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a value covers, as ``[start, end)``."""
    shape = [hint(size) for size in value.shape]
    start = hint(value.storage_offset())
    if 0 in shape:
        return 0, 0
    last = start + sum((size - 1) * hint(step) for size, step in zip(shape, value.stride(), strict=True))
    return start * value.dtype.itemsize, (last + 1) * value.dtype.itemsize


def _merge(
    stretches: Sequence[tuple[int, int]], storages: Sequence[Hashable]
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Join stretches of one storage that overlap or touch.

    Returns:
        ``(source, start, end)`` of every piece, and the piece of every value (-1 for one without bytes).
    """
    merged: list[tuple[int, int, int]] = []
    piece_of = [-1] * len(stretches)
    names = {storage: number for number, storage in reversed(list(enumerate(storages)))}
    order = sorted(range(len(stretches)), key=lambda i: (names[storages[i]], stretches[i]))
    for i in order:
        start, end = stretches[i]
        if start == end:
            continue
        if merged and storages[merged[-1][0]] == storages[i] and start <= merged[-1][2]:
            source, first, last = merged[-1]
            merged[-1] = (source, first, max(last, end))
        else:
            merged.append((i, start // _START_BYTES * _START_BYTES, end))
        piece_of[i] = len(merged) - 1
    return merged, piece_of


def _bundle(merged: Sequence[tuple[int, int, int]]) -> tuple[tuple[Piece, ...], tuple[Bundle, ...]]:
    """Give every large piece a bundle of its own, and all small ones the last bundle."""
    sizes = [end - start for _, start, end in merged]
    large = [i for i, size in enumerate(sizes) if size >= SMALL_BYTES]
    small = [i for i, size in enumerate(sizes) if size < SMALL_BYTES]
    place: dict[int, tuple[int, int]] = {i: (number, 0) for number, i in enumerate(large)}
    contents: list[tuple[tuple[int, ...], int, bool]] = [((i,), sizes[i], False) for i in large]
    filled = 0
    for i in small:
        place[i] = (len(large), filled)
        filled += align(sizes[i])
    if small:
        contents.append((tuple(small), filled, True))
    bundles, offset = [], 0
    for pieces, size, staged in contents:
        bundles.append(Bundle(offset, size, pieces, staged))
        offset += align(size)
    return tuple(Piece(*merged[i], *place[i]) for i in range(len(merged))), tuple(bundles)


def align(size_bytes: int) -> int:
    """Return the bytes that a piece or bundle takes, up to where the next may begin."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
