"""Host bytes a parameter takes: resident memory of a process that trains a prepared bf16 model, by mode of update.

Each arm is a process of its own. ``held`` is the growth of the process's resident memory from before the model is made
to after some steps, per trainable parameter, with every chunk on the host; ``highest`` that on the way, which includes
the first step, whose gradients wait in every mode. On the CPU the "device" is host memory too: chunk buffers and the
model's buffers, which a GPU would hold, are taken off by the bytes of their tensors; activations are not (``highest``).
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench import common

SHAPES = {
    "100m": common.Shape(layers=32, width=512, heads=8, intermediate=1376, vocabulary=1024, sequence=8, batch=1),
    "1b": common.Shape(layers=20, width=2048, heads=16, intermediate=5504, vocabulary=8192, sequence=128, batch=1),
    "tiny": dataclasses.replace(common.TINY, width=128),
}
ARMS: dict[str, dict[str, Any]] = {
    "in_backward": {},
    "at_step": {"max_grad_norm": 1.0},
    "fp32 accumulation": {"gradient_accumulation_steps": 2},
    "bf16 accumulation": {"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": torch.bfloat16},
}
LIMITS = {"in_backward": 12.5, "at_step": 14.5, "fp32 accumulation": 16.5}
"""Bytes a parameter that each arm is meant to stay below."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    arm: str
    size: str = "100m"
    device: str = "cpu"
    steps: int = 2


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the process's resident memory now, or the highest so far (``VmHWM``)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def measure(job: Job) -> dict[str, Any]:
    """Run one arm in this process."""
    narrow = dataclasses.replace(SHAPES[job.size], width=64, heads=1, intermediate=172)
    _train(job, narrow)  # what imports, graphs of this depth and the device's context take is not counted
    _trim()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the highest so far starts again
    before = resident_bytes()
    managed, parameters, own = _train(job, SHAPES[job.size])
    _trim()
    store = managed.packed.store
    return {
        "parameters": parameters,
        "resident": resident_bytes() - before - own,
        "peak": resident_bytes("VmHWM") - before - own,
        "allocated": store.pinned.held_bytes + store.pageable.held_bytes,
        "chunks": len(managed.layout.chunks),
        "mode": managed.packed.mode,
    }


def _train(job: Job, shape: common.Shape) -> tuple[Any, int, int]:
    """Train; return the owner of the states, the parameters, and the host bytes that a GPU would hold instead."""
    import protrain_compile
    from protrain_compile.backend import protrain as backend

    model: Any = common.make_model(shape, "cpu", torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters()) * 9 // 8
    plan = dataclasses.replace(protrain_compile.Plan.uniform("recompute", "offloaded"), chunk_bytes=block)
    model, optimizer = protrain_compile.prepare(model, optimizer, device=job.device, plan=plan, **ARMS[job.arm])
    compiled = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
    backwards = ARMS[job.arm].get("gradient_accumulation_steps", 1)
    for _ in range(job.steps):
        for _ in range(backwards):
            (compiled(*common.make_batch(shape, job.device)) / backwards).backward()
        optimizer.step()
        optimizer.zero_grad()
    managed: Any = optimizer._managed  # type: ignore[attr-defined]
    own = sum(buffer.bytes.nbytes for buffer in managed.packed._buffers.values())
    own += sum(buffer.nbytes for buffer in model.buffers())
    return managed, parameters, own if job.device == "cpu" else 0


def _trim() -> None:
    """Let the C library give back what it holds free."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def run_child(job: Job) -> dict[str, Any]:
    """Run one job in a child process.

    Raises:
        RuntimeError: If it fails; the message is its last words.
    """
    command = [sys.executable, "-m", "bench.host_memory", "--job", json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{job.arm}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


HEADER = (
    "update",
    "held B/parameter",
    "at most",
    "highest B/parameter",
    "allocated B/parameter",
    "mode of the last step",
)


def describe(arm: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of one arm."""
    each = [f"{found[name] / found['parameters']:.2f}" for name in ("resident", "peak", "allocated")]
    return (arm, each[0], str(LIMITS.get(arm, "-")), each[1], each[2], found["mode"])


def main() -> int:
    """Run the arms one after another; the exit status says whether each stayed below its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="100m")
    parser.add_argument("--device", default=common.default_device())
    parser.add_argument("--output", help="write a markdown result here")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print("RESULT " + json.dumps(measure(Job(**json.loads(given.job)))), flush=True)
        return 0
    found = {arm: run_child(Job(arm, given.size, given.device)) for arm in ARMS}
    some = found["in_backward"]
    notes = (
        f"{SHAPES[given.size].describe()}: {some['parameters'] / 1e6:.0f}M bf16 parameters, {some['chunks']} chunks, "
        "all on the host, AdamW; a chunk holds one block",
        "Held: growth of resident memory after two steps; highest: on the way, activations on the CPU included",
        "Allocated: what the chunk store holds. The rest of held is the process's, and was not taken apart: "
        f"{(some['resident'] - some['allocated']) / 1e6:.0f} MB in the first row",
    )
    rows = tuple(describe(arm, each) for arm, each in found.items())
    result = common.Result("Host memory", "bench.host_memory", given.device, HEADER, rows, notes)
    result.show(given.output)
    return int(any(found[arm]["resident"] > limit * found[arm]["parameters"] for arm, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
