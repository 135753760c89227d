"""The searched mix of policies against recomputing every block, at caps little above what recomputing needs.

For each batch the smallest budget is asked of the planner with every block recomputed; then, at a few multiples of it,
a step of the searched plan and of the best plan that recomputes all blocks are measured, each in a process of its own
under a cap of the device's memory. Results are printed at once::

    python -m bench.activations --batches 16,32 --factors 1.15,1.5,2 --output activations.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import torch

from bench import common
from bench.accuracy import SEQUENCE, Configuration, make_model, run_child
from bench.states import fill
from protrain_compile.report.plan_table import policies_text

HEADER = ("batch", "cap GiB", "of smallest", "all recomputed, ms", "searched, ms", "faster", "searched plan")
TIMEOUT_S = 110.0
LEAST_BYTES = 1 << 20
"""A budget that no model fits: the error names the smallest that does."""


def smallest_gib(model_name: str, batch: int) -> float:
    """Return the smallest budget, in GiB, in which every block recomputed fits; run in a process of its own."""
    import protrain_compile as protrain
    from protrain_compile.backend import protrain as backend
    from protrain_compile.errors import BudgetError

    device = common.default_device()
    model = make_model(model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = protrain.Plan.uniform("recompute")
    model, _ = protrain.prepare(model, optimizer, device=device, init=fill, plan=plan, memory_budget=LEAST_BYTES)
    compiled = torch.compile(model, backend=backend, options={"schedule": "off"})
    tokens = torch.zeros(batch, SEQUENCE, dtype=torch.int64, device=device)
    try:
        compiled(input_ids=tokens, labels=tokens)
    except BudgetError as error:
        return error.needed_bytes / 2**30
    raise RuntimeError(f"a budget of {LEAST_BYTES} bytes was enough for {model_name}")


def ask_smallest(model_name: str, batch: int) -> float:
    """Return ``smallest_gib`` from a child process.

    Raises:
        RuntimeError: If the child failed.
    """
    command = [sys.executable, "-m", "bench.activations", "--smallest", f"{model_name}:{batch}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SMALLEST ")]
    if not lines:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-12:]))
    return float(lines[-1].split()[1])


def compare(model_name: str, batch: int, smallest: float, factor: float, steps: int) -> tuple[str, ...]:
    """Measure both plans at one cap; return the table's row."""
    cap = round(smallest * factor, 2)
    searched = Configuration(model_name, batch, cap, steps=steps)
    results = [run_child(each, TIMEOUT_S) for each in (dataclasses.replace(searched, policies="recompute"), searched)]
    start = (str(batch), f"{cap:.2f}", f"{factor:g}")
    for result in results:
        if "error" in result:
            return (*start, "failed", "failed", "", result["error"][-1][:80])
    before, after = (result["step_ms"] for result in results)
    persistent = "{persistent}/{chunks} persistent; ".format(**results[1]["plan"])
    policies = policies_text(json.loads(results[1]["whole_plan"])["policies"])
    return (*start, f"{before:,.0f}", f"{after:,.0f}", f"{before / after - 1:.1%}", persistent + policies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--batches", default="16,32")
    parser.add_argument("--factors", default="1.15,1.5,2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", help="write the table to this file")
    parser.add_argument("--smallest", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.smallest:
        name, _, batch = given.smallest.partition(":")
        print(f"SMALLEST {smallest_gib(name, int(batch))}")
        return 0
    rows = []
    for batch in map(int, given.batches.split(",")):
        smallest = ask_smallest(given.model, batch)
        print(f"batch {batch}: every block recomputed fits in {smallest:.2f} GiB", flush=True)
        for factor in map(float, given.factors.split(",")):
            rows.append(compare(given.model, batch, smallest, factor, given.steps))
            print("  ".join(rows[-1]), flush=True)
    notes = (
        f"{given.model}, sequence {SEQUENCE}; means of {given.steps} steps; residency and buffers searched in both",
    )
    device = common.default_device()
    result = common.Result("Searched policies", "bench.activations", device, HEADER, tuple(rows), notes)
    result.show()
    if given.output:
        result.write(given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
