"""A short training run under ``compute-sanitizer``: no bad access, no race in a kernel, nothing read before written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
ERROR = 86
"""Exit code that the tool is told to end with if it found something."""

RUN = """
import dataclasses, torch
from torch import nn
import protrain_compile as protrain
from protrain_compile.backend import protrain as backend

def linear(layer, x):
    # Hopper's kernels for 16-bit products write by the bulk copy engine, which initcheck does not see: it reports
    # plain eager products as well.
    return layer(x) if x.dtype == torch.float32 else (x.unsqueeze(-2) * layer.weight).sum(-1) + layer.bias

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return x + linear(self.down, nn.functional.gelu(linear(self.up, self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()

for policy, kinds, dtype in (
    ("recompute", ("offloaded",) * 4, torch.bfloat16),
    ("keep", ("persistent", "offloaded", "split", "persistent"), torch.float32),
):
    torch._dynamo.reset()
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = dataclasses.replace(protrain.Plan.uniform(policy), chunk_bytes=75_000, buffers=3)
    if dtype == torch.float32:
        plan = dataclasses.replace(plan, residency=kinds)
    else:
        plan = dataclasses.replace(plan, uniform_residency="offloaded")
    model, optimizer = protrain.prepare(model, optimizer, plan=plan, device="cuda")
    compiled = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
    for step in range(4):
        loss = compiled(torch.randn(8, 64, dtype=dtype).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    optimizer._managed.close()
print("trained")
"""


def sanitizer() -> str | None:
    """Return the tool's path; None where it is not installed."""
    roots = [Path(root) / "bin" for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    return shutil.which("compute-sanitizer") or next(
        (str(root / "compute-sanitizer") for root in roots if (root / "compute-sanitizer").is_file()), None
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_clean(tool: str) -> None:
    path = sanitizer()
    if path is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    # Without torch's cache every tensor is an allocation of its own, whose bounds and contents the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = [path, "--tool", tool, "--error-exitcode", str(ERROR), "--print-limit", "5", sys.executable, "-c", RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "trained" in done.stdout
