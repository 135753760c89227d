"""The update benchmark runs and writes what it measured."""

import subprocess
import sys

import pytest

from protrain_compile.updates.native import load_library


@pytest.mark.skipif(load_library() is None, reason="no C compiler")
def test_tiny_benchmark_writes_its_table(tmp_path):
    output = tmp_path / "host_update.md"
    command = [sys.executable, "-m", "bench.host_update", "--tiny", "--rounds", "1", "--device", "cpu"]
    subprocess.run([*command, "--sweep", "1,2", "--output", str(output)], check=True, timeout=120)
    text = output.read_text()
    for part in ("host split, bf16 gradient", "torch._fused_adamw_ + casts", "by threads: 1:", "ratio", "Machine:"):
        assert part in text
