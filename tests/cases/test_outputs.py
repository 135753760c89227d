"""Inputs and outputs of all kinds: gradients to inputs, outputs that are inputs or views, no gradients, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from support.compare import alternating, assert_same, compile_model, run_step
from support.light import WIDTH, Block
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan

PLANS = [Plan.uniform(), Plan.uniform("recompute"), alternating(3), Plan.uniform("swap")]


class Stack(nn.Module):
    """Three blocks; subclasses decide what goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inputs(**options: Any) -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_(**options)


def check(model: nn.Module, step: Any) -> None:
    """``step`` runs a model, calls backward itself, and returns whatever is to be compared."""
    eager = copy.deepcopy(model)
    expected = step(eager)
    compiled = compile_model(model)
    step(compiled)
    for plan in PLANS:
        model.zero_grad()
        protrain_compile.schedule(compiled).use(plan)
        torch.testing.assert_close(step(compiled), expected, rtol=1e-5, atol=1e-6)
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}"
                )
    assert all(len(part.graph.contexts) == 0 for part in protrain_compile.schedule(compiled).parts)


class Plain(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_gradients_of_inputs() -> None:
    def step(model: nn.Module) -> Tensor:
        x = inputs()
        model(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    check(Plain(), step)


def test_gradients_of_inputs_only() -> None:
    """All weights frozen, as in adversarial or prompt training."""

    def step(model: nn.Module) -> Tensor:
        x = inputs()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), [x])
        return gradient

    check(Plain().requires_grad_(False), step)


def test_non_leaf_input() -> None:
    def step(model: nn.Module) -> Tensor:
        x = inputs()
        model(x * 2).square().mean().backward()
        assert x.grad is not None
        return x.grad

    check(Plain(), step)


def test_nothing_needs_a_gradient() -> None:
    model = Plain().requires_grad_(False)
    compiled = compile_model(model)
    x = inputs(requires_grad=False)
    out = compiled(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-6)


def test_autograd_grad_with_respect_to_some_parameters() -> None:
    def step(model: Any) -> Any:
        loss = model(inputs(requires_grad=False)).square().mean()
        owner = getattr(model, "_orig_mod", model)
        return torch.autograd.grad(loss, [owner.blocks[1].up.weight, owner.blocks[0].norm.bias])

    check(Plain(), step)


def test_output_is_an_input() -> None:
    class Returns(Stack):
        def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, self.run(x + other), other

    model = Returns()
    compiled = compile_model(model)
    x, other = inputs(), inputs(requires_grad=False)
    first, out, third = compiled(x, other)
    assert first is x
    assert third is other

    def step(model: nn.Module) -> Tensor:
        x = inputs()
        first, out, _ = model(x, x.detach() + 1)
        (first.sum() + out.square().mean()).backward()
        assert x.grad is not None
        return x.grad

    del first, out, third
    torch._dynamo.reset()
    check(Returns(), step)


def test_outputs_that_are_views() -> None:
    """Views of inputs, of outputs, of hidden values; one value returned twice."""

    class Views(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.run(x)
            hidden = torch.sin(y)
            return x[:, :2], y, y.transpose(0, 1), hidden.view(-1), y, hidden[0]

    def step(model: nn.Module) -> Any:
        x = inputs()
        parts = model(x)
        sum(part.square().mean() for part in parts).backward()  # type: ignore[union-attr]
        return [x.grad, *(part.detach() for part in parts)]

    check(Views(), step)


def test_output_changed_in_place_afterwards() -> None:
    """An output that no backward needs may be changed."""

    def step(model: nn.Module) -> Tensor:
        out = model(inputs(requires_grad=False))
        out.mul_(2)
        out.square().mean().backward()
        return out.detach()

    class Shifted(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x) + 1

    check(Shifted(), step)


def test_integer_and_python_outputs() -> None:
    class Mixed(Stack):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.run(x)
            return {"best": y.argmax(-1), "loss": y.square().mean(), "none": None, "count": x.shape[0], "name": "x"}

    def step(model: nn.Module) -> Any:
        out = model(inputs(requires_grad=False))
        out["loss"].backward()
        assert out["none"] is None
        assert out["count"] == 2
        assert out["name"] == "x"
        return out["best"]

    check(Mixed(), step)


@dataclasses.dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, ...]


