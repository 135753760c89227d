"""Models whose parameters are not simply used once: tied, skipped, frozen, odd, empty, of several types; buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import compile_model
from support.models import GPT, tokens
from support.prepared import (
    RESIDENCIES,
    Block,
    Stack,
    Trainee,
    adamw,
    assert_close,
    assert_same_values,
    batch,
    check,
    eager,
    forced,
    prepared,
    warmed,
)
from torch import Tensor, nn

import protrain_compile
from protrain_compile import DoorError, OptionError, Plan


def five_steps(trainee: Trainee) -> Tensor:
    return trainee.steps(*range(5))


def check_everywhere(
    model: nn.Module, loop: Callable[[Trainee], Any] = five_steps, *, steady: bool = True, **arguments: Any
) -> list[Trainee]:
    """Check under every residency; the mixed plan learns the number of chunks from the first."""
    chunks, found = 0, []
    for residency in RESIDENCIES:
        trainee = check(loop, forced(residency, chunks=chunks), copy.deepcopy(model), **arguments)
        chunks = len(trainee.managed.layout.chunks)
        assert trainee.managed.residency.counters.misses == 0 or not steady
        found.append(trainee)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied: bool) -> None:
    """A head tied to the embedding: one tensor, one chunk, the gradient of both uses, decay once."""

    def loop(trainee: Trainee) -> Tensor:
        return five_steps(trainee)

    for trainee in check_everywhere(GPT(2, tied=tied), loop, data=lambda seed: tokens(seed=seed)):
        assert (trainee.model.head.weight is trainee.model.embed.weight) == tied
        assert len(trainee.managed.specs) == len(list(trainee.model.parameters()))


class SharedWeight(Stack):
    """Blocks 0 and 2 share a weight, in the chunk of block 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


def test_weight_shared_by_two_blocks() -> None:
    for trainee in check_everywhere(SharedWeight()):
        assert trainee.model.blocks[0].up.weight is trainee.model.blocks[2].up.weight
    check_everywhere(SharedWeight(), max_grad_norm=0.05, loop=_clipped(0.05))


def _clipped(limit: float) -> Callable[[Trainee], None]:
    def loop(trainee: Trainee) -> None:
        for seed in range(4):
            trainee.backward(seed)
            if trainee.called is trainee.model:
                torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), limit)
            trainee.update()

    return loop


class Alternates(Stack):
    """Uses one of two heads: two graphs, and a parameter has a gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return (self.other if second else self.head)(x).square().mean()


def alternating(trainee: Trainee) -> None:
    for seed in range(6):
        trainee.called(batch(seed), seed % 2 == 1).backward()
        trainee.update()
    loss = trainee.called(batch(7), True) + trainee.called(batch(8), False)
    loss.backward()  # the second graph finds in the buffers what the first left: a fetch on demand
    trainee.update()


def test_skipped_parameters() -> None:
    """No update, no decay, no step counted where eager has no gradient."""
    for trainee in check_everywhere(Alternates(), alternating, steady=False):
        plain = eager(Alternates())
        alternating(plain)
        ours, theirs = trainee.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
        assert [float(state["step"]) for state in ours.values()] == [float(s["step"]) for s in theirs.values()]
    check_everywhere(Alternates(), alternating, steady=False, max_grad_norm=1e9)


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=3)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_padding_row() -> None:
    data = lambda seed: torch.arange(seed, seed + 6) % 16  # noqa: E731
    model = Embeds()
    trainees = check_everywhere(model, data=data, optimizers=lambda m: adamw(m, weight_decay=0.0))
    for trainee in trainees:
        assert torch.equal(trainee.model.state_dict()["embed.weight"][3], model.embed.weight[3])


class Adapted(nn.Module):
    """A linear layer with a rank-2 adapter."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def adapted_stack() -> Stack:
    model = Stack().requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(nn.ParameterList([p for p in model.parameters() if p.requires_grad]))


