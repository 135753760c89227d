"""A plan and what its step is predicted to cost, as text: lines, a table of bytes by kind, and JSON-ready data."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from protrain_compile.chunks import RESIDENCIES
from protrain_compile.cost_model import Prediction
from protrain_compile.plan import POLICIES
from protrain_compile.report.units import format_bytes, format_ms
from protrain_compile.shards import SHARDINGS

KINDS = ("parameters", "gradients", "states", "activations", "inputs", "buffers", "chunk buffers", "workspace")
"""Rows of the table. Workspace is what calls allocate inside, with results that are dropped at once."""

RENAMED = {"inside calls": "workspace"}


def policies_text(policies: Sequence[str]) -> str:
    """Return ``26 blocks: 8 keep, 18 recompute``; policies that no block has are left out."""
    counts = collections.Counter(policies)
    shown = ", ".join(f"{counts[policy]} {policy}" for policy in POLICIES if counts[policy])
    return f"{len(policies)} blocks: {shown}" if policies else "no blocks"


def chunks_text(
    residency: Sequence[str], largest_bytes: int, buffers: int, sharding: Sequence[str] | None = None
) -> str:
    """Return ``27 chunks of up to 236 MiB: 9 persistent, 18 offloaded, 0 split, 4 buffers``.

    Buffers are left out where nothing takes one; a persistent chunk does if ranks divide more of it than its states.
    """
    kinds = collections.Counter(residency)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in RESIDENCIES)
    divided = any(
        lives == "persistent" and of != "states" for lives, of in zip(residency, sharding or (), strict=False)
    )
    shown = f", {buffers} buffers" if kinds["offloaded"] or divided else ""
    return f"{len(residency)} chunks of up to {format_bytes(largest_bytes)}: {counts}{shown}"


def sharding_text(sharding: Sequence[str]) -> str:
    """Return ``divided: parameters of 20, gradients of 7``; states always are."""
    kinds = collections.Counter(sharding)
    counts = [f"{kind} of {kinds[kind]}" for kind in reversed(SHARDINGS) if kinds[kind]]
    return f"divided: {', '.join(counts)}"


def time_text(prediction: Prediction, *, measured: bool) -> str:
    """Return ``step 1.10 s = compute 1.02 s + exposed copies 20 ms``; parts that take no time are left out."""
    parts = {
        "compute": prediction.compute_ms,
        "exposed copies": prediction.exposed_copies_ms,
        "exposed updates": prediction.exposed_updates_ms,
        "exposed launches": prediction.exposed_launches_ms,
        "collectives": prediction.collectives_ms,
    }
    shown = " + ".join(f"{name} {format_ms(ms)}" for name, ms in parts.items() if ms >= 0.005)
    text = f"step {format_ms(prediction.step_ms)} = {shown or 'nothing'}"
    return text if measured else f"{text} (estimated)"


def memory_text(prediction: Prediction) -> str:
    """Return ``peak 22.9 GiB in backward of epilogue; host 31.4 GiB``."""
    text = f"peak {format_bytes(prediction.peak_bytes)} in {prediction.peak_at}"
    return f"{text}; host {format_bytes(prediction.host_bytes)}" if prediction.host_bytes else text


def bytes_by_kind(prediction: Prediction) -> dict[str, tuple[int, int]]:
    """Return the bytes on device (at the peak) and host of every kind that takes any, and of all together."""
    device = {RENAMED.get(name, name): size for name, size in prediction.device_bytes.items()}
    names = dict.fromkeys((*KINDS, *device, *prediction.host_kinds))
    found = {name: (device.get(name, 0), prediction.host_kinds.get(name, 0)) for name in names}
    rows = {name: sizes for name, sizes in found.items() if any(sizes)}
    return rows | {"total": (prediction.peak_bytes, prediction.host_bytes)}


def memory_table(prediction: Prediction) -> str:
    """Return the bytes by kind as a table."""
    rows = [
        (name, *(format_bytes(size) if size else "-" for size in sizes))
        for name, sizes in bytes_by_kind(prediction).items()
    ]
    return tabulate(rows, headers=("bytes", "device", "host"), tablefmt="plain", colalign=("left", "right", "right"))


def prediction_dict(prediction: Prediction, *, measured: bool) -> dict[str, Any]:
    """Return a prediction as JSON-ready data."""
    return {
        "times": "measured" if measured else "estimated",
        "step_ms": prediction.step_ms,
        "compute_ms": prediction.compute_ms,
        "exposed_copies_ms": prediction.exposed_copies_ms,
        "exposed_updates_ms": prediction.exposed_updates_ms,
        "exposed_launches_ms": prediction.exposed_launches_ms,
        "collectives_ms": prediction.collectives_ms,
        "peak_bytes": prediction.peak_bytes,
        "peak_at": prediction.peak_at,
        "reserved_bytes": prediction.reserved_bytes,
        "host_bytes": prediction.host_bytes,
        "bytes": {name: {"device": d, "host": h} for name, (d, h) in bytes_by_kind(prediction).items()},
    }
