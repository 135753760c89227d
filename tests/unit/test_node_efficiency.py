"""The predicted efficiency of nodes: limits that it must reach, and the page."""

from __future__ import annotations

import dataclasses

import pytest
from support.made_shapes import MB, Stack, plain_hardware

from bench.node_efficiency import COLUMNS, NODE_RANKS, Case, kept, page, rows, world_of
from protrain_compile.links import Links, default_links

FAST = Links("fast", 1e9, 0.0, 1e9, 0.0)


def case(links: Links, forward_ms: float = 4.0, device_mb: int | None = None) -> Case:
    stack = Stack(blocks=4, forward_ms=forward_ms, backward_ms=2 * forward_ms)
    return Case(stack.shape(), stack.profile(links=links), None if device_mb is None else device_mb * MB)


def test_worlds() -> None:
    assert [(w.ranks, w.replicas, w.nodes) for w in (world_of(64, each) for each in COLUMNS)] == [
        (64, 1, 8),
        (64, 1, 8),
        (8, 8, 8),
    ]
    assert world_of(4, COLUMNS[2]) == world_of(4, COLUMNS[1])
    assert world_of(16, COLUMNS[0]).node_ranks == NODE_RANKS


@pytest.mark.parametrize("column", COLUMNS)
def test_limits(column: str) -> None:
    assert kept(case(default_links()), 1, column) == pytest.approx(1.0)
    free = kept(case(FAST), 64, column)
    assert free is not None
    assert free >= 0.999  # its updates take a 64th
    assert kept(case(FAST, device_mb=10), 1, column) is None


def test_slow_links_and_less_work_keep_less() -> None:
    slow = Links("slow", 40.0, 5.0, 5.0, 10.0)
    for column in COLUMNS:
        found = [kept(case(links), 64, column) or 0.0 for links in (FAST, default_links(), slow)]
        assert found == sorted(found, reverse=True)
        assert (kept(case(slow, 1.0), 64, column) or 0.0) < found[-1]
    slow_network = dataclasses.replace(slow, inside_gb_per_s=400.0, across_gb_per_s=1.0)
    flat, hybrid = (kept(case(slow_network), 64, column) or 0.0 for column in COLUMNS[1:])
    assert hybrid > flat


def test_the_page_says_that_it_is_predicted() -> None:
    found = page(rows([(4096, case(FAST)), (16384, case(FAST, device_mb=10))]), plain_hardware(), FAST)
    assert "predicted, nothing on this page was measured" in found
    assert found.count("\n| 64 ") == 2
    assert found.count("does not fit") == 3 * 7
