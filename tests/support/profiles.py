"""A machine with round figures, for tests of estimates."""

from __future__ import annotations

from typing import Any

from protrain_compile.profile import HardwareProfile, HostUpdateRate, LinkRate


def machine(**changes: Any) -> HardwareProfile:
    """A device of 1 TFLOPS in fp32, 10 in bf16, and 100 GB/s."""
    figures: dict[str, Any] = {
        "name": "round",
        "device_bytes": 8 << 30,
        "host_bytes": 32 << 30,
        "cores": 4,
        "matmul_tflops": {"float32": 1.0, "bfloat16": 10.0},
        "device_gb_per_s": 100.0,
        "h2d": LinkRate(10.0, 8.0, 5.0),
        "d2h": LinkRate(10.0, 8.0, 5.0),
        "host_updates": (HostUpdateRate("split", 3, 1.0, 0.5), HostUpdateRate("fp32", 3, 1.0, 0.5)),
        "device_update_gparams_per_s": {"split": 10.0, "fp32": 10.0},
        "launch_us": 5.0,
    }
    return HardwareProfile(**{**figures, **changes})
