"""Where ranks share chunks: what does harm when a node is at fault or a wait is left out, the verifier finds.

Which do harm is decided by running them on the real ``ShardedResidency`` (``support.mutants``).
"""

from __future__ import annotations

import collections

from support.missing_waits import dropped_waits_of, is_missed
from support.mutants import Judge, is_found, mutants_of
from support.rank_schedules import shared_schedule


def test_a_mutant_is_found_if_it_does_harm_and_only_then() -> None:
    schedule = shared_schedule("persistent", "states")
    judge = Judge(schedule)
    found: collections.Counter[bool] = collections.Counter()
    for mutant in mutants_of(schedule):
        harm = judge.harm_of(mutant)
        assert is_found(mutant.of(schedule)) == bool(harm), f"{mutant} {harm or 'does no harm'}"
        found[bool(harm)] += 1
    assert found[True] > 40
    assert found[False] > 20


def test_a_missing_wait_is_found_if_it_does_harm_and_only_then() -> None:
    schedule = shared_schedule("mixed", "gradients")
    judge = Judge(schedule)
    found: collections.Counter[bool] = collections.Counter()
    for dropped in dropped_waits_of(schedule):
        harm = judge.harm_of(dropped)
        assert is_missed(schedule, dropped) == bool(harm), f"{dropped} {harm or 'does no harm'}"
        found[bool(harm)] += 1
    assert found[True] > 30
    assert found[False] > 30
