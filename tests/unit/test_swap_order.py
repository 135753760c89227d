"""Where copies of swapped blocks end and start."""

from __future__ import annotations

import pytest
from support.capture import mixed

from protrain_compile.swap_order import FARTHEST, partners


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ("kkk", {}),
        ("kskrskk", {1: 4, 4: 6}),
        ("ksssk", {1: 2, 2: 3, 3: 4}),
        ("kskkkkkkkk", {1: 1 + FARTHEST}),
        ("kskkkkkkks", {1: 1 + FARTHEST, 9: 9}),
        ("skk", {0: 2}),
        ("xkskpk", {0: 2, 2: 4}),
        ("s", {0: 0}),
    ],
)
def test_partners(policies: str, expected: dict[int, int]) -> None:
    assert partners(mixed(policies).policies or ()) == expected


def test_copies_end_and_start_in_the_order_of_the_segments() -> None:
    found = partners(["swap", "keep", "swap", "swap", "recompute", "swap"] * 3)
    assert sorted(found.values()) == list(found.values())
    assert all(segment <= partner <= segment + FARTHEST for segment, partner in found.items())