def test_adapters() -> None:
    """Frozen weights have neither gradient nor states; unfreezing later raises."""
    model = adapted_stack()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    for trainee in check_everywhere(model, optimizers=trainable):
        values = trainee.model.state_dict()
        assert all(torch.equal(values[name], value) for name, value in frozen.items())
        store = trainee.managed.residency.store
        for chunk in trainee.managed.layout.chunks:
            assert (chunk.index in store.states) == chunk.trainable
        with pytest.raises(DoorError, match=r"requires_grad of blocks\.1\.down\.weight cannot change after prepare"):
            trainee.model.blocks[1].down.requires_grad_(True)
        trainee.step(9)
    assert sum(p.numel() for p in frozen.values()) > 500


def test_frozen_parameters_in_the_optimizer() -> None:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    check_everywhere(model)


class Odd(nn.Module):
    """Scalars, one element, seven, none, and parameters that are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(5, 1))
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.stem = nn.Linear(4, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(3)])
        self.empty, self.no_rows = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 7))
        self.seven = nn.Parameter(torch.ones(7))
        self.frozen_spare = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale + self.one
        for block in self.blocks:
            x = block(x)
        return (torch.cat([x, self.no_rows]) * self.seven).square().mean() + self.empty.sum()


def test_odd_sizes() -> None:
    check_everywhere(Odd())
    check_everywhere(Odd(), gradient_accumulation_steps=2)
    check_everywhere(Odd(), max_grad_norm=0.05, loop=_clipped(0.05))


class Mixed(nn.Module):
    """bf16 blocks between an fp32 stem and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(8).bfloat16() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).bfloat16()
        for block in self.blocks:
            x = block(x)
        return self.head(x.float()).square().mean()


class Mastered(Trainee):
    """Eager with an fp32 copy of every parameter, which the optimizer updates: what training 16 bits means here."""

    def __init__(self, model: nn.Module, optimizers: Callable[[nn.Module], torch.optim.Optimizer], data: Any) -> None:
        own = copy.deepcopy(model)
        self.masters = copy.deepcopy(model).float()
        super().__init__(own, own, optimizers(self.masters), data)

    def update(self) -> None:
        pairs = list(zip(self.model.parameters(), self.masters.parameters(), strict=True))
        for p, master in pairs:
            master.grad = None if p.grad is None else p.grad.float()
        super().update()
        with torch.no_grad():
            for p, master in pairs:
                p.copy_(master)
                p.grad = None


def masters_of(trainee: Trainee) -> list[Tensor]:
    """Return the fp32 value of every parameter."""
    states = trainee.optimizer.state_dict()["state"]
    return [states[i].get("protrain_master", p.detach()) for i, p in enumerate(trainee.model.parameters())]


SIXTEEN_BITS = 1e-3
"""A master may round to the other of two neighbours: a few 16-bit values then differ by 2**-8, and gradients follow."""


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 1e9}], ids=str)
def test_mixed_types(arguments: dict[str, Any]) -> None:
    model = Mixed()
    reference = Mastered(model, adamw, batch)
    losses = five_steps(reference)
    chunks = 0
    for residency in RESIDENCIES:
        trainee = prepared(model, forced(residency, chunks=chunks, chunk_bytes=1_000), **arguments)
        assert_close("losses", five_steps(trainee), losses, rtol=SIXTEEN_BITS)
        chunks = len(trainee.managed.layout.chunks)
        for found, expected in zip(masters_of(trainee), reference.masters.parameters(), strict=True):
            assert_close("master", found, expected.detach(), rtol=SIXTEEN_BITS)
        assert {name: p.dtype for name, p in trainee.model.named_parameters()} == {
            name: p.dtype for name, p in model.named_parameters()
        }


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.same = self.norm.running_mean

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.stem(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def test_buffers() -> None:
    def loop(trainee: Trainee) -> None:
        five_steps(trainee)
        trainee.model.eval()
        with torch.no_grad():
            trainee.forward(7)
        trainee.model.train()
        trainee.steps(8)

    for trainee in check_everywhere(Normed(), loop):
        assert int(trainee.model.calls) == 7


def test_sixteen_bit_everywhere() -> None:
    """fp16 waits for ``step()`` (a loss scale may skip it); the master is fp32."""
    model = Stack().half()
    trainee = prepared(model, forced(chunk_bytes=1_000), data=lambda seed: batch(seed).half())
    assert bool(trainee.steps(*range(5)).isfinite().all())
    assert trainee.managed.residency.mode == "at_step"
    state = trainee.optimizer.state_dict()["state"][0]
    assert state["protrain_master"].dtype == torch.float32
    assert torch.equal(state["protrain_master"].half(), trainee.model.state_dict()["stem.weight"])


def test_norm_weights_move_in_bf16() -> None:
    """At 1.0 a bf16 weight has steps of 2**-8: updates of 1e-4 would be lost without an fp32 master."""

    class Scaled(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x) * self.scale
            for block in self.blocks:
                x = block(x)
            return self.head(x).square().mean()

    model = Scaled().bfloat16()
    data = lambda seed: batch(0).bfloat16()  # noqa: E731
    trainee = prepared(model, optimizers=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), data=data)
    trainee.steps(*range(200))
    moved = 1.0 - trainee.model.state_dict()["scale"].float()
    assert float(moved.abs().max()) > 1e-2


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_bf16_follows_fp32_masters(residency: str, policy: str) -> None:
    model = Stack().bfloat16()
    data = lambda seed: batch(seed % 7).bfloat16()  # noqa: E731
    reference = Mastered(model, adamw, data)
    trainee = prepared(model, forced(residency, policy, chunk_bytes=1_000), data=data)
    found, expected = trainee.steps(*range(60)), reference.steps(*range(60))
    torch.testing.assert_close(found[:20], expected[:20], rtol=1e-2, atol=0)  # a bf16 loss has steps of 2**-8
    for found, expected in zip(masters_of(trainee), reference.masters.parameters(), strict=True):
        assert_close("master", found, expected.detach(), rtol=SIXTEEN_BITS)


