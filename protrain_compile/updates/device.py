"""Executes updates on the device that holds the states: one Triton kernel a chunk, or torch operations.

A launch covers all segments of a chunk that share their scalars, which is the whole chunk unless it holds parameters
of several param groups. Scalars travel as launch arguments and the segments' bounds in a small table that is uploaded
once per layout, so that a step copies nothing to the device: such a copy would wait behind prefetches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from protrain_compile.updates.definition import Segment, StepScalars, check_segments, reference_update
from protrain_compile.updates.formats import ChunkStates, StateFormat

log = logging.getLogger(__name__)

Ranges = tuple[tuple[int, int], ...]

LAYOUTS_KEPT = 4096
"""Layouts cached per device: far more than chunks, so that only a model whose skipped parameters vary reaches it."""


class Layout(NamedTuple):
    """Where a launch's segments lie: an int64 table on the device, its rows, and the blocks to launch."""

    table: Tensor
    rows: int
    blocks: int


class DeviceUpdater:
    """Updates chunks on one device; on the current stream where it is a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernel = load_kernel() if device.type == "cuda" else None
        self._layouts: dict[Ranges, Layout] = {}

    def update(
        self,
        states: ChunkStates,
        gradient: Tensor,
        segments: Sequence[Segment],
        multiplier: Tensor | None = None,
    ) -> None:
        """Update a chunk in place.

        Args:
            states: The chunk's states, on this device.
            gradient: Flat gradient of the same length, bf16, fp16 or fp32.
            segments: Ascending, disjoint ranges with their scalars.
            multiplier: One fp32 on the device that scales the gradient as well, for a clipping coefficient that
                the host does not know; on top of the scalars' own factor.
        """
        if self._kernel is None:
            reference_update(states, gradient, segments if multiplier is None else _scaled(segments, multiplier))
            return
        check_segments(states, gradient, segments)
        for scalars, ranges in _by_scalars(segments).items():
            self._launch(self._kernel, states, gradient, scalars, ranges, multiplier)

    def _launch(
        self,
        kernel: ModuleType,
        states: ChunkStates,
        gradient: Tensor,
        scalars: StepScalars,
        ranges: Ranges,
        multiplier: Tensor | None,
    ) -> None:
        layout = self._layout(kernel, ranges)
        split = states.format is StateFormat.SPLIT
        kind, *values = scalars
        with torch.cuda.device(self._device):
            kernel.update_kernel[(layout.blocks,)](
                states.param.view(torch.int16) if split else states.param,
                *(states.companion, states.moment1, states.moment2, states.moment2_max),
                *(gradient, layout.table, multiplier, *values),
                kind=int(kind),
                state_format=int(states.format),
                rows=layout.rows,
                block_size=kernel.BLOCK,
            )

    def _layout(self, kernel: ModuleType, ranges: Ranges) -> Layout:
        """Return the layout for ``ranges``, uploaded when first asked for."""
        found = self._layouts.get(ranges)
        if found is None:
            if len(self._layouts) >= LAYOUTS_KEPT:
                self._layouts.clear()
            rows, blocks = table_rows(ranges, kernel.BLOCK, kernel.ALIGNMENT)
            found = Layout(torch.tensor(rows, dtype=torch.int64, device=self._device), len(rows), blocks)
            self._layouts[ranges] = found
        return found


@functools.cache
def load_kernel() -> ModuleType | None:
    """Return the module with the Triton kernel; None, with one logged reason, without triton."""
    try:
        from protrain_compile.updates import device_kernel
    except ImportError as error:
        log.warning("device updates run in torch operations, several times slower: %s; install triton", error)
        return None
    return device_kernel


def table_rows(ranges: Ranges, block: int, alignment: int) -> tuple[list[list[int]], int]:
    """Return the kernel's table, padded to a power of two, and the number of blocks of ``block`` elements."""
    rows, blocks = [], 0
    for begin, end in ranges:
        rows.append([blocks, begin, end])
        blocks += -(-(end - begin // alignment * alignment) // block)
    padding = (1 << (len(rows) - 1).bit_length()) - len(rows)
    return rows + [[blocks, 0, 0]] * padding, blocks


def _by_scalars(segments: Sequence[Segment]) -> dict[StepScalars, Ranges]:
    """Group the segments' ranges by scalars, adjacent ones joined; empty ranges vanish."""
    groups: dict[StepScalars, list[tuple[int, int]]] = {}
    for begin, end, scalars in segments:
        ranges = groups.setdefault(scalars, [])
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        elif begin < end:
            ranges.append((begin, end))
    return {scalars: tuple(ranges) for scalars, ranges in groups.items() if ranges}


def _scaled(segments: Sequence[Segment], multiplier: Tensor) -> list[Segment]:
    scale = float(multiplier)
    return [
        Segment(begin, end, scalars._replace(gradient_factor=scalars.gradient_factor * scale))
        for begin, end, scalars in segments
    ]
