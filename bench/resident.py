"""A model that fits: prepared, against plain ``torch.compile`` and the same optimizer.

All arms train one Hugging Face model of ``bench.subject`` in bf16, in one process; rounds are interleaved and their
order rotates, a figure is the median over rounds. The plain arms use ``torch.optim.AdamW`` as it was passed to
``prepare``, and with ``fused=True``: their states are bf16, as PyTorch makes them for bf16 parameters. The prepared arm
keeps exact fp32 masters and states, about 28 bytes a parameter to read and write in an update where they move 14.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import common
from bench.states import fill
from bench.subject import SEQUENCE, Configuration, Run, Step, Subject, make_model, synchronize

TARGET = 1.03
"""Times the step of plain ``torch.compile`` with the same optimizer."""


def plain(configuration: Configuration, device: str, *, fused: bool) -> Step:
    """Return a step of a model that ``torch.compile`` compiles without a backend of its own."""
    model = make_model(configuration.model).to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        model.apply(fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)
    compiled: Any = torch.compile(model)
    return Step(configuration, compiled, optimizer, device)


def prepared(configuration: Configuration) -> tuple[Step, str]:
    """Return a step of the prepared model under the searched plan, and that plan in short."""
    run = Run(Subject(configuration), configuration)
    _, plan = run.shape_and_plan()
    policies = ", ".join(sorted(set(plan.policies)))
    persistent = plan.residency.count("persistent")
    return run.step, f"{policies}; {persistent} of {len(plan.residency)} chunks persistent; loss {plan.loss}"


def measure(arms: dict[str, Callable[[], None]], device: str, rounds: int, steps: int) -> dict[str, float]:
    """Return every arm's milliseconds a step, the median over rounds whose order rotates."""
    names, taken = list(arms), dict[str, list[float]]()
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            arms[name]()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                arms[name]()
            synchronize(device)
            taken.setdefault(name, []).append((time.perf_counter() - start) / steps * 1e3)
    return {name: common.median(each) for name, each in taken.items()}


def run(configuration: Configuration, rounds: int) -> common.Result:
    """Measure the arms of one configuration, whose cap is what all arms share."""
    device = common.default_device()
    arms: dict[str, Callable[[], None]] = {
        "torch.compile, AdamW": plain(configuration, device, fused=False),
        "torch.compile, AdamW(fused=True)": plain(configuration, device, fused=True),
    }
    for arm in arms.values():
        arm()
    arms["prepared"], plan = prepared(configuration)
    found = measure(arms, device, rounds, configuration.steps)
    base = found["torch.compile, AdamW"]
    tokens = configuration.batch * SEQUENCE
    rows = [(name, f"{ms:.1f}", f"{tokens / ms * 1e3:,.0f}", f"{ms / base:.3f}") for name, ms in found.items()]
    notes = (
        f"{configuration}; {rounds} rounds of {configuration.steps} steps; wanted: at most {TARGET} times",
        f"plan: {plan}",
    )
    header = ("arm", "ms a step", "tokens/s", "times")
    return common.Result("A model that fits", "bench.resident", device, header, tuple(rows), notes)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.resident", description=__doc__.splitlines()[0])
    parser.add_argument("configuration", help="MODEL:BATCH:CAP, as bench.accuracy takes it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", help="markdown file to write")
    arguments = parser.parse_args()
    found = run(Configuration.parse(arguments.configuration, arguments.steps), arguments.rounds)
    found.show(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
