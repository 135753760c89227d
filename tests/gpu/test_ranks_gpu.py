"""Ranks on CUDA devices: two on one GPU through gloo (chunks pass through the host), one on each through NCCL."""

from __future__ import annotations

import pytest
import torch
from support.worlds import Outcome, run_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
CHECKS = ("cuda_equals_one_rank", "cuda_micro_batches_equal_one_rank")


def assert_passed(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"


def test_two_ranks_on_one_gpu() -> None:
    for outcomes in run_world(2, "rank_checks_cuda", CHECKS).values():
        assert_passed(outcomes)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpu_for_each_rank() -> None:
    for outcomes in run_world(2, "rank_checks_cuda", CHECKS, backend="nccl").values():
        assert_passed(outcomes)
