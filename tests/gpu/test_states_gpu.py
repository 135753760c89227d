"""Prepared training on a CUDA device: equal to eager, to itself under delays on every stream, and steady in memory."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import protrain_compile as protrain
from protrain_compile.backend import protrain as backend
from protrain_compile.plan import POLICIES

pytestmark = pytest.mark.gpu
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plan_for(policy: str, residency: str) -> protrain.Plan:
    plan = dataclasses.replace(protrain.Plan.uniform(policy), chunk_bytes=150_000, buffers=3)
    if residency != "mixed":
        return dataclasses.replace(plan, uniform_residency=residency)
    return dataclasses.replace(
        plan, residency=("persistent", "offloaded", "split", "offloaded", "persistent", "offloaded", "offloaded")
    )


def prepared(
    policy: str, residency: str, dtype: torch.dtype = torch.float32, compile_mode: str = "eager", **arguments: Any
) -> tuple[nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = Gpt().to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    plan = plan_for(policy, residency)
    if residency == "mixed":
        # One chunk for each stretch of the layout that the capacity gives; the residency list must match it.
        probe = copy.deepcopy(model)
        probe, other = protrain.prepare(
            probe, torch.optim.AdamW(probe.parameters()), plan=plan_for(policy, "offloaded")
        )
        torch.compile(probe, backend=backend, options={"compile": "eager", "schedule": "off"})(batch())
        count = len(other._managed.layout.chunks)  # type: ignore[attr-defined]
        kinds = ("persistent", "offloaded", "split")
        plan = dataclasses.replace(plan, residency=tuple(kinds[i % 3] for i in range(count)))
    model, optimizer = protrain.prepare(model, optimizer, plan=plan, device="cuda", **arguments)
    return model, optimizer, torch.compile(model, backend=backend, options={"compile": compile_mode, "schedule": "off"})


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(seed)).cuda()


def train(compiled: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = compiled(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("residency", ["persistent", "offloaded", "split", "mixed"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_equals_eager(policy: str, residency: str, clip: float | None) -> None:
    model, optimizer, compiled = prepared(policy, residency, max_grad_norm=clip)
    torch.manual_seed(0)
    reference = Gpt().cuda()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    for step in range(6):
        loss = compiled(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = reference(batch(step))
        wanted.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        expected.step()
        expected.zero_grad()
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    values = model.state_dict()
    for name, value in reference.state_dict().items():
        # fp32 sums in another order, through six AdamW steps of 1e-2.
        torch.testing.assert_close(values[name], value.cpu(), rtol=1e-4, atol=1e-4)
    assert optimizer._managed.packed.counters.misses == 0


class Delays:
    """Puts a random device-side delay before every operation of every stream, and poisons gradients after they left."""

    def __init__(self, streams: Any, seed: int) -> None:
        self._streams = streams
        self._random = random.Random(seed)
        self.device = streams.device

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._streams, name)
        if name not in ("record", "wait", "wait_host", "copy"):
            return method

        def delayed(*arguments: Any) -> Any:
            for stream in ("compute", *self._streams._side):
                if self._random.random() < 0.3:
                    with torch.cuda.stream(self._streams._stream(stream)):
                        torch.cuda._sleep(self._random.randrange(300_000))
            return method(*arguments)

        return delayed


@pytest.mark.parametrize("residency", ["offloaded", "split", "mixed"])
def test_delays_on_every_stream_change_no_bit(residency: str) -> None:
    results = []
    for arm in ("blocking", "normal", "delayed", "delayed again"):
        torch._dynamo.reset()
        model, optimizer, compiled = prepared("recompute", residency, torch.bfloat16)
        losses = train(compiled, optimizer, 1)
        managed = optimizer._managed
        if arm.startswith("delayed"):
            managed.packed.streams = Delays(managed.packed.streams, len(arm))
        for _ in range(29):
            losses += train(compiled, optimizer, 1) if arm != "blocking" else _blocking(compiled, optimizer)
        results.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        managed.close()
    for losses, values in results[1:]:
        assert losses == results[0][0]
        for name, value in values.items():
            assert torch.equal(value, results[0][1][name]), name


def _blocking(compiled: Callable[[torch.Tensor], torch.Tensor], optimizer: Any) -> list[float]:
    losses = train(compiled, optimizer, 1)
    optimizer._managed.packed.worker.drain()
    torch.cuda.synchronize()
    return losses


@pytest.fixture
def kernels_alike() -> Iterator[None]:
    """Let Inductor take one variant of each reduction: else it times several, of which a busy GPU may prefer others.

    Its own ``config.deterministic`` does not last: tracing sets it from PyTorch's switch.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("kernels_alike")
def test_recompute_is_bitwise_keep() -> None:
    results = []
    for policy in ("keep", "recompute"):
        torch._dynamo.reset()
        model, optimizer, compiled = prepared(policy, "offloaded", torch.bfloat16, "inductor")
        losses = train(compiled, optimizer, 4)
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


def test_device_memory_is_flat_after_the_second_step() -> None:
    _, optimizer, compiled = prepared("recompute", "offloaded")
    train(compiled, optimizer, 3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    train(compiled, optimizer, 10)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["num_device_alloc"] == before["num_device_alloc"]
    assert after["num_alloc_retries"] == before["num_alloc_retries"] == 0
    assert after["allocated_bytes.all.current"] <= before["allocated_bytes.all.current"] + (1 << 20)


def test_bytes_moved_are_the_schedules() -> None:
    _, optimizer, compiled = prepared("recompute", "offloaded")
    train(compiled, optimizer, 2)
    residency = optimizer._managed.packed
    before = dataclasses.replace(residency.counters)
    train(compiled, optimizer, 3)
    schedule = protrain.schedule(optimizer_model(compiled)).parts[0].schedule
    moved = {"h2d": 0, "d2h": 0}
    for module in schedule.graphs.values():
        for node in module.graph.nodes:
            operation = node.meta.get("operation")
            if operation is not None and operation.stream in moved:
                moved[operation.stream] += operation.moved_bytes
    assert residency.counters.fetched_bytes - before.fetched_bytes == 3 * moved["h2d"]
    assert residency.counters.offloaded_bytes - before.offloaded_bytes == 3 * moved["d2h"]


def optimizer_model(compiled: Any) -> nn.Module:
    return compiled._orig_mod  # type: ignore[no-any-return]
