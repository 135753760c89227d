"""Training a model several times the device's memory: protrain, the same plan with everything resident, and FSDP2.

Each arm is a process of its own, because a memory cap cannot be lifted again. All train one Llama of 3.43B parameters
(random weights, bf16, AdamW) on random tokens; a figure is the mean over the timed steps after warm-up. The protrain
arms update every parameter in every step with exact fp32 masters; FSDP2 keeps fp32 masters on the host
(``CPUOffloadPolicy``), computes in bf16 with gradient checkpointing and uses the fused CPU AdamW. The arms ``eval`` and
``eval-resident`` run the forward alone, with every chunk on the host or on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import common
from bench.timeline import Timeline, record_step

SIZES = {
    "3b": {"hidden_size": 3200, "num_hidden_layers": 26, "num_attention_heads": 32, "intermediate_size": 8640},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 160},
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    arm: str
    size: str = "3b"
    batch: int = 16
    sequence: int = 1024
    cap_gib: float = 24.0
    clip: bool = False
    warmup: int = 3
    steps: int = 5
    timeline: bool = False
    persistent: int = -1

    @property
    def resident(self) -> bool:
        """Whether everything is on the device, without a cap."""
        return self.arm.endswith("resident")

    @property
    def evaluates(self) -> bool:
        """Whether steps are evaluations."""
        return self.arm.startswith("eval")

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.sequence


WIDE = common.Shape(layers=16, sequence=1024)
"""3.5B parameters in blocks whose attention has a fused kernel under every mask (head size 128); for evaluation."""


def make_config(size: str) -> Any:
    """Return the transformers configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=32000, max_position_embeddings=4096, use_cache=False, **SIZES[size])


def make_meta_model(size: str, dtype: torch.dtype) -> nn.Module:
    """Return the model on the meta device."""
    if size == "wide":
        with torch.device("meta"):
            return common.Llama(WIDE).to(dtype)
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(make_config(size)).to(dtype)
    assert isinstance(model, nn.Module)
    return model


NOISE = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02


ROTARY = ("inv_freq", "original_inv_freq")


def rotary_frequencies(count: int) -> torch.Tensor:
    """Return the rotary frequencies, which are no saved weights."""
    return 1.0 / (10000.0 ** (torch.arange(count, dtype=torch.float32) / count))


def fill(module: nn.Module) -> None:
    """Give a module's own parameters weights: ones, or repeated noise for matrices (drawing takes minutes)."""
    if isinstance(module, common.Llama):
        angles = common.rotary_angles(module.shape)
        module.cos.copy_(angles.cos())
        module.sin.copy_(angles.sin())
    for parameter in module.parameters(recurse=False):
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), NOISE.numel()):
            part = flat[start : start + NOISE.numel()]
            part.copy_(NOISE[: part.numel()])
    for name, buffer in module.named_buffers(recurse=False):
        if name in ROTARY:
            buffer.copy_(rotary_frequencies(buffer.numel()))


@dataclasses.dataclass
class Trainee:
    """A model ready to train."""

    step: Callable[[], torch.Tensor]
    report: Callable[[], dict[str, Any]]