class Breaks(Stack):
    """A graph break in every block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return self.head(x).square().mean()


def test_graph_breaks() -> None:
    """One compiled block serves all: parameters are bound by call."""

    def loop(trainee: Trainee) -> None:
        five_steps(trainee)
        with torch.no_grad():
            trainee.forward(6)
        trainee.steps(7)

    model, chunks = Breaks(), 0
    for arguments in ({}, {"gradient_accumulation_steps": 2}):
        for residency in RESIDENCIES:
            trainee = check(loop, forced(residency, chunks=chunks), model, **arguments)
            chunks = len(trainee.managed.layout.chunks)


def test_varying_batch_and_evaluation() -> None:
    """Evaluation between steps sees the newest weights and changes nothing."""

    def loop(trainee: Trainee) -> Tensor:
        found = []
        for seed in range(8):
            loss = trainee.called(batch(seed, rows=2 + seed % 5))
            loss.backward()
            trainee.update()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    found.append(trainee.called(batch(seed, rows=9)).clone())
        return torch.stack(found)

    check_everywhere(Stack(), loop)


def test_two_models_share_compiled_code() -> None:
    """Two prepared models of one class, trained in turn, and a plain one beside them."""
    models = [Stack(), Stack()]
    plain = [eager(each) for each in models]
    trainees = [prepared(models[0], "offloaded"), prepared(models[1], forced("mixed"))]
    beside, beside_plain = eager(models[0]), eager(models[0])
    beside.called = compile_model(beside.model)
    for seed in range(5):
        for each in (*plain, *trainees, beside, beside_plain):
            each.step(seed)
    for found, expected in zip([*trainees, beside], [*plain, beside_plain], strict=True):
        assert_same_values(found.model, expected.model)


def test_bytes_moved_are_the_schedules() -> None:
    """In steady state no demand misses, and to the byte what the schedule says."""
    for residency in ("offloaded", "split", "mixed"):
        for policy in ("keep", "recompute"):
            for norm in (None, 0.05):
                trainee = warmed(prepared(Stack(), forced(residency, policy, buffers=3), max_grad_norm=norm))
                counters = trainee.managed.residency.counters
                before = (counters.fetched_bytes, counters.offloaded_bytes)
                trainee.steps(0, 1, 2)
                moved = (counters.fetched_bytes - before[0], counters.offloaded_bytes - before[1])
                planned = {"h2d": 0, "d2h": 0}
                for graph in protrain_compile.schedule(trainee.called).graphs.values():
                    for node in graph.graph.nodes:
                        operation = node.meta.get("operation")
                        if operation is not None and operation.stream in planned:
                            planned[operation.stream] += operation.moved_bytes
                assert moved == (3 * planned["h2d"], 3 * planned["d2h"])
                assert counters.misses == 0
                assert planned["d2h"] > 0


@pytest.mark.parametrize("on_host", [True, False])
def test_forced_plans_are_bitwise_equal(on_host: bool) -> None:
    """Policies and moves change no value; updates on the device and on the host may differ in the last place."""
    model = Stack()
    results = []
    for policy in ("keep", "recompute"):
        for residency in ("offloaded", "split") if on_host else ("persistent",):
            for buffers in (3, 5):
                trainee = prepared(model, forced(residency, policy, buffers=buffers))
                trainee.steps(*range(6))
                results.append(trainee.model)
    for other in results[1:]:
        assert_same_values(other, results[0], rtol=0)


def test_default_plan_and_one_chunk() -> None:
    check(five_steps, Plan.uniform())
    check(five_steps, Plan.uniform("recompute", "offloaded"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: setattr(m, "table", nn.Embedding(4, 4, sparse=True)), "table has sparse=True"),
        (lambda m: m.double(), "stem.weight: parameters of torch.float64"),
        (lambda m: m.head.weight.register_hook(lambda g: g), "head.weight has a gradient hook"),
        (lambda m: m(batch()).backward(), "has a gradient already"),
        (lambda m: setattr(m.blocks[0].up.weight, "data", m.blocks[1].up.weight.data), "one piece of memory"),
        (lambda m: setattr(m, "extra", nn.UninitializedParameter()), "extra is a UninitializedParameter"),
    ],
)
def test_refused_models_are_left_alone(change: Callable[[Any], Any], match: str) -> None:
    model = Stack()
    change(model)
    optimizer = adamw(model)
    kind = type(optimizer)
    with pytest.raises(OptionError, match=match):
        protrain_compile.prepare(model, optimizer)
    assert type(optimizer) is kind
    assert not any(type(p).__name__ == "ManagedParameter" for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"memory_budget": "many"}, "memory_budget"),
        ({"host_memory_budget": -1}, "host_memory_budget"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_dtype": torch.float16}, r"gradient_accumulation_dtype=torch\.float16: choose"),
        ({"gradient_accumulation_dtype": "bfloat16"}, "gradient_accumulation_dtype='bfloat16': choose"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"device": "meta"}, "device"),
        ({"device": "nonsense"}, "device"),
        ({"plan": "{"}, "plan"),
        ({"plan": {"policies": ["keep"], "unknown": 1}}, "plan"),
    ],
)
def test_refused_arguments_leave_everything(arguments: dict[str, Any], match: str) -> None:
    model = Stack()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=match):
        protrain_compile.prepare(model, optimizer, **arguments)
    assert all(type(p) is nn.Parameter and p.untyped_storage().nbytes() for p in model.parameters())
    assert type(optimizer) is torch.optim.AdamW


def test_accumulation_in_bf16_is_refused_for_fp16() -> None:
    model = Stack().half()
    with pytest.raises(OptionError, match=r"gradient_accumulation_dtype=.*stem\.weight is float16"):
        protrain_compile.prepare(model, adamw(model), gradient_accumulation_dtype=torch.bfloat16)


def test_optimizer_and_model_must_belong_together() -> None:
    model, other = Stack(), Stack()
    with pytest.raises(OptionError, match="not the model's"):
        protrain_compile.prepare(model, adamw(other))
    with pytest.raises(OptionError, match=r"optimizer lacks stem\.weight"):
        protrain_compile.prepare(model, adamw(model.head))
    with pytest.raises(OptionError, match=r"must be a torch\.optim"):
        protrain_compile.prepare(model, None)
    with pytest.raises(OptionError, match=r"must be a torch\.nn"):
        protrain_compile.prepare(torch.nn, adamw(model))
    with pytest.raises(OptionError, match="compiled already"):
        protrain_compile.prepare(torch.compile(model), adamw(model))
    prepared_model, optimizer = protrain_compile.prepare(model, adamw(model))
    assert prepared_model is model
    with pytest.raises(OptionError, match="prepared already"):
        protrain_compile.prepare(Stack(), optimizer)
