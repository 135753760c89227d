"""Case 34: several ranks train one model; gloo on the CPU. Many checks share one world (``support.rank_checks``)."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from support.prepared import Stack, forced, prepared
from support.worlds import Outcome, run_world

pytestmark = pytest.mark.timeout(600)  # several processes compile side by side

CHECKS = (
    "gradients_equal_one_rank",
    "updates_in_the_backward_equal_one_rank",
    "a_hundred_steps_equal_one_rank",
    "micro_batches_equal_one_rank",
    "clipping_equals_one_rank",
    "mixed_sharding_equals_one_rank",
    "two_forwards_then_two_backwards_equal_one_rank",
    "traffic_is_that_of_zero",
    "micro_batches_communicate_once_where_gradients_are_whole",
    "all_ranks_start_from_rank_0",
    "different_lengths_do_not_hang",
    "a_nonfinite_gradient_on_one_rank_skips_on_all",
    "states_are_whole_on_every_rank",
    "gathers_wait_for_writes",
    "collectives_are_measured",
)
CHECKS_OF_SIZE = {
    3: ("uneven_tails_equal_one_rank", "traffic_is_that_of_zero", "collectives_are_measured"),
    4: ("uneven_tails_equal_one_rank", "hybrid_sharding_equals_one_rank"),
}

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def two_ranks() -> Outcomes:
    others = ("host_bytes", "all_ranks_follow_rank_0s_plan", "other_schedules_are_refused", "other_models_are_refused")
    planned = ("searched_plans_equal_one_rank", "longer_sequences_are_planned_anew", "one_rank_has_no_plan")
    agreed = ("a_longer_first_sequence_decides_for_all", "each_piece_of_a_broken_graph_has_its_own_plan")
    return run_world(2, "rank_checks", (*CHECKS, *others, *planned, *agreed))


def assert_passed(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(two_ranks: Outcomes, check: str) -> None:
    assert_passed(two_ranks[check])


def test_host_bytes_of_a_node_do_not_grow_with_ranks(two_ranks: Outcomes) -> None:
    alone = prepared(Stack(width=64), forced("offloaded", chunk_bytes=80_000))
    alone.step(0)
    expected = alone.managed.packed.store.spec.host_bytes()
    assert_passed(two_ranks["host_bytes"])
    total = sum(outcome.result for outcome in two_ranks["host_bytes"])
    assert total == pytest.approx(expected, rel=0.02)  # padding


def test_all_ranks_follow_rank_0s_plan(two_ranks: Outcomes) -> None:
    assert_passed(two_ranks["all_ranks_follow_rank_0s_plan"])
    assert {outcome.result for outcome in two_ranks["all_ranks_follow_rank_0s_plan"]} == {"recompute" * 3}


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("other_schedules_are_refused", "ranks differ in the schedule: line 3 of rank 0 is 'chunk 1: .* blocks.0"),
        ("other_models_are_refused", r"stem.weight: \(8, 4\) torch.float32 trainable', of rank 1 .*\(16, 4\)"),
    ],
)
def test_differences_are_an_error_on_all_ranks(two_ranks: Outcomes, check: str, message: str) -> None:
    for outcome in two_ranks[check]:
        assert outcome.error is not None
        assert "RankError" in outcome.error
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(outcome.error.replace("\n", " "))


def test_a_rank_without_a_plan_ends_the_others_with_its_reason(two_ranks: Outcomes) -> None:
    first, last = two_ranks["one_rank_has_no_plan"]
    assert first.error is not None
    assert last.error is not None
    assert "RankError: rank 1 of 2 cannot go on, so nor can the others: " in first.error
    reason = last.error.strip().splitlines()[-1]
    assert "PlanError: plan has 1 block policies" in reason
    assert reason.partition("PlanError: ")[2] in first.error


def test_all_ranks_get_the_same_searched_plan(two_ranks: Outcomes) -> None:
    """Equal to one rank on the joined batch, within the smallest budget of all."""
    assert_passed(two_ranks["searched_plans_equal_one_rank"])
    assert len({outcome.result for outcome in two_ranks["searched_plans_equal_one_rank"]}) == 1


def test_a_rank_plans_anew_for_longer_sequences(two_ranks: Outcomes) -> None:
    outcomes = two_ranks["longer_sequences_are_planned_anew"]
    assert_passed(outcomes)
    assert outcomes[0].result < outcomes[1].result


def test_the_largest_first_step_decides_for_all_ranks(two_ranks: Outcomes) -> None:
    """Within the budget on every rank, which rank 0's own plan would exceed on the last."""
    outcomes = two_ranks["a_longer_first_sequence_decides_for_all"]
    assert_passed(outcomes)
    assert outcomes[0].result == outcomes[1].result > 0


def test_pieces_of_a_broken_graph_are_planned_apart(two_ranks: Outcomes) -> None:
    outcomes = two_ranks["each_piece_of_a_broken_graph_has_its_own_plan"]
    assert_passed(outcomes)
    assert [outcome.result for outcome in outcomes] == [["whole", "sliced"]] * 2


@pytest.mark.parametrize("size", CHECKS_OF_SIZE)
def test_worlds_of_other_sizes(size: int) -> None:
    for outcomes in run_world(size, "rank_checks", CHECKS_OF_SIZE[size]).values():
        assert_passed(outcomes)


def test_a_rank_that_raises_ends_the_others_with_a_message() -> None:
    start = time.monotonic()
    waiting, broken = run_world(2, "rank_checks", ("one_rank_raises",), group_timeout_s=45)["one_rank_raises"]
    assert broken.error is not None
    assert "rank 1 breaks" in broken.error
    assert waiting.error is not None
    assert "RankError: rank 0 of 2 waited in vain in all_gather of chunk 0 (stem." in waiting.error
    assert time.monotonic() - start < 400


def test_one_rank_is_no_world(tmp_path: object) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        alone = prepared(Stack(), "offloaded")
        alone.steps(0, 1)
        assert alone.managed.preparation.ranks is None
    finally:
        torch.distributed.destroy_process_group()


def test_demo_under_torchrun() -> None:
    """Two ranks learn what one does (``--check`` compares with eager) by a searched plan, and only the first prints."""
    model = ["--blocks", "2", "--width", "32", "--batch", "4", "--seq", "32", "--steps", "3", "--sample", "4"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    planned = ["--memory-budget", "900KiB"]  # what keeps all takes more
    demo = ["demo", "--device", "cpu", "--compile", "eager", "--check", *planned]
    command = [*launcher, "-m", "protrain_compile", *demo, *model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("check passed") == 1
    assert done.stdout.count("[backward]") == 1
    assert "0 persistent, 0 offloaded, 1 split; 2 ranks divide" in done.stdout
    assert "budget 900 KiB" in done.stdout