def make_protrain(job: Job, device: str) -> Trainee:
    """Return the model prepared by protrain, under the job's cap or (``resident``) with everything on the device."""
    import protrain_compile as protrain
    from protrain_compile.backend import protrain as backend

    model = make_meta_model(job.size, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forced = "persistent" if job.resident else "offloaded" if job.evaluates else None
    plan = protrain.Plan.uniform("recompute", forced)
    if job.persistent >= 0:
        chunks = SIZES[job.size]["num_hidden_layers"] + 2
        residency = ("persistent",) * job.persistent + ("offloaded",) * (chunks - job.persistent)
        plan = dataclasses.replace(plan, residency=residency)
    budget = None if job.resident else int(job.cap_gib * 2**30)
    model, optimizer = protrain.prepare(
        model,
        optimizer,
        device=device,
        plan=plan,
        init=fill,
        memory_budget=budget,
        max_grad_norm=1.0 if job.clip else None,
    )
    compiled = torch.compile(model, backend=backend, options={"schedule": "off" if job.resident else "print"})
    managed: Any = optimizer._managed  # type: ignore[attr-defined]

    def report() -> dict[str, Any]:
        residency = managed.packed
        counters = dataclasses.asdict(residency.counters)
        kinds = residency.store.spec.residency
        return {**counters, "mode": residency.mode, "persistent": kinds.count("persistent"), "chunks": len(kinds)}

    if job.evaluates:
        return Trainee(_evaluator(job, compiled, device), report)
    return Trainee(_trainer(job, compiled, optimizer, device, None), report)


def make_fsdp2(job: Job, device: str) -> Trainee:
    """Return the model under FSDP2 with CPU offload on one rank."""
    import torch.distributed as distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29501", rank=0, world_size=1)
    torch.cuda.set_device(0)
    model: Any = make_meta_model(job.size, torch.float32)
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.fill_(1.0) if parameter.dim() == 1 else _fill_local(parameter)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in ROTARY:
                    module._buffers[name] = rotary_frequencies(buffer.numel()).to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Trainee(_trainer(job, model, optimizer, device, model if job.clip else None), dict)


def _fill_local(parameter: Any) -> None:
    flat = parameter._local_tensor.view(-1)
    for start in range(0, flat.numel(), NOISE.numel()):
        part = flat[start : start + NOISE.numel()]
        part.copy_(NOISE[: part.numel()])


def _trainer(job: Job, model: Any, optimizer: Any, device: str, clipped: Any) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = 32000

    def step() -> torch.Tensor:
        tokens = torch.randint(0, vocabulary, (job.batch, job.sequence), generator=generator).to(device)
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clipped is not None:
            torch.nn.utils.clip_grad_norm_(clipped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _evaluator(job: Job, model: Any, device: str) -> Callable[[], torch.Tensor]:
    tokens = torch.randint(0, 32000, (job.batch, job.sequence), generator=torch.Generator().manual_seed(0)).to(device)

    @torch.no_grad()
    def step() -> torch.Tensor:
        loss: torch.Tensor = model(tokens, tokens)
        return loss

    return step


def link_gb_s(size_bytes: int = 1 << 30) -> float:
    """Return the rate of copying one pinned slab to the device, in GB/s."""
    from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory

    memory = HostMemory(CudaRegistrar())
    host = memory.allocate(size_bytes, "link").tensor(0, size_bytes, torch.uint8)
    device = torch.empty_like(host, device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return size_bytes / min(seconds) / 1e9


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process."""
    device = common.default_device()
    on_gpu = device.startswith("cuda")
    link = link_gb_s() if on_gpu and job.evaluates and not job.resident else 0.0
    if on_gpu:
        torch.cuda.empty_cache()
    if on_gpu and not job.resident:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(job.cap_gib * 2**30 / total)
    start = time.perf_counter()
    trainee = make_fsdp2(job, device) if job.arm == "fsdp2" else make_protrain(job, device)
    losses = []
    first_s = 0.0
    for number in range(job.warmup):
        losses.append(float(trainee.step()))
        if number == 0:
            first_s = time.perf_counter() - start
    before = trainee.report()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_gpu else 0
    device_allocations = torch.cuda.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
    _synchronize(on_gpu)
    start = time.perf_counter()
    stamps = []
    for _ in range(job.steps):
        losses.append(trainee.step())
        stamps.append(time.perf_counter() - start)
    _synchronize(on_gpu)
    seconds = (time.perf_counter() - start) / job.steps
    after = trainee.report()
    result = {
        "job": dataclasses.asdict(job),
        "step_s": seconds,
        "tokens_s": job.tokens / seconds,
        "first_s": first_s,
        "losses": [float(loss) for loss in losses],
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "launch_s": stamps,
        "state": after,
        "link_gb_s": link,
        "per_step": {k: (after[k] - before[k]) / job.steps for k in after if k.endswith("bytes") or k == "misses"},
    }
    if on_gpu:
        stats = torch.cuda.memory_stats()
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        result["retries"] = stats.get("num_alloc_retries", 0) - retries
        result["device_allocations"] = stats.get("num_device_alloc", 0) - device_allocations
    if job.timeline:
        result["timeline"] = dataclasses.asdict(record_step(trainee.step))
    return result


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def run_child(job: Job, timeout_s: float) -> dict[str, Any]:
    """Run one job in a child process; a failed one says why in ``error``."""
    command = [sys.executable, "-m", "bench.states", "--job", json.dumps(dataclasses.asdict(job))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"job": dataclasses.asdict(job), "error": f"took more than {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    schedule = [line for line in done.stdout.splitlines() if not line.startswith("RESULT ")]
    if not lines:
        return {"job": dataclasses.asdict(job), "error": (done.stderr.strip().splitlines() or ["no output"])[-12:]}
    return {**json.loads(lines[-1].removeprefix("RESULT ")), "schedule": schedule}


def describe(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the table row of one result."""
    job = result["job"]
    name = f"{job['arm']}{' + clipping' if job['clip'] else ''}"
    if "error" in result:
        return (name, "failed", "", "", "", "", "", "")
    return (
        name,
        f"{result['tokens_s']:,.0f}",
        f"{result['step_s'] * 1e3:,.0f}",
        f"{result.get('peak_gib', 0):.2f}",
        f"{result.get('reserved_gib', 0):.2f}",
        result.get("retries", 0),
        result.get("device_allocations", 0),
        f"{result['rss_gib']:.1f}",
    )


HEADER = ("arm", "tokens/s", "step ms", "peak GiB", "reserved GiB", "retries", "device allocations", "host GiB")


def main() -> int:
    """Run the arms one after another and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--arms", default="protrain,resident,fsdp2", help="comma list; +clip after a name clips gradients"
    )
    parser.add_argument("--size", choices=[*sorted(SIZES), "wide"], default="3b", help="wide: for eval arms")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--cap-gib", type=float, default=24.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--persistent", type=int, default=-1, help="how many chunks are persistent; -1: the default rule"
    )
    parser.add_argument("--timeline", action="store_true", help="profile one more step of the protrain arms")
    parser.add_argument("--timeout", type=float, default=170.0, help="seconds for one arm")
    parser.add_argument("--output", help="write a markdown result here")
    parser.add_argument("--json", help="write everything measured here")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print("RESULT " + json.dumps(measure(Job(**json.loads(given.job)))), flush=True)
        return 0
    if ("eval" in given.arms) != (given.size == "wide"):
        parser.error("--arms: eval and eval-resident go with --size wide, the other arms with the other sizes")
    results = []
    for name in given.arms.split(","):
        arm, _, clip = name.partition("+")
        job = Job(
            arm=arm,
            size=given.size,
            batch=given.batch,
            sequence=given.sequence,
            cap_gib=given.cap_gib,
            clip=clip == "clip",
            steps=given.steps,
            timeline=given.timeline and arm != "fsdp2",
            persistent=-1 if arm.endswith("resident") else given.persistent,
        )
        results.append(run_child(job, given.timeout))
        print(json.dumps({k: v for k, v in results[-1].items() if k not in ("schedule", "timeline")}), flush=True)
    for result in results:
        if "timeline" in result:
            print("\n".join(Timeline(**result["timeline"]).lines()))
    print(common.table(HEADER, [describe(result) for result in results]))
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if given.output:
        shape = f"Llama {given.size}, batch {given.batch}, sequence {given.sequence}"
        notes = (f"{shape}; cap {given.cap_gib:g} GiB, none for resident arms",)
        rows = tuple(describe(result) for result in results)
        result = common.Result("Model states", "bench.states", common.default_device(), HEADER, rows, notes)
        result.write(given.output)
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
