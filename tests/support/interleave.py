"""Executes a recorded trace in other orders than it was issued in: what a device might do.

A stream runs its instructions in order; an instruction waits for its event, and for the launching thread. Two steps
that nothing orders can come either way. If one is to come late, let its *stream* be late: run it only when no other can
go on. Then whatever is not ordered behind it comes first: an instruction of the late stream runs only if another stream
waits for it or for a later one. So one order per late stream contains, for every pair of steps that nothing orders, the
one opposite to the order of issue; random orders add mixtures.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

from support.symbolic import Memory, SymbolicRuntime, Trace

STREAMS = ("caller", "compute", "h2d", "d2h", "host")


def orders(trace: Trace, *, seeds: int = 0) -> Iterator[list[int]]:
    """Yield orders in which a device may run a trace, as numbers of instructions: late streams, then random."""
    for late in STREAMS[1:]:
        yield _order(trace, lambda ready, late=late: min(ready, key=lambda stream: stream == late))
    for seed in range(seeds):
        draw = random.Random(seed)
        yield _order(trace, draw.choice)


def _order(trace: Trace, choose: object) -> list[int]:
    instructions = trace.instructions
    queues = {stream: [i for i, each in enumerate(instructions) if each.stream == stream] for stream in STREAMS}
    heads, done, found = dict.fromkeys(STREAMS, 0), [False] * len(instructions), []

    def is_ready(stream: str) -> bool:
        if heads[stream] == len(queues[stream]):
            return False
        each = instructions[queues[stream][heads[stream]]]
        return all(number is None or done[number] for number in (each.after, each.issued))

    while len(found) < len(instructions):
        stream = choose([each for each in STREAMS if is_ready(each)])  # type: ignore[operator]
        number = queues[stream][heads[stream]]
        heads[stream] += 1
        done[number] = True
        found.append(number)
    return found


def execute(trace: Trace, order: list[int], first: Memory) -> Memory:
    """Run instructions in an order; return memory afterwards."""
    memory = copy.deepcopy(first)
    for number in order:
        trace.instructions[number].run(memory)
    return memory


def observed(runtime: SymbolicRuntime, memory: Memory) -> tuple[object, ...]:
    """Return what a user sees: what every forward returned, and the parameters and states in the end."""
    outputs = tuple(value.read(memory) for run in runtime.runs for value in run.outputs if hasattr(value, "read"))
    homes = tuple(tuple(sorted(memory[cell.name].items())) for cell in runtime.store.parameters)
    return outputs, homes


def results(runtime: SymbolicRuntime, *, seeds: int = 0) -> Iterator[tuple[object, ...]]:
    """Yield what a user sees: in the order of issue, with each stream late, then in random orders."""
    first = runtime.store.first_values()
    trace = runtime.trace
    yield observed(runtime, execute(trace, list(range(len(trace.instructions))), first))
    for order in orders(trace, seeds=seeds):
        yield observed(runtime, execute(trace, order, first))
