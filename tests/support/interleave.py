"""Executes a recorded trace in other orders than it was issued in: what a device might do.

A stream runs its instructions in order; an instruction waits for its event, and for the launching thread. Two steps
that nothing orders can come either way. If one is to come late, let its *stream* be late: run it only when no other can
go on. Then whatever is not ordered behind it comes first: an instruction of the late stream runs only if another stream
waits for it or for a later one. So one order per late stream contains, for every pair of steps that nothing orders, the
one opposite to the order of issue; random orders add mixtures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from support.symbolic import Memory, Result, Trace
from support.symbolic_runtime import SymbolicRuntime

STREAMS = ("caller", "compute", "h2d", "d2h", "gather", "host")


def orders(trace: Trace, *, seeds: int = 0) -> Iterator[list[int]]:
    """Yield orders in which a device may run a trace, as numbers of instructions: late streams, then random."""
    for late in STREAMS[1:]:
        device = _Device(trace)
        others = [stream for stream in STREAMS if stream != late]
        while device.busy:
            if not any(device.run_all(stream) for stream in others):
                device.run_one(late)
        yield device.order
    for seed in range(seeds):
        device, draw = _Device(trace), random.Random(seed)
        while device.busy:
            device.run_one(draw.choice(STREAMS))
        yield device.order


class _Device:
    """Runs a trace, stream by stream as it is told; only the order is noted."""

    def __init__(self, trace: Trace) -> None:
        self.order: list[int] = []
        self._instructions = trace.instructions
        self._done = [False] * len(trace.instructions)
        self._queues: dict[str, list[int]] = {stream: [] for stream in STREAMS}
        for number in reversed(range(len(trace.instructions))):
            self._queues[trace.instructions[number].stream].append(number)

    @property
    def busy(self) -> bool:
        """Whether instructions are left."""
        return len(self.order) < len(self._done)

    def run_one(self, stream: str) -> bool:
        """Run a stream's next instruction if it may run; return whether it did."""
        queue = self._queues[stream]
        if not queue:
            return False
        each = self._instructions[queue[-1]]
        if (each.after is not None and not self._done[each.after]) or (
            each.issued is not None and not self._done[each.issued]
        ):
            return False
        self._done[queue[-1]] = True
        self.order.append(queue.pop())
        return True

    def run_all(self, stream: str) -> bool:
        """Run a stream until it waits; return whether anything ran."""
        found = False
        while self.run_one(stream):
            found = True
        return found


def execute(trace: Trace, order: list[int], first: Memory) -> Memory:
    """Run instructions in an order; return memory afterwards."""
    memory = {name: dict(values) for name, values in first.items()}
    for number in order:
        trace.instructions[number].run(memory)
    return memory


def observed(runtime: SymbolicRuntime, memory: Memory) -> tuple[object, ...]:
    """Return what a user sees: what every forward returned, and the parameters and states in the end."""
    returned = [value for run in runtime.runs for value in run.outputs if isinstance(value, Result)]
    outputs = tuple(value.read(memory) for value in (*returned, *runtime.read_by_others))
    homes = tuple(tuple(sorted(memory[cell.name].items())) for cell in runtime.store.parameters)
    return outputs, homes


def results(runtime: SymbolicRuntime, *, seeds: int = 0) -> Iterator[tuple[object, ...]]:
    """Yield what a user sees: in the order of issue, with each stream late, then in random orders."""
    first = runtime.store.first_values()
    trace = runtime.trace
    yield observed(runtime, execute(trace, list(range(len(trace.instructions))), first))
    for order in orders(trace, seeds=seeds):
        yield observed(runtime, execute(trace, order, first))
