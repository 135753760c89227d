"""The loss in slices of tokens against the loss at once: time and peak memory of the last projection and cross-entropy.

A model without blocks and with a large vocabulary; forward and backward, both arms in turn in one process. The peak is
what one step allocates beyond what is alive before it. That it is the epilogue's, there is no block (with two of them,
recomputed, the backward of one was the peak of the sliced arm) and the embedding is frozen: its gradient, added up in
fp32, takes more than a sliced epilogue.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch

import protrain_compile
from bench import common
from protrain_compile.backend import protrain

LARGE = common.Shape(layers=0, width=4096, heads=32, vocabulary=128256, sequence=4096, batch=4)
TINY = dataclasses.replace(common.TINY, layers=0, vocabulary=2048)
ARMS = ("whole", "sliced")


@dataclasses.dataclass
class Arm:
    """One way to compute the loss, and what was measured of it."""

    loss: str
    step: Any
    times_ms: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    value: float = 0.0


def make_arm(loss: str, model: torch.nn.Module, batch: Any) -> Arm:
    """Compile ``model`` with the loss at once or in slices."""
    torch._dynamo.reset()
    plan = protrain_compile.Plan(loss=loss)
    compiled = torch.compile(model, backend=protrain, options={"plan": plan, "schedule": "off"})

    def step() -> float:
        value = compiled(*batch)
        value.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return float(value)

    return Arm(loss, step)


def measure(arm: Arm, device: str) -> None:
    """Run one step."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    start = time.perf_counter()
    arm.value = arm.step()
    arm.times_ms.append((time.perf_counter() - start) * 1e3)
    if cuda:
        arm.peak_bytes = torch.cuda.max_memory_allocated() - before


def run(device: str, *, tiny: bool, steps: int) -> common.Result:
    """Measure both arms in turn."""
    shape = TINY if tiny else LARGE
    model = common.make_model(shape, device, torch.float32 if tiny else torch.bfloat16)
    model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    batch = common.make_batch(shape, device)
    arms = [make_arm(loss, model, batch) for loss in ARMS]
    for arm in arms:
        arm.step()
    for _ in range(steps):
        for arm in arms:
            measure(arm, device)
    whole = arms[0]
    rows = tuple(
        (
            arm.loss,
            f"{common.median(arm.times_ms):.1f}",
            f"{common.median(arm.times_ms) / common.median(whole.times_ms):.3f}",
            f"{arm.peak_bytes / 2**30:.2f}",
            f"{arm.peak_bytes / whole.peak_bytes:.2f}" if whole.peak_bytes else "-",
            f"{arm.value:.6f}",
        )
        for arm in arms
    )
    header = ("loss", "step ms", "of whole", "peak GiB", "of whole", "value")
    what = "forward and backward, embedding frozen"
    notes = (f"{shape.describe()}; {what}; medians of {steps} interleaved steps",)
    return common.Result("The loss in slices of tokens", "bench.loss", device, header, rows, notes)


def main() -> None:
    """Parse the command line, measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=common.default_device())
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the benchmark")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", help="write the table to this file")
    arguments = parser.parse_args()
    result = run(arguments.device, tiny=arguments.tiny, steps=arguments.steps)
    result.show(arguments.output)


if __name__ == "__main__":
    main()
