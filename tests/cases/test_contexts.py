"""Contexts: two forwards, two losses, abandoned forwards, exceptions, several plans alive; nothing leaks."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from support.compare import Result, alternating, assert_bitwise, assert_same, compile_model, run_step
from support.light import GPT, WIDTH, Block
from support.models import tokens
from torch import Tensor, nn

import protrain_compile
from passes.schedule_graph import artefact_calls
from protrain_compile import ContextError, Plan

PLANS = [Plan.uniform(), Plan.uniform("recompute"), alternating(3), Plan.uniform("swap")]


def step(model: nn.Module) -> Tensor:
    return model(tokens())


def alive(compiled: nn.Module) -> int:
    gc.collect()
    return sum(len(part.graph.contexts) for part in protrain_compile.schedule(compiled).parts)


def under_each_plan(model: nn.Module, compiled: nn.Module) -> Iterator[Plan]:
    """Yield each plan while ``compiled`` runs by it; nothing is alive and no gradient is left before or after."""
    compiled(tokens())
    for plan in PLANS:
        protrain_compile.schedule(compiled).use(plan)
        model.zero_grad()
        assert alive(compiled) == 0
        yield plan
        assert alive(compiled) == 0


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    zero = torch.zeros(())
    assert_same(Result(zero, gradients(model), {}), Result(zero, expected, {}))


def test_two_forwards_then_backwards() -> None:
    model = GPT(3)
    expected = [run_step(copy.deepcopy(model), lambda m, i=i: m(tokens(seed=i))).gradients for i in range(2)]
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        for order in ((0, 1), (1, 0)):
            losses = [compiled(tokens(seed=i)) for i in range(2)]
            assert alive(compiled) == 2
            for i in order:
                model.zero_grad()
                losses[i].backward()
                assert_gradients(model, expected[i])


def test_joint_backward_of_two_forwards() -> None:
    model = GPT(3)
    eager = copy.deepcopy(model)
    (eager(tokens(seed=0)) - 2 * eager(tokens(seed=1))).backward()
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        (compiled(tokens(seed=0)) - 2 * compiled(tokens(seed=1))).backward()
        assert_gradients(model, gradients(eager))


class TwoLosses(GPT):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).logsumexp(-1).mean(), x.square().mean()


def two_losses(model: nn.Module) -> None:
    first, second = model(tokens())
    first.backward(retain_graph=True)
    second.backward()


def test_two_losses_with_retain_graph() -> None:
    model = TwoLosses(3)
    eager = copy.deepcopy(model)
    two_losses(eager)
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        two_losses(compiled)
        assert_gradients(model, gradients(eager))


def test_one_of_two_losses() -> None:
    """A loss that is not used sends no tangent."""
    model = TwoLosses(3)
    eager = copy.deepcopy(model)
    eager(tokens())[1].backward()
    # Autograd hands zeros to a compiled graph where eager has no gradient at all: stock AOT does the same.
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in eager.named_parameters()}
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        compiled(tokens())[1].backward()
        assert_gradients(model, expected)


def test_second_backward_raises() -> None:
    model = GPT(3)
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        loss = compiled(tokens())
        loss.backward()
        expected = gradients(model)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        loss = compiled(tokens())
        for keep in (True, True, False):
            model.zero_grad()
            loss.backward(retain_graph=keep)
            assert_gradients(model, expected)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_abandoned_forwards() -> None:
    model = GPT(3)
    compiled = compile_model(model)
    for _ in range(5):
        loss = compiled(tokens())
    assert alive(compiled) == 1
    del loss
    assert alive(compiled) == 0
    losses = [compiled(tokens()) for _ in range(3)]
    losses[1].backward()
    assert alive(compiled) == 2
    losses.clear()
    assert alive(compiled) == 0


class Explodes(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


def test_exception_after_the_forward_and_in_the_backward() -> None:
    model = GPT(3)
    expected = run_step(copy.deepcopy(model), step)
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        with pytest.raises(ValueError, match="user"):
            _forward_then_raise(compiled)
        assert alive(compiled) == 0
        # Above the graph: the backward never reaches it.
        with pytest.raises(ValueError, match="on purpose"):
            Explodes.apply(compiled(tokens())).backward()
        assert alive(compiled) == 0
        # Below the graph: a hook raises when it gets its gradient, after the graph's backward.
        handle = model.embed.weight.register_hook(_raise)
        with pytest.raises(ValueError, match="hook"):
            compiled(tokens()).backward()
        handle.remove()
        assert alive(compiled) == 0
        assert_same(run_step(compiled, step, owner=model), expected)


def _forward_then_raise(compiled: nn.Module) -> None:
    loss = compiled(tokens())
    if loss.isfinite():
        raise ValueError("user")


def _raise(_: Tensor) -> None:
    raise ValueError("hook")


def test_exception_inside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """An artefact fails half-way (as when memory runs out): the next step works and nothing stays behind."""
    model = GPT(3)
    compiled = compile_model(model)
    expected = run_step(compiled, step, owner=model)
    for _ in under_each_plan(model, compiled):
        graphs = protrain_compile.schedule(compiled).parts[0].schedule.graphs
        for name in ("forward", "backward"):
            calls = [n for n in artefact_calls(graphs[name]) if n.meta["operation"].segment == 2]
            for call in calls:
                run = call.target._run
                monkeypatch.setattr(call.target, "_run", _out_of_memory)
                with pytest.raises(RuntimeError, match="out of memory"):
                    step(compiled).backward()
                monkeypatch.setattr(call.target, "_run", run)
                assert alive(compiled) == 0
                assert_bitwise(run_step(compiled, step, owner=model), expected)


def _out_of_memory(boxed: list[Tensor]) -> None:
    raise RuntimeError("out of memory, on purpose")


class ReturnsHidden(GPT):
    """Also returns what a block made and its backward needs."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        hidden = x
        for block in self.blocks:
            x = block(x)
            hidden = x
        return self.head(self.norm(x)).logsumexp(-1).mean(), hidden


