"""Sizes as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from protrain_compile.byte_text import format_needed, format_size, parse_size
from protrain_compile.errors import OptionError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (12345, 12345),
        ("20GiB", 20 * GIB),
        ("512MB", 512_000_000),
        ("1.5 TiB", 3 * 2**39),
        (" 7kib ", 7 * 1024),
        ("100", 100),
        ("100B", 100),
        ("2gb", 2_000_000_000),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text, "memory_budget") == size


@pytest.mark.parametrize("bad", ["", "GiB", "20 apples", "-1GiB", "1e9", "20G", 0, -5, True, None, 2.5, "0GiB", "nan"])
def test_bad_sizes_name_the_argument_and_the_units(bad: Any) -> None:
    with pytest.raises(OptionError, match=r"host_memory_budget=.*GiB"):
        parse_size(bad, "host_memory_budget")


def test_format_size() -> None:
    assert (format_size(20 * GIB), format_size(512 << 20)) == ("20.00 GiB", "512.0 MiB")


@pytest.mark.parametrize("size", [1, 1023, 1025, 2_400_001, (1 << 30) - 1, (1 << 30) + 1, 137_580_001, 24 * GIB + 17])
def test_what_is_needed_is_enough_when_it_is_passed(size: int) -> None:
    assert size <= parse_size(format_needed(size), "memory_budget") <= size * 1.1


def test_small_sizes_are_not_nothing() -> None:
    assert (format_size(17), format_size(1536), format_size(2000)) == ("17 B", "1.5 KiB", "2.0 KiB")
