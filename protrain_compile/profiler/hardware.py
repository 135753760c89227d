"""The hardware profile: what this machine's device, link and host can do, measured in a few seconds.

=================  ==========================================================================================
figure             measured as
=================  ==========================================================================================
matmul_tflops      a square product by type, at the clock that lasts under full load, median
device_gb_per_s    a kernel that reads and writes every element of an array once
h2d, d2h           pinned copies on their own streams: alone, both ways, and both ways beside host updates
host_updates       the updater that training uses, from pinned memory, by format, with its threads and half of them
device updates     the same updates on the device, by format
launch_us          the launching thread's time for a tiny kernel, the device being busy
=================  ==========================================================================================

Updates are measured of the formats that are asked for: a model needs one, and each takes most of a second. The
collectives and the disk are not measured here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from protrain_compile.byte_text import format_size
from protrain_compile.profile import Format, HardwareProfile, HostUpdateRate, LinkRate
from protrain_compile.profiler.link import CpuLink, CudaLink, Link, Rates, measure_beside, measure_link
from protrain_compile.profiler.meter import Meter, lasting_ms, make_meter, time_call
from protrain_compile.profiler.templates import measuring
from protrain_compile.profiler.update_rates import (
    FORMATS,
    device_gparams_per_s,
    host_arrays,
    host_gparams_per_s,
    segments_of,
    thread_counts,
)
from protrain_compile.runtime.device_budget import DeviceMemoryError, Usage
from protrain_compile.runtime.host_budget import cgroup_folders, read_text
from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory
from protrain_compile.updates.host import make_host_updater

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much data is used: enough to be in no cache, and little enough to be quick.

    Attributes:
        product: Rows and columns of a product's factors.
        copy_bytes: Bytes of one copy over the link.
        array_bytes: Bytes of the array that the memory rate is told from.
        parameters: Parameters of an update.
        launches: Tiny kernels that are launched.
        heat_ms: How long products go on, to be timed at the clock that lasts.
    """

    product: int
    copy_bytes: int
    array_bytes: int
    parameters: int
    launches: int
    heat_ms: float

    @property
    def device_bytes(self) -> int:
        """About the most device memory that is taken at once: a product's factors in two types, or an update's."""
        return max(12 * self.product**2, 2 * self.copy_bytes, self.array_bytes, 20 * self.parameters)

    def halved(self) -> Sizes:
        """Return sizes that take half as much or less."""
        return dataclasses.replace(
            self,
            product=self.product // 2,
            copy_bytes=self.copy_bytes // 2,
            array_bytes=self.array_bytes // 2,
            parameters=self.parameters // 2,
        )


LARGE = Sizes(product=8192, copy_bytes=128 << 20, array_bytes=1 << 30, parameters=1 << 26, launches=500, heat_ms=500.0)
SMALL = Sizes(product=128, copy_bytes=1 << 20, array_bytes=1 << 20, parameters=1 << 16, launches=50, heat_ms=0.0)
"""For the CPU, and for tests."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class UpdateRates(NamedTuple):
    """Rates of updates by format: on the host, and in 1e9 parameters a second on the device."""

    host: tuple[HostUpdateRate, ...]
    device: dict[Format, float]


def measure_hardware(
    device: torch.device, sizes: Sizes | None = None, formats: Sequence[Format] = FORMATS
) -> HardwareProfile:
    """Return the HardwareProfile of ``device`` and its host.

    Args:
        device: A CUDA device (with its index, if not the current one), or the CPU.
        sizes: How much data is used; by default small on the CPU, and on a CUDA device large, but at most half of what
            is free. Where memory runs out all the same, half as much is tried, and so on.
        formats: Of which states updates are measured; at least one.

    Raises:
        DeviceMemoryError: If the device has no room for even the smallest sizes.
    """
    return _with_room(device, sizes, lambda sizes: _measure(device, sizes, formats))


def measure_updates(device: torch.device, formats: Sequence[Format], sizes: Sizes | None = None) -> UpdateRates:
    """Return the rates of updates of more formats; arguments and errors as of :func:`measure_hardware`."""

    def measure(sizes: Sizes) -> UpdateRates:
        _, _, host = _measure_host(device, sizes, formats)
        return UpdateRates(host, _on_device(make_meter(device), sizes, formats))

    return _with_room(device, sizes, measure)


def _with_room(device: torch.device, sizes: Sizes | None, measure: Callable[[Sizes], T]) -> T:
    """Return what ``measure`` makes with ``sizes``, or with the largest for which there is room."""
    while True:
        free = _free_bytes(device) if device.type == "cuda" else None
        sizes = sizes or (SMALL if free is None else fitting(LARGE, free))
        try:
            with measuring(device):
                return measure(sizes)
        except torch.OutOfMemoryError as error:
            if sizes.device_bytes <= SMALL.device_bytes:
                room = "no room" if free is None else f"{format_size(free)} free"
                raise DeviceMemoryError(
                    f"{device} has {room}, too little to measure what the machine can do "
                    f"({format_size(sizes.device_bytes)}): free some, or profile the machine once without other work "
                    "(protrain profile --hardware-only)"
                ) from error
        sizes = sizes.halved()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _free_bytes(device: torch.device) -> int:
    usage = Usage.now(device)
    return usage.available_bytes - usage.allocated_bytes


def fitting(sizes: Sizes, free_bytes: int) -> Sizes:
    """Return ``sizes``, halved until they take at most half of what is free, or are small."""
    while 2 * sizes.device_bytes > free_bytes and sizes.device_bytes > SMALL.device_bytes:
        sizes = sizes.halved()
    return sizes


def _measure(device: torch.device, sizes: Sizes, formats: Sequence[Format]) -> HardwareProfile:
    meter = make_meter(device)
    h2d, d2h, host_updates = _measure_host(device, sizes, formats)
    return HardwareProfile(
        name=device_name(device),
        device_bytes=device_bytes(device),
        host_bytes=host_bytes(),
        cores=len(os.sched_getaffinity(0)),
        matmul_tflops=_products(meter, sizes),
        device_gb_per_s=_memory_rate(meter, sizes),
        h2d=h2d,
        d2h=d2h,
        host_updates=host_updates,
        device_update_gparams_per_s=_on_device(meter, sizes, formats),
        launch_us=_launch_us(meter, sizes),
        devices=torch.cuda.device_count() if device.type == "cuda" else 1,
        source=f"Measured by protrain on {datetime.datetime.now(datetime.UTC).date()} with torch "
        f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}.",
    )


def device_name(device: torch.device) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def device_bytes(device: torch.device) -> int:
    """Return the device's memory; of the CPU, the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_bytes()


