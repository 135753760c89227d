"""A loss in slices of tokens is the loss: value and gradients as in eager, for every loss that is sliced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capture import compiled
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.errors import BudgetError
from protrain_compile.profile import HardwareProfile
from protrain_compile.profiler.estimate import estimate_profile
from protrain_compile.row_loop import loop_of, row_loops
from protrain_compile.shape_reader import step_shape
from protrain_compile.solver import search

WORDS, WIDTH = 96, 16
IGNORED = -100


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 7


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    moved = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(logits.float().view(-1, WORDS), moved.reshape(-1), ignore_index=IGNORED)


def regularised(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels) + 1e-3 * logits.float().logsumexp(-1).square().mean()


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(5 * torch.tanh(logits / 5), labels)


LOSSES = [mean, summed, smoothed, shifted, regularised, capped]


class Speaker(nn.Module):
    """Two blocks, and a projection to words whose loss is computed inside the model."""

    def __init__(self, loss: Callable[..., Tensor] = mean, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.loss = loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.loss(self.head(self.norm(hidden)), labels)


class Returning(Speaker):
    """Returns the logits besides the loss, as models of Hugging Face do."""

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(self.norm(hidden))
        return self.loss(logits, labels), logits


OWN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loss": lambda loss, logits: loss,
    "both": lambda loss, logits: loss + logits.float().square().mean(),
    "logits": lambda loss, logits: logits.float().logsumexp(-1).mean(),
}


def batch(rows: int = 4, length: int = 24) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = words.roll(-1, 1).clone()
    labels[0, 3:9] = IGNORED
    return words, labels


def run(model: nn.Module, function: Callable[..., Tensor], inputs: Any, factor: float) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = function(*inputs)
    (loss * factor).backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    """Compare losses, and gradients relative to the largest number of each."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for each, like in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(each, like, rtol=1e-5, atol=2e-6 * float(like.abs().max()))


def sliced(model: nn.Module, inputs: Any, **options: Any) -> tuple[nn.Module, Any]:
    function, schedule = compiled(model, *inputs, plan=Plan.uniform("keep", loss="sliced"), **options)
    assert schedule.parts[0].schedule.loss_slices > 1
    return function, schedule


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("tied", [False, True], ids=["free", "tied"])
def test_equals_eager(loss: Callable[..., Tensor], tied: bool) -> None:
    model = Speaker(loss, bias=not tied, tied=tied)
    inputs = batch()
    function, _ = sliced(model, inputs)
    for factor in (1.0, 0.3):
        expected = run(model, model, inputs, factor)
        found = run(model, function, inputs, factor)
        assert_same(found, expected)


@pytest.mark.parametrize("length", [11, 23, 48])
def test_uneven_slices(length: int) -> None:
    """Token counts that no slice divides leave a shorter slice at the end."""
    model = Speaker()
    inputs = batch(3, length)
    function, _ = sliced(model, inputs)
    assert_same(run(model, function, inputs, 1.0), run(model, model, inputs, 1.0))


def test_16_bit_gradients_are_as_exact_as_unsliced_ones() -> None:
    exact = Speaker().double()
    model = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(model.state_dict())
    inputs = batch(8, 48)
    truth = run(exact, exact, inputs, 1.0)[1]

    def error(gradients: list[Tensor]) -> float:
        return max(float((g.double() - t).norm() / t.norm()) for g, t in zip(gradients, truth, strict=True))

    other = copy.deepcopy(model)
    whole, _ = compiled(other, *inputs, plan=Plan.uniform("keep", loss="whole"))
    unsliced = error(run(other, whole, inputs, 1.0)[1])
    function, _ = sliced(model, inputs)
    assert error(run(model, function, inputs, 1.0)[1]) < 1.5 * unsliced


@pytest.mark.parametrize("own", OWN_LOSSES)
@pytest.mark.parametrize("loss", [summed, smoothed, shifted], ids=lambda loss: loss.__name__)
def test_returned_logits(loss: Callable[..., Tensor], own: str) -> None:
    """Exact with a loss of one's own on them and without, and so are they."""
    model = Returning(loss, bias=loss is summed, tied=loss is shifted)
    inputs = batch()
    function, _ = sliced(model, inputs)
    torch.testing.assert_close(function(*inputs)[1], model(*inputs)[1])
    expected = run(model, lambda *given: OWN_LOSSES[own](*model(*given)), inputs, 0.3)
    assert_same(run(model, lambda *given: OWN_LOSSES[own](*function(*given)), inputs, 0.3), expected)


