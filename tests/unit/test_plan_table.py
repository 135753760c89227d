"""Predictions as text and data."""

from __future__ import annotations

import json

from protrain_compile.cost_model import Prediction
from protrain_compile.report.plan_table import (
    bytes_by_kind,
    chunks_text,
    memory_table,
    memory_text,
    policies_text,
    prediction_dict,
    time_text,
)

GIB = 1 << 30
FOUND = Prediction(
    step_ms=1100.0,
    compute_ms=1020.0,
    exposed_copies_ms=20.0,
    exposed_updates_ms=60.0,
    exposed_launches_ms=0.0,
    collectives_ms=0.0,
    peak_bytes=23 * GIB,
    peak_at="backward of epilogue",
    reserved_bytes=24 * GIB,
    device_bytes={"parameters": 10 * GIB, "states": 0, "activations": 12 * GIB, "inside calls": GIB},
    host_bytes=30 * GIB,
    host_kinds={"parameters": 20 * GIB, "states": 10 * GIB, "gradients": 0},
)


def test_time() -> None:
    text = "step 1.10 s = compute 1.02 s + exposed copies 20.0 ms + exposed updates 60.0 ms"
    assert time_text(FOUND, measured=True) == text
    assert time_text(FOUND, measured=False) == f"{text} (estimated)"


def test_memory() -> None:
    assert memory_text(FOUND) == "peak 23.0 GiB in backward of epilogue; host 30.0 GiB"


def test_bytes_by_kind_add_up() -> None:
    found = bytes_by_kind(FOUND)
    assert list(found) == ["parameters", "states", "activations", "workspace", "total"]
    assert found["states"] == (0, 10 * GIB)
    total = found.pop("total")
    assert tuple(map(sum, zip(*found.values(), strict=True))) == total


def test_table() -> None:
    lines = memory_table(FOUND).splitlines()
    assert lines[0].split() == ["bytes", "device", "host"]
    assert lines[2].split() == ["states", "-", "10.0", "GiB"]
    assert lines[-1].split() == ["total", "23.0", "GiB", "30.0", "GiB"]


def test_plan_texts() -> None:
    assert policies_text(["keep", "recompute", "keep"]).startswith("3 blocks: 2 keep, 1 recompute")
    found = chunks_text(["persistent", "offloaded"], 1 << 20, 3)
    assert found == "2 chunks of up to 1.00 MiB: 1 persistent, 1 offloaded, 0 split, 3 buffers"
    assert "buffers" not in chunks_text(["persistent"], 1 << 20, 3)
    assert "buffers" not in chunks_text(["persistent", "split"], 1 << 20, 3, ["states", "gradients"])
    for divided in ("gradients", "parameters"):
        assert "3 buffers" in chunks_text(["persistent"], 1 << 20, 3, [divided])


def test_json() -> None:
    found = json.loads(json.dumps(prediction_dict(FOUND, measured=False)))
    assert found["times"] == "estimated"
    assert found["bytes"]["workspace"] == {"device": GIB, "host": 0}
