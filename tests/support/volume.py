"""How many random examples a test runs: a few in every run, as many as one likes by hand, over any number of processes.

Every example has a number, which is its seed, so that each is reproduced alone::

    pytest -s FILE --examples 20000 --shard 3/16          # the third of 16 processes; prints how far it is
    pytest -s FILE --examples 1 --first 4711              # number 4711 alone

By hand, an example that fails is printed with its number and the rest goes on; the test fails at the end.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

Example = TypeVar("Example")
PROGRESS_S = 30.0
"""How often a long run says how far it is."""


@dataclasses.dataclass(frozen=True)
class Volume:
    """What was asked for on the command line.

    Attributes:
        examples: How many examples each test runs; None for its usual number.
        first: The number of the first.
        shard: Which of ``shards`` equal parts this process runs, from 1.
        shards: How many processes share the examples.
    """

    examples: int | None = None
    first: int = 0
    shard: int = 1
    shards: int = 1

    @classmethod
    def of(cls, config: pytest.Config) -> Volume:
        """Return the volume of a run of pytest.

        Raises:
            pytest.UsageError: If ``--shard`` is not ``K/N`` with 1 <= K <= N.
        """
        shard, _, shards = config.getoption("--shard").partition("/")
        if not (shard.isdecimal() and shards.isdecimal() and 1 <= int(shard) <= int(shards)):
            raise pytest.UsageError(f"--shard {config.getoption('--shard')}: not K/N with 1 <= K <= N")
        return cls(config.getoption("--examples"), config.getoption("--first"), int(shard), int(shards))

    def numbers(self, usual: int) -> range:
        """Return the numbers of the examples that this process runs."""
        count = usual if self.examples is None else self.examples
        return range(self.first + self.shard - 1, self.first + count, self.shards)

    def run(self, usual: int, check: Callable[[int], None]) -> None:
        """Check every example of this process.

        Raises:
            Exception: What the first example that failed raised; by hand only one of all that failed.
        """
        numbers, failed = self.numbers(usual), []
        begun = told = time.monotonic()
        for done, number in enumerate(numbers):
            try:
                check(number)
            except Exception as error:
                error.add_note(f"example {number}: --examples 1 --first {number}")
                if self.examples is None:
                    raise
                print(f"\nexample {number} failed:\n{''.join(traceback.format_exception(error))}", flush=True)
                failed.append((number, error))
            if self.examples is not None and time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                print(f"{done + 1} of {len(numbers)} in {told - begun:.0f} s, {len(failed)} failed", flush=True)
        if self.examples is not None:
            took = time.monotonic() - begun
            print(
                f"\nshard {self.shard}/{self.shards}: {len(numbers)} examples from {self.first} in {took:.0f} s, "
                f"{len(failed)} failed: {[number for number, _ in failed]}",
                flush=True,
            )
        if failed:
            raise failed[0][1]


def example_of(strategy: SearchStrategy[Example], number: int) -> Example:
    """Return the example of a number: the second that hypothesis draws, as it begins with the simplest."""
    drawn: list[Any] = []

    @seed(number)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(example: Any) -> None:
        drawn.append(example)

    keep()
    return drawn[-1]