def test_returned_logits_with_inductor() -> None:
    model = Returning(shifted, tied=True)
    inputs = batch(3, 24)
    function, _ = sliced(model, inputs, compile="inductor")
    for own in OWN_LOSSES.values():
        expected = run(model, lambda *given, own=own: own(*model(*given)), inputs, 0.3)
        found = run(model, lambda *given, own=own: own(*function(*given)), inputs, 0.3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_one_forward_whose_logits_are_used_later() -> None:
    model = Returning()
    inputs = batch()
    function, _ = sliced(model, inputs)

    def twice(one: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        loss, logits = one(*inputs)
        loss.backward(retain_graph=True)
        logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for found, expected in zip(twice(function), twice(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_returned_logits_are_sliced_where_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    model = Returning(shifted)
    inputs = batch(8, 48)
    with pytest.raises(BudgetError) as refused:
        compiled(model, *inputs, plan=None, memory_budget=1)
    function, schedule = compiled(model, *inputs, plan=None, memory_budget=refused.value.needed_bytes)
    used = schedule.parts[0].schedule
    assert used.loss_slices > 1
    profile = estimate_profile(used.program, HardwareProfile.load("h200"), "eager")
    with pytest.raises(BudgetError):
        search(
            step_shape(used.program, loss="whole"), profile, device_bytes=refused.value.needed_bytes, host_bytes=None
        )
    for own in ("loss", "both"):
        expected = run(model, lambda *given, own=own: OWN_LOSSES[own](*model(*given)), inputs, 1.0)
        assert_same(run(model, lambda *given, own=own: OWN_LOSSES[own](*function(*given)), inputs, 1.0), expected)
        assert ("what Returning returns besides its loss" in caplog.text) == (own == "both")


def test_frozen_head() -> None:
    """Without a gradient for the weights only the hidden states' gradient leaves the loop."""
    model = Speaker()
    model.head.requires_grad_(False)
    inputs = batch()
    function, _ = sliced(model, inputs)
    assert_same(run(model, function, inputs, 0.5), run(model, model, inputs, 0.5))


def test_two_forwards_before_their_backwards() -> None:
    model = Speaker()
    first = batch()
    second = tuple(each.flip(0) for each in first)
    function, _ = sliced(model, first)
    expected = run(model, lambda a, b: model(*a) + 2 * model(*b), (first, second), 1.0)
    found = run(model, lambda a, b: function(*a) + 2 * function(*b), (first, second), 1.0)
    assert_same(found, expected)


def test_evaluation_is_sliced_too() -> None:
    model = Speaker()
    inputs = batch()
    function, _ = sliced(model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(function(*inputs), model(*inputs))
    parts = protrain_compile.schedule(function).parts
    assert [part.schedule.loss_slices > 1 for part in parts] == [True, True]


@pytest.mark.parametrize("residency", ["persistent", "offloaded", "split"])
def test_prepared_model(residency: str) -> None:
    torch.manual_seed(0)
    reference = Returning(tied=True)
    model = copy.deepcopy(reference)
    inputs = batch()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (reference, model)]
    plan = Plan.uniform("recompute", residency, loss="sliced")
    model, optimizers[1] = protrain_compile.prepare(model, optimizers[1], plan=plan)
    function = torch.compile(model, backend="protrain", options={"compile": "eager", "schedule": "off"})
    for step in range(5):
        for each, optimizer in zip((reference, function), optimizers, strict=True):
            OWN_LOSSES["both" if step == 3 else "loss"](*each(*inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), found in zip(reference.named_parameters(), model.state_dict().values(), strict=False):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "one by one"])
def test_with_inductor(gathered: bool) -> None:
    """Seven slices and a rest; the gradient of several is multiplied at once where no bias needs it, too."""
    model = Speaker(smoothed, bias=not gathered)
    inputs = batch(5, 23)
    function, schedule = sliced(model, inputs, compile="inductor")
    (sliced_loss,) = schedule.parts[0].graph.program.sliced.values()
    (call,) = row_loops(schedule.parts[0].graph.program.templates[sliced_loss].joint.graph)
    assert (loop_of(call).window is not None) == gathered
    # Inductor adds in another order, label smoothing over all words; the bound that this test had before.
    torch.testing.assert_close(run(model, function, inputs, 0.3), run(model, model, inputs, 0.3), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_gradient_laid_out_by_words(mode: str) -> None:
    """As of logits times a transposed weight for every token and word: the rows of a window are contiguous even so."""
    weights = torch.rand(WORDS, 96).t()
    model = Speaker(lambda logits, labels: (weights * logits.flatten(0, 1)).logsumexp(-1).square().mean())
    inputs = batch()
    function, schedule = sliced(model, inputs, compile=mode)
    (sliced_loss,) = schedule.parts[0].graph.program.sliced.values()
    (call,) = row_loops(schedule.parts[0].graph.program.templates[sliced_loss].joint.graph)
    assert loop_of(call).window is not None
    assert not loop_of(call).window_value.is_contiguous()
    # as above: fp32 sums in Inductor's order
    torch.testing.assert_close(run(model, function, inputs, 0.3), run(model, model, inputs, 0.3), rtol=1e-4, atol=1e-6)


def test_model_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(
                vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
            )
            self.model = LlamaForCausalLM(config)

        def forward(self, words: Tensor, labels: Tensor) -> Tensor:
            return self.model(input_ids=words, labels=labels, use_cache=False).loss

    model = Loss()
    inputs = batch()
    function, _ = sliced(model, inputs)
    assert_same(run(model, function, inputs, 1.0), run(model, model, inputs, 1.0))
