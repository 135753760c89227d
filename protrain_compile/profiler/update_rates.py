"""Rates of optimizer updates (AdamW) on the host and on the device, measured with the updaters that training uses."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import get_args

import torch

from protrain_compile.profile import Format
from protrain_compile.profiler.meter import Meter, time_call
from protrain_compile.runtime.host_memory import HostMemory, layout_offsets
from protrain_compile.updates.definition import AdamRule, Segment
from protrain_compile.updates.device import DeviceUpdater
from protrain_compile.updates.formats import ChunkStates, StateFormat
from protrain_compile.updates.host import HostUpdater
from protrain_compile.updates.threads import update_threads

log = logging.getLogger("protrain_compile.profiler")

FORMATS: tuple[Format, ...] = get_args(Format)
GRADIENTS = {"split": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
"""The type in which a format's gradients cross the link."""

WARM_UPS = 3
"""Rounds that do not count: threads that slept are slower at first, on a virtual machine by a third."""

ROUNDS = 7

BUSY = 1.5
"""How many times as long as the second fastest round the second slowest takes where others load the host; alone, on a
virtual machine, the fastest of 69 rounds took an eighth less than the median."""

TOLD_MS = 1.0
"""Shorter rounds, of small arrays, differ by themselves."""

Arrays = tuple[ChunkStates, torch.Tensor]


def host_arrays(format: Format, parameters: int, memory: HostMemory) -> Arrays:
    """Return states and gradient on the host, in one slab, as training has them."""
    dtypes = _dtypes(format)
    offsets, total = layout_offsets([parameters * dtype.itemsize for dtype in dtypes])
    slab = memory.allocate(total, "measuring updates")
    parts = [slab.tensor(offset, parameters, dtype) for offset, dtype in zip(offsets, dtypes, strict=True)]
    return _arrays(format, parts)


def device_arrays(format: Format, parameters: int, device: torch.device) -> Arrays:
    """Return states and gradient on the device."""
    return _arrays(format, [torch.zeros(parameters, dtype=dtype, device=device) for dtype in _dtypes(format)])


def _dtypes(format: Format) -> list[torch.dtype]:
    kept = StateFormat[format.upper()]
    companion = [] if kept.companion_dtype is None else [kept.companion_dtype]
    return [GRADIENTS[format], torch.float32, torch.float32, kept.param_dtype, *companion]


def _arrays(format: Format, parts: Sequence[torch.Tensor]) -> Arrays:
    gradient, moment1, moment2, parameter, *companion = parts
    gradient.fill_(0.01)
    parameter.fill_(0.5)
    return ChunkStates(parameter, companion[0] if companion else None, moment1, moment2), gradient


def segments_of(states: ChunkStates) -> list[Segment]:
    """Return one segment over all of ``states``, for the third step of AdamW."""
    return [Segment(0, states.param.numel(), AdamRule(lr=1e-4, weight_decay=0.1).scalars(3))]


def thread_counts() -> list[int]:
    """Return the numbers of threads to measure: what training uses, and half of it."""
    most = update_threads()
    return sorted({max(1, most // 2), most})


def host_gparams_per_s(updater: HostUpdater, arrays: Arrays) -> float:
    """Return the rate of an updater alone, in 1e9 parameters a second: the median of a few rounds."""
    states, gradient = arrays
    segments = segments_of(states)
    seconds = []
    for _ in range(WARM_UPS + ROUNDS):
        start = time.perf_counter()
        updater.update(states, gradient, segments)
        seconds.append(time.perf_counter() - start)
    counted = sorted(seconds[WARM_UPS:])
    fast_ms, slow_ms = counted[1] * 1e3, counted[-2] * 1e3
    if fast_ms > TOLD_MS and slow_ms > BUSY * fast_ms:
        log.warning(
            "updates on the host took between %.1f and %.1f ms: other work loads it, and plans from such rates may be "
            "poor; measure again when it is over (protrain profile --hardware-only --refresh)",
            fast_ms,
            slow_ms,
        )
    return states.param.numel() / statistics.median(counted) / 1e9


def device_gparams_per_s(format: Format, parameters: int, meter: Meter) -> float:
    """Return the rate of updates on the device, in 1e9 parameters a second."""
    states, gradient = device_arrays(format, parameters, meter.device)
    updater, segments = DeviceUpdater(meter.device), segments_of(states)
    return parameters / time_call(meter, lambda: updater.update(states, gradient, segments)).ms / 1e6
