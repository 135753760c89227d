"""The searched plan against ten that somebody could write by hand, at the same cap.

One model is prepared for the searched plan's residency. Every plan by hand is a mix that people use, in which as many
blocks have the better policy as fit: the cost model counts them here, as patience would elsewhere::

    python -m bench.hand_plans llama:16:16 --json hand.json --output hand.md

``bench.accuracy --read`` shows and draws what ``--json`` writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench import common
from bench.accuracy import Recorder, off, predicted_peak
from bench.subject import Configuration, Run, Subject
from protrain_compile.cost_model import simulate
from protrain_compile.errors import ProtrainError
from protrain_compile.runtime.device_budget import RESERVE_SHARE

HEADER = ("plan", "step ms", "to searched", "predicted", "off", "peak GiB", "predicted", "policies")
HOST_SHARE = 0.9
"""Of the free host memory, what a plan may take more than the searched one."""

Keep = Callable[[dict[str, Any]], None]

Mix = Callable[[int, int], list[str]]
"""Policies of the blocks in order, by how many blocks have the better one and how many blocks there are."""


def last(better: str, rest: str) -> Mix:
    """Return the mix with the better policy at the end."""
    return lambda count, blocks: [rest] * (blocks - count) + [better] * count


def first(better: str, rest: str) -> Mix:
    """Return the mix with the better policy at the start."""
    return lambda count, blocks: [better] * count + [rest] * (blocks - count)


def spread(better: str, rest: str) -> Mix:
    """Return the mix with the better policy at equal distances."""
    return lambda count, blocks: [
        better if (i + 1) * count // blocks > i * count // blocks else rest for i in range(blocks)
    ]


MIXES: dict[str, Mix] = {
    "all recomputed": last("recompute", "recompute"),
    "keep at the end, else recompute": last("keep", "recompute"),
    "keep spread, else recompute": spread("keep", "recompute"),
    "swap first, else recompute": first("swap", "recompute"),
    "swap spread, else recompute": spread("swap", "recompute"),
    "recompute_products at the end, else recompute": last("recompute_products", "recompute"),
    "recompute_pointwise at the end, else recompute": last("recompute_pointwise", "recompute"),
    "recompute_pointwise at the end, else products": last("recompute_pointwise", "recompute_products"),
    "keep at the end, else products": last("keep", "recompute_products"),
    "swap_products first, else products": first("swap_products", "recompute_products"),
}


def hand_plans(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield name and plan of each mix, with as much of the better policy as fits; others are left out."""
    from protrain_compile.profiler.measure import profile_program

    shape, searched = run.shape_and_plan()
    profile = profile_program(run.part.schedule.program, run.part.schedule.artefacts)
    room = int(run.configuration.cap_gib * 2**30 * (1 - RESERVE_SHARE)) - run.other_bytes
    taken = simulate(shape, profile, searched).host_bytes
    free = run.subject.managed.preparation.host_budget.available_bytes()
    host_room = math.inf if free is None else taken + int(free * HOST_SHARE)
    blocks = len(searched.policies)
    for name, mix in MIXES.items():
        for count in range(blocks, -1, -1):
            plan = dataclasses.replace(searched, policies=tuple(mix(count, blocks)))
            predicted = simulate(shape, profile, plan)
            if predicted.peak_bytes <= room and predicted.host_bytes <= host_room:
                yield name, plan
                break


def measure_hand_plans(run: Run, keep: Keep) -> None:
    """Measure the plans by hand; ``keep`` is told each result at once."""
    for name, plan in list(hand_plans(run)):
        try:
            run.use(plan)
            keep(run.measure(f"{run.configuration}, {name}"))
        except (torch.OutOfMemoryError, ProtrainError) as error:
            keep({"configuration": f"{run.configuration}, {name}", "error": [str(error)]})


def describe(result: dict[str, Any], searched: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of one result."""
    if "error" in result:
        return (result["configuration"], "failed", *[""] * (len(HEADER) - 3), result["error"][-1][:60])
    predicted = result["prediction"]["step_ms"]
    return (
        result["configuration"],
        f"{result['step_ms']:,.0f}",
        f"{result['step_ms'] / searched['step_ms'] - 1:+.1%}",
        f"{predicted:,.0f}",
        f"{off(predicted, result['step_ms']):+.1%}",
        f"{result['peak_bytes'] / 2**30:.2f}",
        f"{predicted_peak(result) / 2**30:.2f}",
        result["plan"]["policies"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configuration", help="MODEL:BATCH:CAP, as for bench.accuracy")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--json", help="write everything measured here")
    parser.add_argument("--output", help="write the table to this file")
    given = parser.parse_args(arguments)
    results = Recorder(lambda result: describe(result, results.found[0]), given.json)
    configuration = Configuration.parse(given.configuration, given.steps)
    run = Run(Subject(configuration), configuration)
    results.keep(run.measure("searched"))
    measure_hand_plans(run, results.keep)
    rows = tuple(describe(each, results.found[0]) for each in results.found)
    note = f"{given.configuration} (model, batch, cap in GiB); residency and buffers as searched, in all"
    result = common.Result("Plans by hand", "bench.hand_plans", common.default_device(), HEADER, rows, (note,))
    result.show(given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
