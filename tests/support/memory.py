"""Run a schedule's graphs on real tensors and measure what is alive at every operation."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.program import fake_value
from protrain_compile.runtime.streams import CpuStreams
from protrain_compile.runtime.swap import SwapSpace
from protrain_compile.schedule import Schedule


def example(value: Any) -> Any:
    """Return real data like a fake value; integers are small enough to be indices."""
    if not isinstance(value, Tensor):
        return int(value)
    real = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return real.copy_(torch.randn(value.shape) if value.dtype.is_floating_point else torch.randint(0, 2, value.shape))


@contextlib.contextmanager
def watching_swaps(before: Callable[[], object], made: Callable[[Iterable[Tensor]], object]) -> Iterator[None]:
    """Call ``before`` ahead of every operation on swapped values, and ``made`` with the device memory that it uses."""

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(SwapSpace, name)

        def run(space: SwapSpace, argument: Any) -> Any:
            before()
            result = original(space, argument)
            if name == "swap_out":
                made(space._leaving[result.number][1])
            elif name != "release":
                made(result.bundles if name == "reload" else result)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name in ("swap_out", "release", "reload", "wait_reload"):
            stack.enter_context(mock.patch.object(SwapSpace, name, watched(name)))
        yield


class Recorder:
    """Counts the bytes of tracked tensors that are alive whenever an operation starts."""

    def __init__(self, held: Iterable[Any]) -> None:
        self.held = {each.untyped_storage().data_ptr() for each in held if isinstance(each, Tensor)}
        self.tracked: list[weakref.ref[Tensor]] = []
        self.before: list[int] = []

    def track(self, values: Iterable[Any]) -> None:
        self.tracked += [weakref.ref(each) for each in values if isinstance(each, Tensor)]

    def live_bytes(self) -> int:
        alive = (each for ref in self.tracked if (each := ref()) is not None)
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
        return sum(size for pointer, size in storages.items() if pointer not in self.held)

    @contextlib.contextmanager
    def recording(self, module: fx.GraphModule) -> Iterator[None]:
        """Record the operations of ``module`` while it runs."""
        call = Artefact.__call__

        def recorded_call(artefact: Artefact, boxed: list[Any], **keywords: Any) -> Any:
            self.before.append(self.live_bytes())
            results = call(artefact, boxed, **keywords)
            self.track(results)
            return results

        def recorded_snapshot(value: Tensor, **keywords: Any) -> Tensor:
            self.before.append(self.live_bytes())
            copied = ops.snapshot(value, **keywords)
            self.track([copied])
            return copied

        copies = module.graph.find_nodes(op="call_function", target=ops.snapshot)
        for node in copies:
            node.target = recorded_snapshot
        module.recompile()
        swaps = watching_swaps(lambda: self.before.append(self.live_bytes()), self.track)
        with mock.patch.object(Artefact, "__call__", recorded_call), swaps:
            yield
        for node in copies:
            node.target = ops.snapshot
        module.recompile()


def run_recorded(module: fx.GraphModule, arguments: list[Any], recorder: Recorder) -> tuple[list[Any], list[int]]:
    """Run a schedule graph; return its results, and the bytes alive after each operation."""
    recorder.before.clear()
    gc.collect()
    with torch.no_grad(), recorder.recording(module):
        results = list(module.forward(arguments))
    return results, [*recorder.before[1:], recorder.live_bytes()]


def measured_live_bytes(schedule: Schedule) -> dict[str, list[int]]:
    """Return the measured bytes alive after each operation of each graph, without what the caller holds."""
    torch.manual_seed(0)
    primals = [example(fake_value(node)) for node in schedule.program.primals]
    recorder = Recorder(primals)
    name = "forward" if schedule.program.differentiable else "inference"
    executors = [SwapSpace(CpuStreams())] if schedule.swapped_bytes else []
    results, live = run_recorded(schedule.entry, [*executors, *primals], recorder)
    found = {name: live}
    if name == "forward":
        inputs = schedule.backward_inputs
        kept = results[len(results) - inputs.num_kept :]
        results.clear()
        tangents = [example(fake_value(schedule.program.tangents[i])) for i in inputs.tangents]
        recorder.track(tangents)
        boxed = [*executors, *(primals[i] for i in inputs.primals), *kept, *tangents]
        kept.clear()
        tangents.clear()
        _, found["backward"] = run_recorded(schedule.graphs["backward"], boxed, recorder)
    return found
