"""Training throughput and peak memory of protrain beside ``torch.compile(model)``, in one process.

Every arm compiles the same model object, so that weights, batch and allocator are the same. Rounds are interleaved
and their order rotates; a figure is the median over rounds. There is no optimizer: a step is forward, backward, and
dropping the gradients. Losses and gradient norms of the arms are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import common
from protrain_compile.backend import protrain
from protrain_compile.plan import Plan
from protrain_compile.roles import RECOMPUTES

LOSS_TOLERANCE = 1e-3
"""Largest relative difference between the losses of two arms; the logits are bf16, which keeps 8 bits."""

GRADIENT_TOLERANCE = 2e-2
"""Largest relative difference between their gradient norms."""


@dataclasses.dataclass(eq=False)
class Arm:
    """One way to run the model, and what was measured of it."""

    name: str
    call: Callable[[Tensor, Tensor], Tensor]
    compile_s: float = 0.0
    loss: float = 0.0
    gradient_norm: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    step_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median over the rounds of the time of one step."""
        return common.median(self.step_s)


class Bench:
    """The model, its batch and the arms."""

    def __init__(self, shape: common.Shape, device: str, compile_mode: str) -> None:
        self.shape, self.device = shape, device
        self.model = common.make_model(shape, device, torch.bfloat16)
        self.batch = common.make_batch(shape, device)
        self.arms = [Arm("torch.compile", torch.compile(self.model))]
        for policy in ("keep", *reversed(RECOMPUTES)):
            options: dict[str, Any] = {"plan": Plan.uniform(policy), "schedule": "off", "compile": compile_mode}
            self.arms.append(Arm(f"protrain {policy}", torch.compile(self.model, backend=protrain, options=options)))

    def step(self, arm: Arm) -> Tensor:
        """Run forward and backward; leave the gradients."""
        loss = arm.call(*self.batch)
        loss.backward()
        return loss.detach()

    def drop_gradients(self) -> None:
        """Free the gradients, as ``zero_grad`` does."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def prepare(self, arm: Arm) -> None:
        """Compile the arm; note its loss and gradient norm."""
        start = time.perf_counter()
        loss = self.step(arm)
        self.synchronize()
        arm.compile_s = time.perf_counter() - start
        arm.loss = float(loss)
        squares = [
            parameter.grad.float().square().sum() for parameter in self.model.parameters() if parameter.grad is not None
        ]
        arm.gradient_norm = float(torch.stack(squares).sum().sqrt())
        self.drop_gradients()

    def measure_memory(self, arm: Arm) -> None:
        """Note the peaks of one step that starts from an empty cache."""
        if not self.device.startswith("cuda"):
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step(arm)
        self.synchronize()
        arm.peak_bytes = torch.cuda.max_memory_allocated()
        arm.reserved_bytes = torch.cuda.max_memory_reserved()
        self.drop_gradients()

    def time_round(self, arm: Arm, steps: int) -> None:
        """Time ``steps`` steps after one that refills the allocator's cache."""
        self.step(arm)
        self.drop_gradients()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(arm)
            self.drop_gradients()
        self.synchronize()
        arm.step_s.append((time.perf_counter() - start) / steps)


def run(bench: Bench, rounds: int, steps: int) -> list[str]:
    """Measure every arm; return what differs between them although it should not."""
    for arm in bench.arms:
        bench.prepare(arm)
        print(
            f"{arm.name}: first step {arm.compile_s:.1f} s, loss {arm.loss:.6f}, gradient norm {arm.gradient_norm:.5f}",
            flush=True,
        )
    for arm in bench.arms:
        bench.measure_memory(arm)
    for number in range(rounds):
        shift = number % len(bench.arms)
        for arm in bench.arms[shift:] + bench.arms[:shift]:
            bench.time_round(arm, steps)
    return differences(bench.arms)


def differences(arms: list[Arm]) -> list[str]:
    """Return a line per arm whose loss or gradient norm is not the first arm's."""
    first, *others = arms
    found = []
    for arm in others:
        for what, ours, theirs, tolerance in (
            ("loss", arm.loss, first.loss, LOSS_TOLERANCE),
            ("gradient norm", arm.gradient_norm, first.gradient_norm, GRADIENT_TOLERANCE),
        ):
            if not abs(ours - theirs) <= tolerance * abs(theirs):
                found.append(f"{what} of {arm.name} is {ours:.6f}, of {first.name} {theirs:.6f}")
    return found


def result(bench: Bench, rounds: int, steps: int) -> common.Result:
    """Return the table: one row per arm."""
    first = bench.arms[0]
    flops = common.model_flops(bench.shape)
    rows = []
    for arm in bench.arms:
        spread = (max(arm.step_s) - min(arm.step_s)) / arm.median_s
        rows.append(
            (
                arm.name,
                f"{bench.shape.tokens / arm.median_s:,.0f}",
                f"{flops / arm.median_s / 1e12:.4g}",
                f"{first.median_s / arm.median_s:.3f}",
                f"{spread:.1%}",
                _gib(arm.peak_bytes),
                f"{arm.peak_bytes / first.peak_bytes:.3f}" if first.peak_bytes else "-",
                _gib(arm.reserved_bytes),
                f"{arm.compile_s:.1f}",
                f"{arm.loss:.5f}",
            )
        )
    header = (
        "arm",
        "tokens/s",
        "TFLOPS",
        "speed",
        "spread",
        "peak GiB",
        "peak",
        "reserved GiB",
        "first step s",
        "loss",
    )
    notes = (
        f"{bench.shape.describe()}; bf16, forward and backward, no optimizer",
        f"medians of {rounds} interleaved rounds of {steps} steps; spread = (slowest - fastest round) / median; "
        "speed and peak are relative to torch.compile",
        "TFLOPS of the model: 6 x parameters x tokens + causal attention; recomputation does not count",
    )
    return common.Result("Throughput and peak memory", "bench.throughput", bench.device, header, tuple(rows), notes)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else "-"


def main() -> int:
    """Run the benchmark; return 1 if the arms disagree about loss or gradients."""
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=common.default_device())
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that the benchmark runs")
    parser.add_argument("--layers", type=int, help="number of blocks")
    parser.add_argument("--batch", type=int, help="sequences in a batch")
    parser.add_argument("--rounds", type=int, help="rounds per arm (10; 2 with --tiny)")
    parser.add_argument("--steps", type=int, help="steps per round (5; 2 with --tiny)")
    parser.add_argument(
        "--compile", choices=("inductor", "eager"), default="inductor", help="how protrain compiles its artefacts"
    )
    parser.add_argument("--output", help="markdown file to write")
    arguments = parser.parse_args()
    shape = common.TINY if arguments.tiny else common.Shape()
    changes = {name: value for name in ("layers", "batch") if (value := getattr(arguments, name)) is not None}
    rounds = arguments.rounds or (2 if arguments.tiny else 10)
    steps = arguments.steps or (2 if arguments.tiny else 5)
    bench = Bench(dataclasses.replace(shape, **changes), arguments.device, arguments.compile)
    wrong = run(bench, rounds, steps)
    found = result(bench, rounds, steps)
    found.show()
    for line in wrong:
        print(f"WRONG: {line}")
    if arguments.output and not wrong:
        found.write(arguments.output)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
