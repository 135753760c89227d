"""Happens-before against a search for paths, on random streams and waits."""

from __future__ import annotations

import random

import networkx
import pytest

from passes.effects import STREAMS
from passes.happens_before import HappensBefore


@pytest.mark.parametrize("seed", range(20))
def test_against_reachability(seed: int) -> None:
    draw = random.Random(seed)
    order, graph = HappensBefore(), networkx.DiGraph()
    last: dict[str, int] = {}
    for number in range(60):
        stream = draw.choice(STREAMS if seed % 2 else STREAMS[1:])
        waits = [draw.randrange(number) for _ in range(draw.randrange(3)) if number]
        assert order.add(stream, waits) == number
        graph.add_node(number)
        before = [*waits, *(last[each] for each in (stream, "caller") if each in last)]
        graph.add_edges_from((each, number) for each in before)
        last[stream] = number
    for second in graph:
        ancestors = networkx.ancestors(graph, second) | {second}
        for first in graph:
            assert order.before(first, second) == (first in ancestors)


def test_a_step_that_is_not_issued_yet() -> None:
    order = HappensBefore()
    first, other = order.add("compute", []), order.add("h2d", [])
    assert order.would_follow("compute", [], first)
    assert not order.would_follow("compute", [], other)
    assert order.would_follow("d2h", [other], other)
    order.add("caller", [other])
    assert order.would_follow("compute", [], other)