def test_dataclass_output() -> None:
    class Returns(Stack):
        def forward(self, x: Tensor) -> Output:
            hidden = [x]
            for block in self.blocks:
                hidden.append(block(hidden[-1]))
            return Output(hidden[-1].square().mean(), tuple(hidden))

    def step(model: nn.Module) -> Any:
        out = model(inputs(requires_grad=False))
        assert isinstance(out, Output)
        out.loss.backward()
        return [each.detach() for each in out.hidden]

    check(Returns(), step)


def test_unused_and_missing_parameters() -> None:
    """Parameters that the forward skips get no gradient: ``.grad`` stays None."""

    class Skips(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = self.unused(x).mean()
            return self.run(x) + shift

    def step(model: nn.Module) -> Tensor:
        out = model(inputs(requires_grad=False))
        out.square().mean().backward()
        return out.detach()

    model = Skips()
    check(model, step)
    assert model.unused.weight.grad is None


def test_branch_that_alternates() -> None:
    """A Python branch compiles both ways; skipped parameters have no gradient."""

    class Branches(Stack):
        def forward(self, x: Tensor, skip: bool) -> Tensor:
            for i, block in enumerate(self.blocks):
                if not (skip and i == 1):
                    x = block(x)
            return x.square().mean()

    model = Branches()
    eager = copy.deepcopy(model)
    compiled = compile_model(model)
    for skip in (False, True, False, True):
        expected = run_step(eager, lambda m, s=skip: m(inputs(requires_grad=False), s))
        assert_same(run_step(compiled, lambda m, s=skip: m(inputs(requires_grad=False), s), owner=model), expected)
    names = [part.schedule.program.block_names for part in protrain_compile.schedule(compiled).parts]
    assert names == [("blocks.0", "blocks.1", "blocks.2"), ("blocks.0", "blocks.2")]


def test_detached_between_blocks() -> None:
    """A stop-gradient in the middle: the first half has no backward at all."""

    class Detached(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x))
            return self.blocks[2](x.detach())

    def step(model: nn.Module) -> Tensor:
        out = model(inputs(requires_grad=False))
        out.square().mean().backward()
        return out.detach()

    check(Detached(), step)


def test_custom_autograd_function_in_a_block() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() < 1)

    class Quantised(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) + 0.1 * Straight.apply(x)
            return x

    def step(model: nn.Module) -> Tensor:
        x = inputs()
        model(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    check(Quantised(), step)


def test_complex_and_double() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.blocks:  # type: ignore[misc]
                x = x + second(torch.fft.irfft(torch.fft.rfft(first(x)), n=8))
            return x

    def step(model: nn.Module) -> Tensor:
        x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    check_without_plans(Spectral().double(), step)


def check_without_plans(model: nn.Module, step: Any) -> None:
    eager = copy.deepcopy(model)
    expected = step(eager)
    compiled = compile_model(model)
    torch.testing.assert_close(step(compiled), expected)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_double_backward_is_refused_clearly() -> None:
    model = Plain()
    compiled = compile_model(model)
    x = inputs()
    (gradient,) = torch.autograd.grad(compiled(x).square().mean(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):
        gradient.sum().backward()


class Head(Stack):
    """Returns a loss, and the logits that it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.run(x))
        return logits.logsumexp(-1).mean(), logits


LOSSES = {
    "loss": lambda loss, logits: loss,
    "both": lambda loss, logits: loss + logits.square().mean(),
    "logits": lambda loss, logits: logits.square().mean(),
}


@pytest.mark.parametrize("used", LOSSES)
def test_a_loss_of_ones_own_on_logits_that_the_model_returns(used: str) -> None:
    def step(model: Any) -> Any:
        x = inputs()
        LOSSES[used](*model(x)).backward()
        return x.grad

    check(Head(), step)


def test_no_zeros_are_made_for_logits_that_nobody_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("protrain_compile.runtime.compiled_graph.make_zeros", made.append)
    model = Head()
    compiled = compile_model(model)
    compiled(inputs())[0].backward()
    assert not made
    (part,) = protrain_compile.schedule(compiled).parts
    assert part.schedule.program.absent_tangents == {1}


@pytest.mark.parametrize("dynamic", [False, True])
def test_zeros_where_a_gradient_is_nothing_else(dynamic: bool) -> None:
    """The head's weights have no gradient but that of the logits, which no loss was computed from."""

    class Apart(Head):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.run(x), self.head(x)

    model = Apart()
    compiled = compile_model(model, dynamic=dynamic)
    for rows in (2, 3):
        model.zero_grad()
        compiled(torch.randn(rows, 8, WIDTH))[0].mean().backward()
        assert model.head.weight.grad is not None
        assert not model.head.weight.grad.any()
