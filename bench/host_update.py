"""Optimizer updates on the host and the device, beside torch's fused AdamW and the memory bandwidth that bounds them.

All arms run in one process on the same arrays, interleaved; a figure is the median over rounds. The bandwidth is that
of a kernel that reads and writes every element of an array once, with the same threads: an update cannot be faster
than its bytes at this rate. An arm's bytes are those that its arithmetic must read and write.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import common
from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory, Slab, layout_offsets
from protrain_compile.updates.definition import AdamRule, Segment
from protrain_compile.updates.device import DeviceUpdater
from protrain_compile.updates.formats import ChunkStates
from protrain_compile.updates.host import NativeUpdater, make_host_updater
from protrain_compile.updates.native import load_library

RULE = AdamRule(lr=1e-4, weight_decay=0.1)
LAUNCHES = 2000
REGISTERED_BYTES = 2 << 30


@dataclasses.dataclass
class Arm:
    """One thing to time: ``bytes_each`` is what it reads and writes per parameter."""

    name: str
    bytes_each: float
    call: Callable[[], Any]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def rate(self, parameters: int) -> float:
        """Parameters per second, median over the rounds."""
        return parameters / common.median(self.seconds)


class Arrays:
    """The arrays of all formats for one number of parameters; formats share what has one type."""

    DTYPES = (*(torch.float32,) * 3, torch.bfloat16, torch.int16, torch.float16, torch.bfloat16, torch.float32)

    def __init__(self, parameters: int, make: Callable[[int, torch.dtype], Tensor]) -> None:
        self.parameters = parameters
        arrays = [make(parameters, dtype) for dtype in self.DTYPES]
        self.master, self.moment1, self.moment2, self.high, self.remainder, self.half = arrays[:6]
        self.gradient, self.gradient32 = arrays[6:]
        for array in arrays:
            array.zero_()
        self.master.fill_(0.5)
        self.high.fill_(0.5)
        self.gradient.fill_(0.01)
        self.gradient32.fill_(0.01)

    @property
    def split(self) -> ChunkStates:
        """bf16 parameters with int16 remainders."""
        return ChunkStates(self.high, self.remainder, self.moment1, self.moment2)

    @property
    def fp32(self) -> ChunkStates:
        """fp32 parameters."""
        return ChunkStates(self.master, None, self.moment1, self.moment2)

    @property
    def fp16(self) -> ChunkStates:
        """fp16 parameters with fp32 masters."""
        return ChunkStates(self.half, self.master, self.moment1, self.moment2)

    def updates(self, update: Callable[[ChunkStates, Tensor, Sequence[Segment]], None], where: str) -> list[Arm]:
        """Return an arm per format."""
        segments = [Segment(0, self.parameters, RULE.scalars(3))]
        return [
            Arm(f"{where} split, bf16 gradient", 26, lambda: update(self.split, self.gradient, segments)),
            Arm(f"{where} fp32, fp32 gradient", 28, lambda: update(self.fp32, self.gradient32, segments)),
            Arm(f"{where} fp16 + master, bf16 gradient", 28, lambda: update(self.fp16, self.gradient, segments)),
        ]


def slab_arrays(memory: HostMemory, parameters: int) -> Arrays:
    """Return arrays that lie in one slab, as the runtime's do."""
    offsets, total = layout_offsets([parameters * dtype.itemsize for dtype in Arrays.DTYPES])
    slab, remaining = memory.allocate(total, "benchmark"), iter(offsets)
    return Arrays(parameters, lambda count, dtype: slab.tensor(next(remaining), count, dtype))