def host_bytes() -> int:
    """Return the host's memory, or what the process's control groups allow of it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (read_text(Path(folder) / name) or "" for folder in cgroup_folders("memory") for name in names)
    return min([*limits, *(int(text) for text in texts if text.strip().isdecimal())])


def _products(meter: Meter, sizes: Sizes) -> dict[str, float]:
    """Return the rates of products by type; the first heats the device, on which the others then begin."""
    heats = (sizes.heat_ms, *[sizes.heat_ms / 5] * (len(DTYPES) - 1))
    rates = {dtype: _product(meter, sizes.product, dtype, heat) for dtype, heat in zip(DTYPES, heats, strict=True)}
    return {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}


def _product(meter: Meter, size: int, dtype: torch.dtype, heat_ms: float) -> float:
    left, right = (torch.randn(size, size, device=meter.device).to(dtype) for _ in range(2))
    return 2 * size**3 / lasting_ms(meter, [lambda: left @ right], heat_ms)[0] / 1e9


def _memory_rate(meter: Meter, sizes: Sizes) -> float:
    array = torch.ones(sizes.array_bytes // 4, device=meter.device)
    return 2 * sizes.array_bytes / time_call(meter, lambda: array.mul_(0.999)).ms / 1e6


def _launch_us(meter: Meter, sizes: Sizes) -> float:
    """Return the time of the launching thread for one kernel; on the CPU the whole operation's."""
    tiny = torch.zeros(1, device=meter.device)
    meter.finish(lambda: tiny.add_(1.0))
    watch = meter.stopwatch()  # a CUDA device is kept busy from here on
    laps = []
    for _ in range(sizes.launches):
        start = time.perf_counter()
        tiny.add_(1.0)
        laps.append(time.perf_counter() - start)
    watch.laps_ms()
    return statistics.median(laps) * 1e6


def _on_device(meter: Meter, sizes: Sizes, formats: Sequence[Format]) -> dict[Format, float]:
    return {format: device_gparams_per_s(format, sizes.parameters, meter) for format in formats}


def _measure_host(
    device: torch.device, sizes: Sizes, formats: Sequence[Format]
) -> tuple[LinkRate, LinkRate, tuple[HostUpdateRate, ...]]:
    """Measure host updates, and the link, which shares the host's memory with them."""
    with _host(device, sizes.copy_bytes) as (memory, link):
        alone, both = measure_link(link)
        measured = [each for format in formats for each in _host_updates(format, sizes.parameters, memory, link)]
    beside, _ = measured[0]
    h2d, d2h = map(LinkRate, alone, both, beside)
    return h2d, d2h, tuple(rate for _, rate in measured)


@contextlib.contextmanager
def _host(device: torch.device, copy_bytes: int) -> Iterator[tuple[HostMemory, Link]]:
    """Yield memory on the host, pinned as in training, and the link to ``device``."""
    cuda = device.type == "cuda"
    memory = HostMemory(CudaRegistrar()) if cuda else HostMemory()
    link = CudaLink(device, copy_bytes) if cuda else CpuLink(copy_bytes)
    try:
        yield memory, link
    finally:
        if isinstance(link, CudaLink):
            link.close()
        memory.close()


def _host_updates(
    format: Format, parameters: int, memory: HostMemory, link: Link
) -> Iterator[tuple[Rates, HostUpdateRate]]:
    """Yield the rates of updates with the threads that training uses, then with fewer; and of copies beside them."""
    arrays = host_arrays(format, parameters, memory)
    states, gradient = arrays
    segments = segments_of(states)
    for threads in reversed(thread_counts()):
        with contextlib.closing(make_host_updater(threads)) as updater:
            alone = host_gparams_per_s(updater, arrays)
            beside, per_second = measure_beside(link, functools.partial(updater.update, states, gradient, segments))
        yield beside, HostUpdateRate(format, threads, alone, per_second * parameters / 1e9)
    memory.close()
