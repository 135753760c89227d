"""What the schedule itself costs: microseconds per node of a graph that runs as protrain's do.

A pure node is a pack and the call of an artefact that does nothing; a node that copies is a snapshot of a small
tensor. The graphs are generated and called as a compiled model's are; a figure is the slope between a short and a long
graph, so that what is there once per graph does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from bench import common
from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.compat import use_boxed_calls
from protrain_compile.program import Template

LENGTHS = (100, 1100)
VALUES_PER_CALL = 8
"""About what a block's forward takes and returns."""


def no_op_artefact() -> Artefact:
    """Return an artefact that hands its inputs back."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"primals_{i}") for i in range(VALUES_PER_CALL)]
    graph.output(tuple(inputs))
    module = fx.GraphModule({}, graph)
    artefact = Artefact(Template("t0", module, ("value",) * VALUES_PER_CALL, VALUES_PER_CALL), "forward", module)
    artefact.compile("eager", None)
    return artefact


def calls(length: int) -> fx.GraphModule:
    """Return a chain of ``length`` artefact calls, each with its pack and its items."""
    artefact, graph = no_op_artefact(), fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(VALUES_PER_CALL)]
    for _ in range(length):
        packed = graph.call_function(ops.pack, tuple(values))
        made = graph.call_function(artefact, (packed,), {"stream": "compute"})
        values = [graph.call_function(_item, (made, i)) for i in range(VALUES_PER_CALL)]
    graph.output(tuple(values))
    return use_boxed_calls(fx.GraphModule({}, graph))


def copies(length: int) -> fx.GraphModule:
    """Return ``length`` snapshots of one value after the other."""
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(VALUES_PER_CALL)]
    value = values[0]
    for _ in range(length):
        value = graph.call_function(ops.snapshot, (value,), {"stream": "compute"})
    graph.output((value,))
    return use_boxed_calls(fx.GraphModule({}, graph))


def _item(results: Sequence[Any], index: int) -> Any:
    return results[index]


def microseconds_per_node(make: Callable[[int], fx.GraphModule], device: str, rounds: int) -> float:
    """Return the median over ``rounds`` of the slope between the two lengths."""
    short, long = (make(length) for length in LENGTHS)
    values = [torch.ones(16, device=device) for _ in range(VALUES_PER_CALL)]
    slopes = []
    for _ in range(rounds):
        taken = [_run(module, values, device) for module in (short, long)]
        slopes.append((taken[1] - taken[0]) / (LENGTHS[1] - LENGTHS[0]) * 1e6)
    return common.median(slopes)


def _run(module: fx.GraphModule, values: list[torch.Tensor], device: str) -> float:
    boxed = list(values)
    with torch.no_grad():
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        module.forward(boxed)
        return time.perf_counter() - start  # of the launching thread: what the device does meanwhile does not count


def result(device: str, rounds: int) -> common.Result:
    """Measure both kinds of node; return the table."""
    rows = (
        ("pack and artefact call", f"{microseconds_per_node(calls, device, rounds):.2f}", "10"),
        ("snapshot", f"{microseconds_per_node(copies, device, rounds):.2f}", "40"),
    )
    notes = (
        f"artefacts that do nothing, {VALUES_PER_CALL} values in and out; snapshots of 16 numbers",
        f"medians of {rounds} rounds; slope between graphs of {LENGTHS[0]} and {LENGTHS[1]} nodes; "
        "time of the launching thread",
    )
    return common.Result(
        "Overhead per node", "bench.overhead", device, ("node", "microseconds", "target below"), rows, notes
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=common.default_device())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", help="markdown file to write")
    arguments = parser.parse_args()
    found = result(arguments.device, arguments.rounds)
    found.show(arguments.output)


if __name__ == "__main__":
    main()
