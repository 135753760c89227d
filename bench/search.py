"""What the search for a plan costs: processor time on one core, from budgets that barely fit to ones where all does.

The models are Llamas, traced once each and planned for the H200's recorded rates: small batches are bound by copies and
updates, large ones by compute; with clipping, all updates come after the backward. Nothing is run on a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time

from bench import common
from protrain_compile.commands.models import resolve
from protrain_compile.commands.outlook import Step, Workload, step_of
from protrain_compile.errors import BudgetError
from protrain_compile.profile import HardwareProfile
from protrain_compile.solver import Solution, search

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 0.95, 1.0)
"""Budgets: how far from the smallest that works to what the model needs with everything on the device and kept."""

BATCHES = (2, 8, 32)
TARGETS_MS = {32: 100.0, 96: 1000.0}


def step_of_llama(blocks: int, batch: int, hardware: HardwareProfile) -> Step:
    """Return the step of a Llama with 7B's blocks."""
    sizes = f"llama:hidden_size=4096,intermediate_size=11008,num_hidden_layers={blocks}"
    return step_of(Workload(resolve(sizes), batch, 1024), hardware)


def clipping(step: Step) -> Step:
    """Return the same step with all updates after the backward."""
    late = {"update_mode": "at_step", "clips": True, "landings": 0}
    shapes = {loss: dataclasses.replace(shape, **late) for loss, shape in step.shapes.items()}  # type: ignore[arg-type]
    return dataclasses.replace(step, shapes=shapes)


def plan(step: Step, device_bytes: int | None) -> Solution:
    """Search a plan with the loss as it is; any host will do."""
    return search(step.shapes["whole"], step.profile, device_bytes=device_bytes, host_bytes=None)


def budgets(step: Step) -> list[int]:
    """Return budgets in bytes."""
    largest = plan(step, None).prediction.peak_bytes
    try:
        plan(step, 1)
    except BudgetError as error:
        smallest = error.needed_bytes
    return [round(smallest + share * (largest - smallest)) for share in SHARES]


def measure(step: Step, device_bytes: int, repeats: int) -> tuple[float, int]:
    """Return the least processor time of a search in ms, and how many plans it simulated."""
    times = []
    gc.collect()
    gc.disable()  # going through the objects of PyTorch and the traced model takes 0.3 s, whenever it happens
    for _ in range(repeats):
        start = time.process_time()
        found = plan(step, device_bytes)
        times.append((time.process_time() - start) * 1e3)
    gc.enable()
    return min(times), found.simulated


def run(depths: list[int], repeats: int) -> common.Result:
    """Measure all models at all budgets."""
    hardware = HardwareProfile.load("h200")
    rows = []
    worst: dict[int, float] = {}
    for blocks in depths:
        for batch in BATCHES:
            step = step_of_llama(blocks, batch, hardware)
            for name, each in (("in_backward", step), ("clipping", clipping(step))):
                found = [measure(each, budget, repeats) for budget in budgets(each)]
                rows.append((blocks, batch, name, *(f"{ms:.0f} ({plans})" for ms, plans in found)))
                worst[blocks] = max(worst.get(blocks, 0.0), *(ms for ms, _ in found))
    header = ("blocks", "batch", "updates", *(f"{share:.0%}" for share in SHARES))
    notes = [
        f"processor ms of one search, the least of {repeats}, garbage collection aside; in brackets how many plans it "
        "simulated",
        "columns: the budget, from the smallest that works to everything on the device and kept",
        "Llamas with 7B's blocks, rows of 1024 tokens, H200",
    ]
    for blocks, ms in worst.items():
        target = f", target {TARGETS_MS[blocks]:.0f}" if blocks in TARGETS_MS else ""
        notes.append(f"{blocks} blocks: at most {ms:.0f} ms{target}")
    return common.Result("The search for a plan", "bench.search", "cpu", header, tuple(rows), tuple(notes))


def main() -> None:
    """Parse the command line, measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="32,96", help="numbers of blocks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", help="write the table to this file")
    arguments = parser.parse_args()
    result = run([int(each) for each in arguments.depths.split(",")], arguments.repeats)
    result.show(arguments.output)


if __name__ == "__main__":
    main()
