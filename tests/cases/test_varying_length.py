"""Case 20: varying sequence lengths: few compiles, the right numbers, every plan."""

from __future__ import annotations

import copy
import random

import torch
from support import light
from support.compare import assert_bitwise, assert_same, compile_model, run_step, turns
from support.models import Llama, tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan


def compiles() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_twenty_lengths() -> None:
    """20 lengths over 60 steps: a static graph, then a dynamic one; plans alternate from step to step."""
    model = light.GPT(3)
    reference = copy.deepcopy(model)
    compiled = compile_model(model)
    generator = random.Random(0)
    lengths = generator.sample(range(8, 64), 20) * 3
    plans = [Plan.uniform(), Plan.uniform("recompute"), turns(3), Plan.uniform("swap")]
    expected = {n: run_step(reference, lambda m, n=n: m(tokens(length=n))) for n in set(lengths)}
    for number, length in enumerate(lengths):
        result = run_step(compiled, lambda m, n=length: m(tokens(length=n)), owner=model)
        assert_same(result, expected[length])
        protrain_compile.schedule(compiled).use(plans[number % 4])
    assert compiles() <= 3
    schedule = protrain_compile.schedule(compiled)
    assert all(len(part.graph.contexts) == 0 for part in schedule.parts)
    assert all(part.schedule.plan.policies == plans[59 % 4].fit(["a"] * 3).policies for part in schedule.parts)


def test_dynamic_from_the_start() -> None:
    """Batch and length as symbols: equal blocks still share one template."""
    model = Llama(3)
    compiled = compile_model(model, dynamic=True)
    for batch, length in ((2, 17), (3, 30), (5, 9)):
        reference = run_step(copy.deepcopy(model), lambda m, b=batch, n=length: m(tokens(b, n)))
        keep = run_step(compiled, lambda m, b=batch, n=length: m(tokens(b, n)), owner=model)
        assert_same(keep, reference)
        schedule = protrain_compile.schedule(compiled)
        schedule.use(Plan.uniform("recompute"))
        assert_bitwise(run_step(compiled, lambda m, b=batch, n=length: m(tokens(b, n)), owner=model), keep)
        schedule.use(Plan.uniform())
    assert compiles() == 1
    assert schedule.parts[0].graph.program.structures == 3, schedule.render()


def test_dynamic_with_dropout() -> None:
    model = light.GPT(3, dropout=0.2)
    compiled = compile_model(model, dynamic=True)
    for length in (17, 24):
        keep = run_step(compiled, lambda m, n=length: m(tokens(length=n)), owner=model)
        schedule = protrain_compile.schedule(compiled)
        schedule.use(Plan.uniform("recompute"))
        assert_bitwise(run_step(compiled, lambda m, n=length: m(tokens(length=n)), owner=model), keep)
        schedule.use(Plan.uniform())
    assert compiles() == 1


def test_shapes_computed_in_a_block() -> None:
    """A block whose sizes are arithmetic on the length (padding to a multiple, halves)."""

    class Folds(light.Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            pad = -x.shape[1] % 4
            folded = nn.functional.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, 4)).mean(2)
            return x + folded.repeat_interleave(4, dim=1)[:, : x.shape[1]] / x.shape[1]

    model = light.GPT(3)
    model.blocks = nn.ModuleList(Folds() for _ in range(3))
    compiled = compile_model(model, dynamic=True)
    for length in (17, 26, 40):
        step = lambda m, n=length: m(tokens(length=n))  # noqa: E731
        reference = run_step(copy.deepcopy(model), step)
        keep = run_step(compiled, step, owner=model)
        assert_same(keep, reference)
        schedule = protrain_compile.schedule(compiled)
        schedule.use(Plan.uniform("recompute"))
        assert_bitwise(run_step(compiled, step, owner=model), keep)
        schedule.use(Plan.uniform())


class Normed(nn.Module):
    """Batch norm: the batch size over itself less one, and in the backward alone one over the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(self.up(x).relu()))  # type: ignore[no-any-return]


def test_fractions_of_a_size() -> None:
    model = nn.Sequential(*(Normed() for _ in range(3)))
    compiled = compile_model(model, dynamic=True)
    for rows in (17, 26):
        batch = torch.randn(rows, 8)
        reference = copy.deepcopy(model)
        expected = run_step(reference, lambda m, x=batch: m(x).square().mean())
        assert_same(run_step(compiled, lambda m, x=batch: m(x).square().mean(), owner=model), expected)
        protrain_compile.schedule(compiled).use(turns(3))
    assert compiles() == 1


def test_dynamic_evaluation() -> None:
    model = light.GPT(3)
    compiled = compile_model(model, dynamic=True)
    with torch.no_grad():
        for length in (10, 20, 33):
            torch.testing.assert_close(
                compiled(tokens(length=length)), model(tokens(length=length)), rtol=1e-5, atol=1e-6
            )
    assert compiles() == 1


def test_inductor_with_symbols() -> None:
    model = Llama(2, width=16, heads=2, kv_heads=1)
    compiled = compile_model(model, dynamic=True, compile="inductor")
    for length in (12, 21):
        step = lambda m, n=length: m(tokens(length=n))  # noqa: E731
        reference = run_step(copy.deepcopy(model), step)
        keep = run_step(compiled, step, owner=model)
        assert_same(keep, reference)
        schedule = protrain_compile.schedule(compiled)
        schedule.use(Plan.uniform("recompute"))
        assert_bitwise(run_step(compiled, step, owner=model), keep)
        schedule.use(Plan.uniform())
    assert compiles() == 1