def change_output(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        outputs[1].mul_(2)


def change_parameter(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)


def change_through_optimizer(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_changing_what_the_backward_needs() -> None:
    start = ReturnsHidden(3)
    for change in (change_output, change_parameter, change_through_optimizer):
        eager = copy.deepcopy(start)
        outputs = eager(tokens())
        change(eager, outputs)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs[0].backward()
    model = copy.deepcopy(start)
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        for change in (change_output, change_parameter, change_through_optimizer):
            outputs = compiled(tokens())
            change(model, outputs)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                outputs[0].backward()
            del outputs
            assert alive(compiled) == 0
            model.load_state_dict(start.state_dict())
        compiled(tokens())[0].backward()


class Views(nn.Module):
    """Its matrix products save flattened views of the argument and of the first output.

    (An output that is itself a view of what the graph made loses its version counter inside AOTAutograd, so that a
    change of it goes unnoticed with any backend.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).sin()
        return hidden, self.second(hidden).sin()


@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("which", ["argument", "output"])
def test_changing_what_the_backward_needs_a_view_of(mode: str, which: str) -> None:
    model, x = Views(), torch.randn(2, 3, 8)
    compiled = compile_model(model, compile=mode)
    hidden, out = compiled(x)
    changed = x if which == "argument" else hidden
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.no_grad():
        out = compiled(x)[1]
        out.mul_(2)  # an inference keeps nothing
    hidden, out = compiled(x)
    (hidden.sum() + out.sum()).backward()


def test_abandoned_forward_whose_output_is_kept() -> None:
    """The output owns the token and the token the context; the context must not own the output."""
    model = ReturnsHidden(3)
    compiled = compile_model(model)
    for _ in range(3):
        loss, hidden = compiled(tokens())
    del loss
    assert alive(compiled) == 1
    del hidden
    assert alive(compiled) == 0


def test_argument_that_takes_in_the_output() -> None:
    """``x += f(x)``: the argument's history holds the token of the context that keeps the argument."""
    model = Pair()
    compiled = compile_model(model)
    leaf = torch.randn(2, 8, WIDTH, requires_grad=True)
    for _ in range(3):
        x = leaf * 1
        x.add_(compiled(x))
        del x
    assert alive(compiled) == 0


def test_error_names_what_was_changed() -> None:
    model = GPT(3)
    compiled = compile_model(model)
    loss = compiled(tokens())
    change_parameter(model, (loss, loss))
    with pytest.raises(ContextError, match=r"blocks\.1\.up\.weight"):
        loss.backward()


def test_forwards_under_different_plans() -> None:
    """Each backward follows the plan of its own forward, in whatever order they come."""
    model = GPT(3)
    eager = copy.deepcopy(model)
    expected = [run_step(eager, lambda m, i=i: m(tokens(seed=i))) for i in range(3)]
    compiled = compile_model(model)
    compiled(tokens())
    schedule = protrain_compile.schedule(compiled)
    for order in itertools.permutations(range(3)):
        losses = []
        for i, plan in enumerate((Plan.uniform(), Plan.uniform("recompute"), Plan.uniform("swap"))):
            schedule.use(plan)
            losses.append(compiled(tokens(seed=i)))
        for i in order:
            model.zero_grad()
            losses[i].backward()
            assert_gradients(model, expected[i].gradients)
        assert alive(compiled) == 0


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_gradient_accumulation() -> None:
    model = GPT(3)
    eager = copy.deepcopy(model)
    for i in range(3):
        eager(tokens(seed=i)).backward()
    compiled = compile_model(model)
    for _ in under_each_plan(model, compiled):
        for i in range(3):
            compiled(tokens(seed=i)).backward()
        assert_gradients(model, gradients(eager))


def test_forward_feeds_a_second_forward() -> None:
    """The output of one call is the input of the next, of the same compiled entry."""
    model = Pair()
    eager = copy.deepcopy(model)
    compiled = compile_model(model, plan=Plan.uniform("recompute"))
    x = torch.randn(2, 8, WIDTH)
    compiled(compiled(x)).square().mean().backward()
    eager(eager(x)).square().mean().backward()
    assert_gradients(model, gradients(eager))
    assert alive(compiled) == 0
