"""policy_mix: which policies are worth mixing, and the mixes."""

from __future__ import annotations

import dataclasses

import pytest
from support.made_shapes import Finer, Stack

from protrain_compile.policy_mix import mixed_policies, patterns

PRODUCTS, POINTWISE = "recompute_products", "recompute_pointwise"


def mixed(*finer: Finer) -> list[str]:
    """Return what is mixed where a block saves 40 MB, and recomputing all of it takes 4 ms."""
    stack = Stack(blocks=3, saved_mb=40, forward_ms=4.0, finer=finer)
    return list(mixed_policies(stack.shape(), stack.profile()))


def test_only_what_lies_below_the_line_is_offered() -> None:
    assert mixed() == ["keep", "recompute"]
    assert mixed(Finer(POINTWISE, 20, 0.5)) == ["keep", POINTWISE, "recompute"]
    assert mixed(Finer(POINTWISE, 20, 2.0)) == ["keep", "recompute"], "on the line"
    assert mixed(Finer(POINTWISE, 20, 5.0)) == ["keep", "recompute"], "slower than recomputing all"
    assert mixed(Finer(POINTWISE, 40, 0.0)) == ["keep", "recompute"], "keeps all"
    assert mixed(Finer(PRODUCTS, 0, 3.0)) == ["keep", "recompute"], "keeps nothing"


@pytest.mark.parametrize(("products_ms", "expected"), [(2.0, [POINTWISE, PRODUCTS]), (3.5, [POINTWISE])])
def test_the_lower_hull(products_ms: float, expected: list[str]) -> None:
    assert mixed(Finer(PRODUCTS, 10, products_ms), Finer(POINTWISE, 30, 0.2)) == ["keep", *expected, "recompute"]


def test_a_policy_may_hide_another() -> None:
    assert mixed(Finer(PRODUCTS, 4, 0.5), Finer(POINTWISE, 30, 0.6)) == ["keep", PRODUCTS, "recompute"]


def test_what_is_carried_out_alike_is_one() -> None:
    stack = Stack(blocks=2, finer=(Finer(POINTWISE, 20, 0.5),))
    shape = stack.shape()
    segments = tuple(
        dataclasses.replace(each, recompute_of={**each.recompute_of, PRODUCTS: "recompute"}) for each in shape.segments
    )
    found = mixed_policies(dataclasses.replace(shape, segments=segments), stack.profile())
    assert found == ("keep", POINTWISE, "recompute")
    nothing = tuple(dataclasses.replace(each, recompute_of={}) for each in shape.segments)
    assert mixed_policies(dataclasses.replace(shape, segments=nothing), stack.profile()) == ("keep",)


def test_patterns_go_step_by_step_from_most_kept_to_least() -> None:
    found = patterns(2, ("keep", POINTWISE, "recompute"))
    assert found == (
        ("keep", "keep"),
        (POINTWISE, "keep"),
        (POINTWISE, POINTWISE),
        ("recompute", POINTWISE),
        ("recompute", "recompute"),
    )
    assert patterns(0, ("keep", "recompute")) == ((),)
    assert patterns(2, ("keep",)) == (("keep", "keep"),)
