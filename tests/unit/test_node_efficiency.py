"""The predicted efficiency of nodes: limits that it must reach, and the page."""

from __future__ import annotations

import dataclasses

import pytest

from bench.node_efficiency import SHARDINGS, Links, Work, collective_times, efficiency, report, step_ms


def test_a_ring_moves_all_but_a_share_in_steps() -> None:
    links = Links(inside_gb_per_s=100.0, inside_us=10.0)
    assert links.ring_ms(4e8, 4, inside=True) == pytest.approx(3.0 + 0.03)
    assert links.ring_ms(4e8, 1, inside=True) == 0.0


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_limits(sharding: str) -> None:
    work, links = Work(), Links()
    assert efficiency(work, links, 1, sharding) == pytest.approx(1.0)
    fast = Links(inside_gb_per_s=1e9, inside_us=0.0, across_gb_per_s=1e9, across_us=0.0)
    assert efficiency(work, fast, 64, sharding) == pytest.approx(1.0, abs=1e-4)
    # Slow links: the step is what the collectives take, less what the forward left in the buffers.
    slow = Links(inside_gb_per_s=0.1, across_gb_per_s=0.1)
    forward, backward, reduce = collective_times(work, slow, 64, sharding)
    moved = work.blocks * (forward + backward + reduce) - work.buffers * backward
    assert step_ms(work, slow, 64, sharding) == pytest.approx(moved, rel=0.02)


def test_more_ranks_and_less_work_keep_less() -> None:
    work, links = Work(), Links()
    for sharding in SHARDINGS:
        kept = [efficiency(work, links, ranks, sharding) for ranks in (1, 8, 16, 64)]
        assert kept == sorted(kept, reverse=True)
        less = dataclasses.replace(work, forward_ms=work.forward_ms / 4)
        assert efficiency(less, links, 64, sharding) < efficiency(work, links, 64, sharding)
    assert efficiency(work, links, 64, "parameters, hybrid") > efficiency(work, links, 64, "parameters")


def test_the_page_says_that_it_is_predicted() -> None:
    page = report(Links())
    assert "predicted, nothing on this page was measured" in page
    assert page.count("\n| 64 ") == 2
