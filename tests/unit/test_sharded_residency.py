"""The residency of one rank on symbols (``support.symbolic_ranks``); its numbers are in ``cases/test_ranks.py``."""

from __future__ import annotations

from unittest import mock

import pytest
from support.rank_schedules import shared_schedule
from support.symbolic_ranks import runtime_for

from protrain_compile.errors import RankError


def test_after_a_gather_that_raised_the_shard_is_fetched_again() -> None:
    """Its buffer may have served another chunk since."""
    chunks = shared_schedule("persistent", "parameters").chunks
    assert chunks is not None
    runtime = runtime_for(chunks, 0)
    residency = runtime.residency
    with (
        mock.patch.object(residency.ranks, "all_gather", side_effect=RankError("waited in vain")),
        pytest.raises(RankError),
    ):
        residency.all_gather(1, 0)
    with mock.patch.object(residency, "_fetch_shard", wraps=residency._fetch_shard) as fetch:
        residency.all_gather(1, 0)
        assert fetch.call_count == 1
        residency.all_gather(1, 0)
        assert fetch.call_count == 1, "the chunk is whole in its buffer"