class FusedPeer:
    """``torch._fused_adamw_`` on fp32 masters, and the casts that a bf16 model needs around it."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.step = torch.tensor(3.0)

    def update(self) -> None:
        """Update with the fp32 gradient."""
        arrays = self.arrays
        torch._fused_adamw_(
            *([arrays.master], [arrays.gradient32], [arrays.moment1], [arrays.moment2], [], [self.step]),
            lr=RULE.lr,
            beta1=RULE.beta1,
            beta2=RULE.beta2,
            weight_decay=RULE.weight_decay,
            eps=RULE.eps,
            amsgrad=False,
            maximize=False,
        )

    def update_with_casts(self) -> None:
        """Widen the bf16 gradient, update, narrow the parameters."""
        self.arrays.gradient32.copy_(self.arrays.gradient)
        self.update()
        self.arrays.high.copy_(self.arrays.master)


def host_arms(updater: NativeUpdater, arrays: Arrays, small_pages: Arrays) -> list[Arm]:
    """Return the host's arms; the first is the bandwidth."""
    peer = FusedPeer(arrays)
    return [
        Arm("host bandwidth (read and write fp32)", 8, lambda: updater.scale(arrays.master)),
        *arrays.updates(updater.update, "host"),
        *small_pages.updates(updater.update, "4 KiB pages: host")[:1],
        Arm("torch._fused_adamw_ + casts for bf16", 40, peer.update_with_casts),
        Arm("torch._fused_adamw_, fp32 gradient", 28, peer.update),
        Arm("accumulate bf16 into fp32", 10, lambda: updater.accumulate(arrays.gradient32, arrays.gradient)),
        Arm("sum of squares of bf16", 2, lambda: updater.square_sum(arrays.gradient)),
    ]


