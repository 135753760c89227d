"""What swapping one block in five costs over keeping all, where compute hides the copies and where it cannot.

One compiled model, no optimizer: a step is forward, backward, and dropping the gradients. Arms differ in their Plan
alone and are timed in turns. The copy of a block's saved values takes as long whatever the block computes, so a shape
with less work per byte (short sequences do not help, narrow blocks do) shows the case that is not hidden.
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
from protrain_compile.plan import Plan, Policy
from protrain_compile.schedule import operation_of

HIDDEN = common.Shape(layers=10, batch=4)
EXPOSED = common.Shape(layers=10, width=1024, heads=16, intermediate=2816, batch=16)


@dataclasses.dataclass(frozen=True)
class Arm:
    """A plan by name."""

    name: str
    plan: Plan


def arms(blocks: int) -> tuple[Arm, ...]:
    """Return keep, one block of five swapped, every block swapped, every block recomputed."""
    fifth: tuple[Policy, ...] = tuple("swap" if i % 5 == 0 else "keep" for i in range(blocks))
    return (
        Arm("keep", Plan.uniform("keep")),
        Arm("swap 1 of 5", Plan(policies=fifth)),
        Arm("swap all", Plan.uniform("swap")),
        Arm("recompute all", Plan.uniform("recompute")),
    )


class Bench:
    """One model under several plans."""

    def __init__(self, shape: common.Shape, device: str, compile_mode: str) -> None:
        self.device = device
        self.model = common.make_model(shape, device, torch.bfloat16)
        self.batch = common.make_batch(shape, device)
        options: dict[str, Any] = {"schedule": "off", "compile": compile_mode}
        self.call: Any = torch.compile(self.model, backend=protrain, options=options)
        self.step()

    def step(self) -> None:
        """Run forward and backward, and drop the gradients."""
        self.call(*self.batch).backward()
        self.model.zero_grad(set_to_none=True)

    def use(self, plan: Plan) -> None:
        """Run by ``plan`` from now on."""
        protrain_compile.schedule(self.model).use(plan)

    def seconds(self, steps: int) -> float:
        """Return the time of one step."""
        self.step()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._synchronize()
        return (time.perf_counter() - start) / steps

    def peak_bytes(self) -> int:
        """Return the most that a step allocates; 0 on the CPU."""
        if not self.device.startswith("cuda"):
            return 0
        self._synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self._synchronize()
        return int(torch.cuda.max_memory_allocated())

    def moved_bytes(self) -> int:
        """Return the bytes that a step moves to the host."""
        (part,) = protrain_compile.schedule(self.model).parts
        nodes = part.schedule.graphs["forward"].graph.nodes
        return sum(operation.moved_bytes for node in nodes if (operation := operation_of(node)) is not None)

    def _synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def measure(
    name: str, shape: common.Shape, device: str, compile_mode: str, rounds: int, steps: int
) -> list[tuple[Any, ...]]:
    """Return a table row per arm; print each as soon as it is there."""
    bench, found = Bench(shape, device, compile_mode), arms(shape.layers)
    times: dict[str, list[float]] = {arm.name: [] for arm in found}
    for _ in range(rounds):
        for arm in found:
            bench.use(arm.plan)
            times[arm.name].append(bench.seconds(steps))
    base = common.median(times["keep"])
    rows = []
    for arm in found:
        bench.use(arm.plan)
        seconds = common.median(times[arm.name])
        row = (
            f"{name}: {arm.name}",
            f"{seconds * 1e3:.1f}",
            f"{(seconds / base - 1) * 100:+.1f}%",
            f"{bench.moved_bytes() / 2**30:.2f}",
            f"{bench.peak_bytes() / 2**30:.2f}",
        )
        print(*row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.swap", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=common.default_device())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps timed together")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, op by op: to try the benchmark out")
    parser.add_argument("--output", help="markdown file to write")
    arguments = parser.parse_args()
    shapes = {"tiny": common.TINY} if arguments.tiny else {"wide blocks": HIDDEN, "narrow blocks": EXPOSED}
    mode = "eager" if arguments.tiny else "inductor"
    rows: list[tuple[Any, ...]] = []
    for name, shape in shapes.items():
        rows += measure(name, shape, arguments.device, mode, arguments.rounds, arguments.steps)
    found = common.Result(
        "Swap against keep",
        "bench.swap",
        arguments.device,
        ("case", "step ms", "against keep", "GiB to the host", "peak GiB"),
        tuple(rows),
        tuple(f"{name}: {shape.describe()}" for name, shape in shapes.items()),
    )
    found.show(arguments.output)


if __name__ == "__main__":
    main()
