"""The searched mix of policies against recomputing every block, at caps little above what recomputing needs.

For each batch the planner is asked for the smallest cap under which every block recomputed fits. Then, at a few
multiples of it, a step of the searched plan is measured under a cap of the device's memory, in one process, so that
the model is prepared once: its chunks lie as the first cap's plan puts them. Recomputing every block, in the same
residency, takes the same time under every cap and is measured under the first. ``--by-hand 16:1.5`` adds the plans of
``bench.hand_plans`` under one of the caps. Results are printed at once::

    python -m bench.activations --batches 16,32 --factors 1.5,2,1.15 --output activations.md
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bench import common
from bench.accuracy import Recorder, describe
from bench.hand_plans import Keep, measure_hand_plans
from bench.subject import SEQUENCE, Configuration, Run, Subject, fresh
from protrain_compile.errors import BudgetError
from protrain_compile.runtime.device_budget import RESERVE_SHARE

HEADER = ("batch", "cap GiB", "of smallest", "all recomputed, ms", "searched, ms", "faster", "searched plan")
LEAST_GIB = 0.01
"""A budget that no model fits: the error names the smallest that does."""


def smallest_gib(subject: Subject, batch: int) -> float:
    """Return the smallest cap, in GiB, under which a step with every block recomputed fits."""
    least = Configuration(subject.name, batch, LEAST_GIB, policies="recompute")
    try:
        Run(subject, dataclasses.replace(least, cap_gib=1000.0), budget_gib=LEAST_GIB)
    except BudgetError as error:
        return error.needed_bytes / 2**30 / (1 - RESERVE_SHARE)
    finally:
        fresh()
    raise RuntimeError(f"{LEAST_GIB} GiB were enough for {least}")


class Comparison:
    """Measures plans on one prepared model; ``keep`` is told each result at once."""

    def __init__(self, name: str, steps: int, by_hand: str, keep: Keep) -> None:
        self.name, self.steps, self.by_hand, self.keep = name, steps, by_hand, keep
        self.subject = Subject(Configuration(name, 1, 1000.0))

    def run(self, batch: int, factors: Sequence[float]) -> Iterator[tuple[str, ...]]:
        """Yield a row of the table for every cap."""
        smallest = smallest_gib(self.subject, batch)
        print(f"batch {batch}: every block recomputed fits under {smallest:.2f} GiB", flush=True)
        recomputed = 0.0
        for factor in factors:
            configuration = Configuration(self.name, batch, round(smallest * factor, 2), steps=self.steps)
            run = Run(self.subject, configuration)
            result = self._measure(run, str(configuration))
            if not recomputed:
                policies = ("recompute",) * len(run.part.schedule.plan.policies)
                run.use(dataclasses.replace(run.shape_and_plan()[1], policies=policies))
                recomputed = self._measure(run, f"{configuration}=recompute")["step_ms"]
            if self.by_hand == f"{batch}:{factor:g}":
                measure_hand_plans(run, self.keep)
            del run
            fresh()
            yield (
                str(batch),
                f"{configuration.cap_gib:.2f}",
                f"{factor:g}",
                f"{recomputed:,.0f}",
                f"{result['step_ms']:,.0f}",
                f"{recomputed / result['step_ms'] - 1:.1%}",
                "{persistent}/{chunks} persistent; {policies}; loss {loss}".format(**result["plan"]),
            )

    def _measure(self, run: Run, name: str) -> dict[str, Any]:
        result = run.measure(name)
        self.keep(result)
        return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--batches", default="16,32")
    parser.add_argument("--factors", default="1.5,2,1.15")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--by-hand", default="", help="BATCH:FACTOR under which plans by hand are measured, too")
    parser.add_argument("--json", help="write everything measured here, for bench.accuracy --read")
    parser.add_argument("--output", help="write the table to this file")
    given = parser.parse_args(arguments)
    factors = [float(each) for each in given.factors.split(",")]
    comparison = Comparison(given.model, given.steps, given.by_hand, Recorder(describe, given.json).keep)
    rows = []
    for batch in map(int, given.batches.split(",")):
        for row in comparison.run(batch, factors):
            rows.append(row)
            print("  ".join(row), flush=True)
            _result(given, rows).write(given.output or os.devnull)
    _result(given, rows).show()
    return 0


def _result(given: argparse.Namespace, rows: Sequence[tuple[str, ...]]) -> common.Result:
    notes = (
        f"{given.model}, sequence {SEQUENCE}; means of {given.steps} steps; residency and buffers as searched for the "
        "first of the caps",
    )
    return common.Result("Searched policies", "bench.activations", common.default_device(), HEADER, tuple(rows), notes)


if __name__ == "__main__":
    raise SystemExit(main())