def device_arms(parameters: int) -> list[Arm]:
    """Return the device's arms; the first is the bandwidth."""
    device = torch.device("cuda")
    arrays = Arrays(parameters, lambda count, dtype: torch.empty(count, dtype=dtype, device=device))
    updater = DeviceUpdater(device)

    def synchronized(call: Callable[..., object]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            call(*arguments)
            torch.cuda.synchronize()

        return run

    bandwidth = Arm("device bandwidth (read and write fp32)", 8, synchronized(lambda: arrays.master.mul_(0.999)))
    return [bandwidth, *arrays.updates(synchronized(updater.update), "device")]


def measure(arms: Sequence[Arm], rounds: int) -> None:
    """Time every arm once per round, after a round that is not counted; the order rotates."""
    for arm in arms:
        arm.call()
    for number in range(rounds):
        shift = number % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            start = time.perf_counter()
            arm.call()
            arm.seconds.append(time.perf_counter() - start)


def rows(arms: Sequence[Arm], parameters: int) -> list[tuple[str, ...]]:
    """Return the table's rows; the first arm is what the others' bytes are compared with."""
    bandwidth = arms[0].rate(parameters) * arms[0].bytes_each
    peer = next((arm.rate(parameters) for arm in arms if "casts" in arm.name), None)
    found: list[tuple[str, ...]] = []
    for arm in arms:
        rate = arm.rate(parameters)
        bytes_rate = rate * arm.bytes_each
        compared = f"{rate / peer:.2f}" if peer is not None and arm.bytes_each > 20 else "-"
        found.append(
            (arm.name, f"{rate / 1e9:.2f}", f"{bytes_rate / 1e9:.1f}", f"{bytes_rate / bandwidth:.0%}", compared)
        )
    return found


def sweep(library: Any, arrays: Arrays, threads: Sequence[int], rounds: int) -> list[str]:
    """Return a note with the split update's and the bandwidth's rates for each number of threads."""
    found = []
    for count in threads:
        updater = NativeUpdater(library, count)
        bandwidth = Arm("bandwidth", 8, functools.partial(updater.scale, arrays.master))
        arms = [bandwidth, *arrays.updates(updater.update, "host")[:1]]
        measure(arms, rounds)
        updater.close()
        rates = [arm.rate(arrays.parameters) * arm.bytes_each for arm in arms]
        found.append(f"{count}: {rates[1] / 26e9:.2f} G/s ({rates[1] / rates[0]:.0%} of {rates[0] / 1e9:.0f} GB/s)")
    return [f"split update by threads: {'; '.join(found)}"] if found else []


def launches_beside_update(updater: NativeUpdater, arrays: Arrays, device: str) -> str:
    """Return a note: the time of LAUNCHES tiny operations alone, and beside updates on another thread."""
    tiny = torch.zeros(16, device=device)

    def launch() -> float:
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            tiny.add_(1)
        elapsed = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.synchronize()
        return elapsed

    stop, started = threading.Event(), threading.Event()
    segments = [Segment(0, arrays.parameters, RULE.scalars(3))]

    def work() -> None:
        while not stop.is_set():
            started.set()
            updater.update(arrays.split, arrays.gradient, segments)

    launch()
    alone = common.median([launch() for _ in range(9)])
    worker = threading.Thread(target=work)
    worker.start()
    started.wait()
    beside = common.median([launch() for _ in range(9)])
    stop.set()
    worker.join()
    return (
        f"{LAUNCHES} tiny {device} operations: {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside an update "
        f"on {updater.threads} threads, ratio {beside / alone:.2f}"
    )


def slab_times(device: str) -> list[str]:
    """Return notes on how long a slab takes to touch and, for CUDA, to register, with and without huge pages."""
    found = []
    _allocation_s(HostMemory())  # a virtual machine gets its memory from the host when it is first used
    for huge_pages in (True, False):
        touch_s = _allocation_s(HostMemory(None, huge_pages=huge_pages))
        note = f"{touch_s:.2f} s to map and touch"
        if device == "cuda":
            note += f", {_allocation_s(HostMemory(CudaRegistrar(), huge_pages=huge_pages)) - touch_s:.2f} s to register"
        found.append(f"a slab of 2 GiB, {'huge' if huge_pages else '4 KiB'} pages: {note}")
    return found


def _allocation_s(memory: HostMemory) -> float:
    start = time.perf_counter()
    slab: Slab = memory.allocate(REGISTERED_BYTES, "benchmark")
    elapsed = time.perf_counter() - start
    assert slab.size_bytes == REGISTERED_BYTES
    memory.close()
    return elapsed


def run(arguments: argparse.Namespace, updater: NativeUpdater) -> common.Result:
    """Measure everything; return the table."""
    parameters = 1 << (18 if arguments.tiny else 27)
    rounds = arguments.rounds or (2 if arguments.tiny else 10)
    registrar = CudaRegistrar() if arguments.device == "cuda" else None
    torch.set_num_threads(updater.threads)
    memory, small_memory = HostMemory(registrar), HostMemory(registrar, huge_pages=False)
    arrays = slab_arrays(memory, parameters)
    arms = host_arms(updater, arrays, slab_arrays(small_memory, parameters))
    measure(arms, rounds)
    table = rows(arms, parameters)
    if arguments.device == "cuda":
        on_device = device_arms(parameters)
        measure(on_device, rounds)
        table += rows(on_device, parameters)
    notes = [
        f"{parameters:,} parameters, AdamW, {updater.threads} threads for all host arms; medians of {rounds} "
        "interleaved rounds; of bandwidth = GB/s relative to the first row of host or device",
        *sweep(load_library(), arrays, arguments.threads_swept, rounds),
        launches_beside_update(updater, arrays, arguments.device),
    ]
    notes += [] if arguments.tiny else slab_times(arguments.device)
    header = ("arm", "G parameters/s", "GB/s", "of bandwidth", "speed against fused + casts")
    return common.Result("Optimizer updates", "bench.host_update", arguments.device, header, tuple(table), tuple(notes))


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_update", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=common.default_device())
    parser.add_argument("--threads", type=int, help="threads of an update (default: what the runtime uses)")
    parser.add_argument("--tiny", action="store_true", help="few parameters, to see that the benchmark runs")
    parser.add_argument("--rounds", type=int, help="rounds per arm (10; 2 with --tiny)")
    parser.add_argument(
        "--sweep",
        dest="threads_swept",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[],
        help="numbers of threads to compare, such as 8,12,14,16",
    )
    parser.add_argument("--output", help="markdown file to write")
    arguments = parser.parse_args()
    updater = make_host_updater(arguments.threads)
    if not isinstance(updater, NativeUpdater):
        print("no C compiler: there is nothing to compare")
        return 1
    found = run(arguments, updater)
    updater.close()
    found.show(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
