"""Many steps on a CUDA device: equal to fp32 masters, bounded reserved memory, and host memory as resident bytes."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import protrain_compile as protrain
from protrain_compile.backend import protrain as backend

pytestmark = pytest.mark.gpu
WIDTH = 64
HOST_WIDTH = 2048
OPTIONS = {"compile": "eager", "schedule": "off"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Takes tokens, returns the loss of predicting each from itself."""

    def __init__(self, blocks: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def batch(seed: int, length: int = 32) -> Tensor:
    return torch.randint(0, 256, (4, length), generator=torch.Generator().manual_seed(seed)).cuda()


def prepare(model: nn.Module, residency: str = "offloaded", chunk_bytes: int = 70_000, **arguments: Any) -> Any:
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    plan = protrain.Plan(
        uniform_policy="recompute",
        uniform_residency=residency,
        chunk_bytes=chunk_bytes,  # type: ignore[arg-type]
    )
    model, optimizer = protrain.prepare(model, optimizer, plan=plan, device="cuda", **arguments)
    return torch.compile(model, backend=backend, options=OPTIONS), optimizer


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("residency", ["offloaded", "persistent", "split"])
def test_two_hundred_steps_equal_fp32_masters(residency: str) -> None:
    torch.manual_seed(0)
    model = Stack().bfloat16()
    plain, masters = copy.deepcopy(model).cuda(), copy.deepcopy(model).float().cuda()
    compiled, expected = torch.compile(plain, backend=backend, options=OPTIONS), []
    reference = torch.optim.AdamW(masters.parameters(), lr=1e-3, eps=1e-4)
    for step in range(200):
        loss = compiled(batch(step % 11))
        loss.backward()
        expected.append(loss.detach())
        for p, master in zip(plain.parameters(), masters.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        reference.step()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    trained, optimizer = prepare(model, residency)
    losses = []
    for step in range(200):
        loss = trained(batch(step % 11))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert relative(torch.stack(losses), torch.stack(expected)) < 1e-3
    # As one vector: biases near zero alone differ by 6e-3 even between torch's foreach and fused AdamW.
    states = optimizer.state_dict()["state"]
    found = torch.cat([states[number]["protrain_master"].flatten() for number in range(len(states))])
    assert relative(found, torch.cat([master.detach().cpu().flatten() for master in masters.parameters()])) < 1e-3
    optimizer._managed.close()


def test_varying_lengths_bound_reserved_memory() -> None:
    """Case 18: after a first round of every length nothing grows; streams, buffers and landings are made once."""
    torch.manual_seed(0)
    trained, optimizer = prepare(Stack(width=256), chunk_bytes=1_100_000)
    lengths = [16 * (1 + (7 * number) % 20) for number in range(300)]

    def step(seed: int, length: int) -> None:
        trained(batch(seed, length)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, length in enumerate(lengths[:60]):
        step(number, length)
    managed = optimizer._managed
    made = _made_once(managed)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for number, length in enumerate(lengths[60:]):
        step(number, length)
    torch.cuda.synchronize()
    assert _made_once(managed) == made
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    # The allocator takes segments of 2 and 20 MiB; several sizes keep some of each.
    assert torch.cuda.memory_reserved() <= 1.1 * before + (40 << 20)
    assert torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated() < before / 2 + (64 << 20)
    managed.close()


def _made_once(managed: Any) -> list[int]:
    residency = managed.packed
    streams = [stream.cuda_stream for stream in residency.streams._side.values()]
    memory = [buffer.bytes for buffer in residency._buffers.values()] + list(residency.store.landings)
    return streams + [each.data_ptr() for each in [*memory, *residency.store.parameters]]


@pytest.mark.parametrize(
    ("arguments", "limit"), [({}, 12.5), ({"max_grad_norm": 1.0}, 14.5), ({"gradient_accumulation_steps": 2}, 16.5)]
)
def test_host_bytes_are_resident_bytes(arguments: dict[str, Any], limit: float) -> None:
    """Growth of resident memory after two steps, for each bf16 parameter."""
    backwards = arguments.get("gradient_accumulation_steps", 1)
    # What imports, graphs of this depth, and kernels for products of this width take.
    _train(Stack(24).bfloat16(), backwards, 70_000, arguments)
    _train(Stack(2, HOST_WIDTH).bfloat16(), backwards, 70 << 20, arguments).close()
    before = _resident_bytes()
    model = Stack(24, HOST_WIDTH).bfloat16()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    managed = _train(model, backwards, 70 << 20, arguments)
    assert (_resident_bytes() - before) / parameters < limit
    managed.close()


def _train(model: nn.Module, backwards: int, chunk_bytes: int, arguments: dict[str, Any]) -> Any:
    trained, optimizer = prepare(model, chunk_bytes=chunk_bytes, **arguments)
    for _ in range(2):
        for seed in range(backwards):
            trained(batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    return optimizer._managed


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024
