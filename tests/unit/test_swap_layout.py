"""How swapped values lie in a slab: every byte once, every value rebuilt as it was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from protrain_compile import swap_layout
from protrain_compile.sizes import storage_key
from protrain_compile.swap_layout import ALIGNMENT_BYTES, SwapLayout, align, lay_out


def layout_of(values: Sequence[Tensor]) -> SwapLayout:
    layout = lay_out(values, [storage_key(value) for value in values])
    check(layout, values)
    return layout


def check(layout: SwapLayout, values: Sequence[Tensor]) -> None:
    """Check what holds for every layout."""
    ends = [0]
    for bundle in layout.bundles:
        assert bundle.offset % ALIGNMENT_BYTES == 0
        assert bundle.offset >= ends[-1]
        ends.append(bundle.offset + bundle.size_bytes)
        offset = 0
        for piece in (layout.pieces[i] for i in bundle.pieces):
            assert piece.offset % ALIGNMENT_BYTES == 0
            assert piece.offset >= offset
            offset = piece.offset + piece.size_bytes
        assert bundle.size_bytes == (align(offset) if bundle.staged else offset)
    assert layout.slab_bytes >= ends[-1]
    assert layout.moved_bytes == sum(bundle.size_bytes for bundle in layout.bundles)
    for value, placed in zip(values, layout.values, strict=True):
        assert (placed.shape, placed.stride, placed.dtype) == (value.shape, value.stride(), value.dtype)
        assert (placed.bundle == -1) == (value.numel() == 0)


def moved(*values: Tensor) -> int:
    return sum(piece.size_bytes for piece in layout_of(values).pieces)


def test_views_of_one_storage_are_counted_once() -> None:
    base = torch.zeros(8, 6)
    assert moved(base, base.t(), base[2:5], base[:, 0], base.view(-1), base) == 8 * 6 * 4


def test_an_expanded_value_takes_what_it_shows() -> None:
    assert moved(torch.zeros(8, 1).expand(8, 1000)) == 8 * 4
    assert moved(torch.zeros(()).expand(3, 4)) == 4


def test_a_slice_takes_its_stretch() -> None:
    base = torch.zeros(100, 16)
    assert moved(base[10:20]) == 10 * 16 * 4
    assert moved(base[10:20], base[30:40]) == 2 * 10 * 16 * 4
    assert moved(base[10:20], base[15:40]) == 30 * 16 * 4
    assert moved(base[10:20], base[20:40]) == 30 * 16 * 4
    assert moved(base[:, 0]) == 99 * 16 * 4 + 4


def test_values_without_bytes() -> None:
    empty = torch.zeros(0, 4)
    layout = layout_of([empty, empty.t()])
    assert layout.bundles == ()
    assert layout.slab_bytes == 0
    assert moved(empty, torch.zeros(3)) == 12


def test_starts_keep_their_alignment() -> None:
    base = torch.zeros(4096, dtype=torch.uint8)
    value = base[37:100]
    layout = layout_of([value])
    (piece,) = layout.pieces
    assert (piece.start, piece.end) == (32, 100)
    assert layout.values[0].offset == 5


def test_large_pieces_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_layout, "SMALL_BYTES", 1000)
    small, large = torch.zeros(10), torch.zeros(500)
    layout = layout_of([small, large, small.clone(), large.clone(), large])
    assert [bundle.size_bytes for bundle in layout.bundles] == [2000, 2000, 2 * 256]
    assert [placed.bundle for placed in layout.values] == [2, 0, 2, 1, 0]


def test_any_two_views_of_a_storage() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    views = [base, base.transpose(0, 2), base[:, 1], base[1], base[..., 2], base[:, :, ::2], base[0, :1].expand(3, 4)]
    for pair in itertools.permutations(views, 2):
        assert moved(*pair) <= 24 * 4


def test_fake_values_are_laid_out_alike() -> None:
    def make() -> list[Tensor]:
        base = torch.empty(5, 7, dtype=torch.bfloat16)
        return [base[1:3], base.t(), torch.empty(3, dtype=torch.bool), torch.empty(0, 2)]

    real = layout_of(make())
    with FakeTensorMode():
        fakes = make()
    assert layout_of(fakes) == real
