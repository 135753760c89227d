"""Which buffer a stay gets, by hand and for random stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_compile import PlanError
from protrain_compile.buffers import Placing, Stay, own_buffer, place_stays


def stay(chunk: int, begin: int, end: int, *, needs: bool = True, keeps: bool = True) -> Stay:
    return Stay(chunk, begin, end, needs, keeps)


def test_a_forward_fills_the_buffers_in_turn() -> None:
    stays = [stay(chunk, 2 * chunk, 2 * chunk + 1) for chunk in range(5)]
    placed, left = place_stays(stays, 3, frozenset(), {})
    assert placed == [
        Placing(0, True, -1),
        Placing(1, True, -1),
        Placing(2, True, -1),
        Placing(0, True, 0),
        Placing(1, True, 1),
    ]
    assert left == {0: 3, 1: 4, 2: 2}


def test_a_backward_begins_with_what_the_forward_left() -> None:
    stays = [stay(chunk, 10 * i, 10 * i + 5, keeps=False) for i, chunk in enumerate((4, 3, 2, 1))]
    placed, left = place_stays(stays, 3, frozenset(), {0: 3, 1: 4, 2: 2})
    assert [each.fetched for each in placed] == [False, False, False, True]
    assert placed[3].behind == 0, "the buffer that is free first"
    assert left == {}


def test_a_buffer_whose_content_is_needed_last_is_given_up() -> None:
    stays = [stay(2, 0, 1), stay(0, 2, 3), stay(1, 4, 5)]
    placed, _ = place_stays(stays, 3, frozenset(), {0: 0, 1: 1, 2: 7})
    assert [each.buffer for each in placed] == [2, 0, 1]
    placed, _ = place_stays(stays, 2, frozenset(), {0: 0, 1: 1})
    assert placed[0].buffer == 1, "chunk 0 comes sooner than chunk 1"


def test_gradients_without_parameters_need_no_copy() -> None:
    (placing,), left = place_stays([stay(0, 0, 1, needs=False, keeps=False)], 3, frozenset(), {})
    assert not placing.fetched
    assert left == {}


def test_a_split_chunk_has_a_buffer_of_its_own() -> None:
    placed, left = place_stays([stay(4, 0, 1), stay(4, 2, 3)], 3, frozenset({4}), {})
    assert placed == [Placing(own_buffer(3, 4), True, -1), Placing(own_buffer(3, 4), False, 0)]
    assert left == {own_buffer(3, 4): 4}


def test_too_few_buffers() -> None:
    with pytest.raises(PlanError, match="buffers=3 are too few"):
        place_stays([stay(chunk, 0, 9) for chunk in range(4)], 3, frozenset(), {})


@st.composite
def graphs(draw: st.DrawFn) -> list[Stay]:
    """Draw stays of which at most three overlap, and never two of one chunk."""
    found: list[Stay] = []
    position = 0
    for _ in range(draw(st.integers(0, 20))):
        position += draw(st.integers(1, 3))
        begun = [each for each in found if each.end >= position]
        if len(begun) == 3:
            continue
        chunk = draw(st.sampled_from(sorted(set(range(8)) - {each.chunk for each in begun})))
        end = position + draw(st.integers(0, 8))
        found.append(Stay(chunk, position, end, draw(st.booleans()), draw(st.booleans())))
    return found


@settings(derandomize=True)
@given(graphs(), st.integers(3, 6), st.dictionaries(st.integers(0, 2), st.integers(0, 7)))
def test_a_buffer_holds_one_chunk_at_a_time_and_the_right_one(
    stays: list[Stay], buffers: int, entry: dict[int, int]
) -> None:
    placed, left = place_stays(stays, buffers, frozenset(), entry)
    holds, last = dict(entry), dict[int, int]()
    for number, (each, placing) in enumerate(zip(stays, placed, strict=True)):
        assert placing.behind == last.get(placing.buffer, -1)
        if placing.behind >= 0:
            assert stays[placing.behind].end < each.begin
        assert placing.fetched == (each.needs_parameters and holds.get(placing.buffer) != each.chunk)
        last[placing.buffer] = number
        holds[placing.buffer] = each.chunk if each.keeps_content else -1
    assert left == {buffer: chunk for buffer, chunk in holds.items() if chunk >= 0}
