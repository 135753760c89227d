"""Compile time over the depth of a Llama-like model, beside ``torch.compile(model)``.

Every configuration runs in a process of its own with an empty Inductor cache. Before the clock starts the process
compiles a small function, so that one-off costs (headers, worker processes) are in no figure. A compile time is that of
the first forward and backward, less that of a later one.

``--clock processor`` counts processor seconds instead, of the process and the compilers that it starts: the clock for a
machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench import common

INDUCTOR = "torch.compile"
PROTRAIN = "protrain"
SHAPES = {
    "cpu": common.Shape(width=128, heads=4, intermediate=344, vocabulary=512, sequence=64, batch=2),
    "cuda": common.Shape(width=1024, heads=16, intermediate=2752, vocabulary=4096, sequence=512, batch=2),
}
"""Small: compile time hardly depends on sizes."""


def processor_s() -> float:
    """Return the processor seconds of this process and of the children that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


CLOCKS = {"wall": time.perf_counter, "processor": processor_s}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one process found; times in seconds. Only protrain has the parts."""

    total_s: float
    passes_s: float = 0.0
    artefacts_s: float = 0.0
    artefacts: int = 0
    templates: int = 0

    @property
    def tracing_s(self) -> float:
        """Dynamo, AOTAutograd, and what else is neither pass nor artefact."""
        return self.total_s - self.passes_s - self.artefacts_s


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all processes share: the device, how artefacts are compiled, and the clock."""

    device: str
    compile_mode: str
    clock: str


def measure(arm: str, depth: int, settings: Settings) -> Measured:
    """Compile and run a model of ``depth`` blocks in this process."""
    device, clock = settings.device, CLOCKS[settings.clock]
    warm_up(device)
    shape = dataclasses.replace(SHAPES[device.partition(":")[0]], layers=depth)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model, batch = common.make_model(shape, device, dtype), common.make_batch(shape, device)
    with timed_artefacts(clock) as artefacts_s:
        call = compiled(model, arm, settings.compile_mode)
        first_s, later_s = (step(call, batch, device, clock) for _ in range(2))
    if arm == INDUCTOR:
        return Measured(first_s - later_s)
    import protrain_compile

    (part,) = protrain_compile.schedule(model).parts
    return Measured(
        total_s=first_s - later_s,
        passes_s=sum(record.ms for record in part.graph.records) / 1e3,
        artefacts_s=sum(artefacts_s),
        artefacts=part.graph.compiled_artefacts,
        templates=len(part.graph.program.templates),
    )


def warm_up(device: str) -> None:
    """Compile something small, so that what Inductor does once per machine is done."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    torch.compile(lambda x: (x.sin() @ x).softmax(-1).sum())(x).backward()
    torch._dynamo.reset()


def compiled(model: torch.nn.Module, arm: str, compile_mode: str) -> Any:
    """Return ``model`` compiled by ``arm``; nothing is compiled before the first call."""
    if arm == INDUCTOR:
        return torch.compile(model)
    from protrain_compile.backend import protrain

    return torch.compile(model, backend=protrain, options={"schedule": "off", "compile": compile_mode})


def step(call: Any, batch: tuple[torch.Tensor, torch.Tensor], device: str, clock: Callable[[], float]) -> float:
    """Run one forward and backward; return the seconds that it took."""
    start = clock()
    call(*batch).backward()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - start


@contextlib.contextmanager
def timed_artefacts(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Collect the seconds that protrain spends on compiling artefacts."""
    from protrain_compile.artefacts import ArtefactSet

    found: list[float] = []
    original = ArtefactSet.compile

    def timed(artefacts: ArtefactSet) -> None:
        start = clock()
        original(artefacts)
        found.append(clock() - start)

    ArtefactSet.compile = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ArtefactSet.compile = original  # type: ignore[method-assign]


def measure_in_process(arm: str, depth: int, settings: Settings) -> Measured:
    """Run ``measure`` in a fresh process with an empty cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        command = [sys.executable, "-m", "bench.compile_time", "--child", arm, "--depths", str(depth)]
        command += ["--device", settings.device, "--compile", settings.compile_mode, "--clock", settings.clock]
        if settings.clock == "processor":
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compilers are then children that are waited for
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def result(depths: list[int], settings: Settings) -> common.Result:
    """Measure every depth with both arms; return the table."""
    rows = []
    for depth in depths:
        theirs = measure_in_process(INDUCTOR, depth, settings)
        ours = measure_in_process(PROTRAIN, depth, settings)
        parts = (ours.tracing_s, ours.passes_s, ours.artefacts_s, ours.total_s, theirs.total_s)
        rows.append((depth, ours.artefacts, *(f"{each:.1f}" for each in parts), f"{ours.total_s / theirs.total_s:.2f}"))
        print(f"depth {depth}: protrain {ours.total_s:.1f} s, torch.compile {theirs.total_s:.1f} s", flush=True)
    header = ("blocks", "artefacts", "tracing s", "passes s", "artefacts s", "total s", "torch.compile s", "ratio")
    shape = SHAPES[settings.device.partition(":")[0]]
    notes = (
        f"Llama-like blocks, width {shape.width}, sequence {shape.sequence}; "
        f"artefacts compiled with {settings.compile_mode}",
        "each figure from a process of its own with empty caches, after a warm-up; first step less a later one",
        "passes: wall clock; the others: "
        + ("processor seconds, one compile thread" if settings.clock == "processor" else "wall clock"),
        "tracing: Dynamo, AOTAutograd and the rest, which grow with depth as the passes do; artefacts do not",
    )
    return common.Result("Compile time", "bench.compile_time", settings.device, header, tuple(rows), notes)


def main() -> None:
    """Run the benchmark, or one configuration of it in a child process."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_time", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=common.default_device())
    parser.add_argument("--depths", default="4,8,16,32,48", help="numbers of blocks, separated by commas")
    parser.add_argument(
        "--compile", choices=("inductor", "eager"), default="inductor", help="how artefacts are compiled"
    )
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="what is counted")
    parser.add_argument("--output", help="markdown file to write")
    parser.add_argument("--child", choices=(INDUCTOR, PROTRAIN), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    depths = [int(each) for each in arguments.depths.split(",")]
    settings = Settings(arguments.device, arguments.compile, arguments.clock)
    if arguments.child:
        measured = measure(arguments.child, depths[0], settings)
        print(json.dumps(dataclasses.asdict(measured)))
        return
    found = result(depths, settings)
    found.show(arguments.output)


if __name__ == "__main__":
    main()
