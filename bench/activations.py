"""The searched mix of policies against recomputing every block, at caps little above what recomputing needs.

For each batch the planner is asked for the smallest cap under which every block recomputed fits. Then, at a few
multiples of it, a step of the searched plan and one of the same residency with every block recomputed are measured
under a cap of the device's memory, in one process, so that the model is prepared once: its chunks lie as the plan of
the smallest cap puts them. Recomputing takes the same time under every cap and is measured under the largest. Results
are printed at once::

    python -m bench.activations --batches 16,32 --factors 1.15,1.5,2 --output activations.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import common
from bench.accuracy import SEQUENCE, Configuration, Run, Subject, describe, fresh
from protrain_compile.errors import BudgetError
from protrain_compile.runtime.device_budget import RESERVE_SHARE

HEADER = ("batch", "cap GiB", "of smallest", "all recomputed, ms", "searched, ms", "faster", "searched plan")
LEAST_GIB = 0.01
"""A budget that no model fits: the error names the smallest that does."""

Keep = Callable[[dict[str, Any]], None]


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


def compare(name: str, batch: int, factors: Sequence[float], steps: int, keep: Keep) -> list[tuple[str, ...]]:
    """Measure both plans at every cap; return the table's rows."""
    subject = Subject(Configuration(name, batch, 1000.0))
    smallest = smallest_gib(subject, batch)
    print(f"batch {batch}: every block recomputed fits in {smallest:.2f} GiB", flush=True)
    found = []
    for factor in sorted(factors):
        configuration = Configuration(name, batch, round(smallest * factor + 0.005, 2), steps=steps)
        run = Run(subject, configuration)
        found.append((configuration, factor, run.measure(str(configuration))))
        keep(found[-1][2])
        if factor == max(factors):
            policies = ("recompute",) * len(run.part.schedule.plan.policies)
            run.use(dataclasses.replace(run.shape_and_plan()[1], policies=policies))
            recomputed = run.measure(f"{configuration}=recompute")
            keep(recomputed)
        del run
        fresh()
    subject.close()
    return [
        (
            str(batch),
            f"{configuration.cap_gib:.2f}",
            f"{factor:g}",
            f"{recomputed['step_ms']:,.0f}",
            f"{result['step_ms']:,.0f}",
            f"{recomputed['step_ms'] / result['step_ms'] - 1:.1%}",
            "{persistent}/{chunks} persistent; {policies}".format(**result["plan"]),
        )
        for configuration, factor, result in found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--batches", default="16,32")
    parser.add_argument("--factors", default="1.15,1.5,2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", help="write everything measured here, for bench.accuracy --read")
    parser.add_argument("--output", help="write the table to this file")
    given = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        print("  ".join(describe(result)), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(results, indent=1), encoding="utf-8")

    factors = [float(each) for each in given.factors.split(",")]
    rows = []
    for batch in map(int, given.batches.split(",")):
        rows += compare(given.model, batch, factors, given.steps, keep)
    notes = (
        f"{given.model}, sequence {SEQUENCE}; means of {given.steps} steps; residency and buffers searched for the "
        "smallest cap of a batch",
    )
    result = common.Result(
        "Searched policies", "bench.activations", common.default_device(), HEADER, tuple(rows), notes
    )
    result.show()
    if given.output:
        result.write(given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
