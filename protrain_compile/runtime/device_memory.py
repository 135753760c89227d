"""PeakWatch: whether a step's peak is what was predicted.

It reads PyTorch's peak statistics and never resets them: they are the user's. A peak is therefore seen only where it is
the highest since the last reset, which a step that exceeds everything before it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from protrain_compile.byte_text import format_size

log = logging.getLogger("protrain_compile.memory")

WATCHED_STEPS = 5
"""Steps that are watched: the first ones allocate what later ones reuse. Reading the statistics takes about as long as
launching ten kernels."""


class PeakWatch:
    """Compares the first steps of one schedule with their prediction.

    Args:
        predicted_bytes: The predicted peak, what others hold included.
        reserve_bytes: How far the peak may exceed it without a word.
        read_peak: Returns the most that was allocated since the last reset.
    """

    def __init__(self, predicted_bytes: int, reserve_bytes: int, read_peak: Callable[[], int]) -> None:
        self._predicted_bytes = predicted_bytes
        self._reserve_bytes = reserve_bytes
        self._read_peak = read_peak
        self._before: int | None = None
        self._steps = 0
        self.measured_bytes: int | None = None

    def begin(self) -> None:
        """Note the peak before a forward."""
        if self._steps < WATCHED_STEPS:
            self._before = self._read_peak()

    def end(self) -> None:
        """Compare the peak after a backward (or an evaluation) with the prediction; warn once."""
        if self._before is None:
            return
        peak, before, self._before = self._read_peak(), self._before, None
        self._steps += 1
        if peak <= before:
            return
        self.measured_bytes = peak
        if peak > self._predicted_bytes + self._reserve_bytes:
            self._steps = WATCHED_STEPS
            log.warning(
                "a step's device memory peaked at %s, %s more than the predicted %s: pass a smaller memory_budget if "
                "it must stay within one",
                format_size(peak),
                format_size(peak - self._predicted_bytes),
                format_size(self._predicted_bytes),
            )


def watch_of(device: torch.device, predicted_bytes: int, reserve_bytes: int) -> PeakWatch | None:
    """Return a PeakWatch of a CUDA device; None for the CPU, whose memory has no statistics."""
    if device.type != "cuda":
        return None
    return PeakWatch(predicted_bytes, reserve_bytes, lambda: torch.cuda.max_memory_allocated(device))
