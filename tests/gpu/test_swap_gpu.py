"""Swap on a CUDA device: equal to keep under delays on every stream, pinned, lower in memory, steady on both sides.

Artefacts run op by op, except where Inductor is the subject: its gradient of an embedding adds by atomics, so that keep
differs from keep there, and only blocks are compared.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.capture import mixed
from torch import nn
from torch.nn import functional as F

import protrain_compile as protrain
from protrain_compile.backend import protrain as backend
from protrain_compile.plan import Plan
from protrain_compile.runtime.swap import SwapSpace

pytestmark = pytest.mark.gpu
WIDTH, BLOCKS = 256, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Stack(nn.Module):
    """Blocks between two projections; no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def batch(seed: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 128, 16, generator=torch.Generator().manual_seed(seed)).cuda()


def compiled(letters: str = "kkkkkk", mode: str = "eager") -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack().cuda()
    options = {"compile": mode, "schedule": "off", "plan": mixed(letters)}
    return model, torch.compile(model, backend=backend, options=options)


def space_of(model: nn.Module) -> SwapSpace:
    (part,) = protrain.schedule(model).parts
    assert part.graph._swap is not None
    return part.graph._swap


def gradients(model: nn.Module, call: Any, steps: int = 1) -> list[torch.Tensor]:
    """Return the losses of some steps, and the gradients that they add up to."""
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        loss = call(batch(step))
        loss.backward()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return [*losses, *(p.grad.clone() for p in model.parameters())]


def assert_bitwise(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(found, wanted), number


class Delays:
    """Puts a random delay on the device before operations of every stream."""

    def __init__(self, streams: Any, seed: int) -> None:
        self._streams = streams
        self._random = random.Random(seed)
        self.device = streams.device

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._streams, name)
        if name not in ("record", "wait", "wait_host", "copy"):
            return method

        def delayed(*arguments: Any) -> Any:
            for stream in ("compute", "h2d", "d2h"):
                if self._random.random() < 0.3:
                    with torch.cuda.stream(self._streams._stream(stream)):
                        torch.cuda._sleep(self._random.randrange(500_000))
            return method(*arguments)

        return delayed


@pytest.mark.parametrize("letters", ["ssssss", "srskrs", "kskkks", "xxxxxx", "xkpxws"])
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_delays_on_every_stream_change_no_bit(letters: str, mode: str) -> None:
    model, call = compiled(mode=mode)
    kept = gradients(model, call, 3)
    protrain.schedule(model).use(mixed(letters))
    expected = gradients(model, call, 3)
    if mode == "inductor" and set(letters) & set("pwx"):  # their recomputes fuse otherwise than the forward does
        torch.testing.assert_close(expected, kept)
    else:
        assert_bitwise(expected, kept)
    space = space_of(model)
    for seed in range(5):
        space.streams = Delays(space.streams, seed)  # type: ignore[assignment]
        assert_bitwise(gradients(model, call, 3), expected)


@pytest.mark.parametrize("letters", ["ssssss", "xxxxxx"])
def test_slabs_are_pinned_and_nothing_is_allocated_after_the_second_step(letters: str) -> None:
    model, call = compiled(letters)
    gradients(model, call, 2)
    space = space_of(model)
    assert space.slabs == BLOCKS
    assert all(slab.pinned for slab in space._slabs)
    before, slabs = torch.cuda.memory_stats(), space.slabs
    gradients(model, call, 10)
    after = torch.cuda.memory_stats()
    assert space.slabs == space.free_slabs == slabs
    assert after["num_device_alloc"] == before["num_device_alloc"]


def test_memory_between_forward_and_backward_goes_down() -> None:
    model, call = compiled()
    gradients(model, call)
    kept = {}
    for letters in ("kkkkkk", "rrrrrr", "ssssss", "xxxxxx"):
        protrain.schedule(model).use(mixed(letters))
        model.zero_grad()
        call(batch()).backward()
        model.zero_grad()
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        loss = call(batch())
        torch.cuda.synchronize()
        kept[letters] = torch.cuda.memory_allocated() - start
        loss.backward()
    assert max(kept["ssssss"], kept["xxxxxx"]) < kept["rrrrrr"] < 0.5 * kept["kkkkkk"]


def test_what_is_alive_is_what_the_schedule_says() -> None:
    """Bytes that leave and come back are those of the schedule's rows."""
    model, call = compiled("skxkxk")
    gradients(model, call)
    space = space_of(model)
    (part,) = protrain.schedule(model).parts
    operations = [n.meta.get("operation") for m in part.schedule.graphs.values() for n in m.graph.nodes]
    moved = {
        op: sum(each.moved_bytes for each in operations if each is not None and each.op == op)
        for op in ("offload", "reload")
    }
    before = (space.swapped_bytes, space.reloaded_bytes)
    gradients(model, call)
    assert space.swapped_bytes - before[0] == moved["offload"] > 0
    assert space.reloaded_bytes - before[1] == moved["reload"] > 0


def test_an_exception_in_the_middle_leaves_nothing_behind() -> None:
    model, call = compiled("sxsxsx")
    expected = gradients(model, call)
    space = space_of(model)
    (part,) = protrain.schedule(model).parts
    for name in ("forward", "backward"):
        calls = [n for n in part.schedule.graphs[name].graph.nodes if hasattr(n.target, "_run")]
        target = calls[3].target
        run = target._run

        def fail(_: list[Any]) -> None:
            raise RuntimeError("on purpose")

        target._run = fail
        space.streams = Delays(space.streams, 7)  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="on purpose"):
            call(batch()).backward()
        target._run = run
        assert not space._leaving
        assert not space._arriving
        assert_bitwise(gradients(model, call), expected)
        assert space.slabs == space.free_slabs


@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_a_prepared_model_swaps_on_the_streams_of_its_chunks(residency: str) -> None:
    results = []
    for letters, delay in (("kkkkkk", None), ("sksrss", None), ("ssssss", 3), ("xsxkrx", 5)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: nn.Module = Stack()
        plan = Plan(policies=mixed(letters).policies, uniform_residency=residency, chunk_bytes=4_000_000)  # type: ignore[arg-type]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        model, optimizer = protrain.prepare(model, optimizer, plan=plan, device="cuda")
        call: Any = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
        losses = []
        for step in range(6):
            torch.manual_seed(step)
            loss = call(batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            managed = optimizer._managed
            if delay is not None and step == 0:
                managed.packed.streams = managed.swap_space().streams = Delays(managed.packed.streams, delay)
        results.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        managed.close()
    for losses, values in results[1:]:
        assert losses == results[0][0]
        for name, value in values.items():
            assert torch.equal(value, results[0][1][name]), name
