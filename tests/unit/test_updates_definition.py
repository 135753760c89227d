"""The definition equals torch.optim over 50 steps, for every option; other optimizers are refused by name."""

import itertools

import pytest
import torch

from protrain_compile.errors import OptionError
from protrain_compile.updates.definition import AdamRule, Segment, SgdRule, reference_update, rule_of_group
from protrain_compile.updates.formats import ChunkStates

ADAM_CASES = [
    (kind, dict(zip(("weight_decay", "amsgrad", "maximize", "betas", "eps"), values, strict=True)))
    for kind in (torch.optim.Adam, torch.optim.AdamW)
    for values in itertools.product((0.0, 0.1), (False, True), (False, True), ((0.9, 0.999), (0.3, 0.95)), (1e-8, 1e-4))
]
SGD_CASES = [
    (torch.optim.SGD, dict(zip(("weight_decay", "momentum", "dampening", "nesterov", "maximize"), values, strict=True)))
    for values in itertools.product((0.0, 0.1), (0.0, 0.9), (0.0, 0.4), (False, True), (False, True))
    if not (values[3] and (values[1] == 0.0 or values[2] != 0.0))
]


def zeros_like_states(param: torch.Tensor) -> ChunkStates:
    return ChunkStates(param, None, *(torch.zeros_like(param) for _ in range(3)))


@pytest.mark.parametrize(("kind", "options"), ADAM_CASES + SGD_CASES)
def test_fifty_steps_equal_torch(kind, options):
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(97, generator=generator))
    optimizer = kind([theirs], lr=0.01, **options)
    states = zeros_like_states(theirs.detach().clone())
    for step in range(1, 51):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step % 7)
        gradient = torch.randn(97, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        rule = rule_of_group(kind, optimizer.param_groups[0])
        reference_update(states, gradient, [Segment(0, 97, rule.scalars(step))])
    torch.testing.assert_close(states.param, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bad_gradients_do_what_torch_does(fill, amsgrad):
    theirs = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([theirs], lr=0.01, amsgrad=amsgrad)
    states = zeros_like_states(theirs.detach().clone())
    for step in (1, 2, 3):
        theirs.grad = torch.full((4,), fill if step == 2 else 0.5)
        gradient = theirs.grad.clone()
        optimizer.step()
        scalars = rule_of_group(torch.optim.AdamW, optimizer.param_groups[0]).scalars(step)
        reference_update(states, gradient, [Segment(0, 4, scalars)])
    torch.testing.assert_close(states.param, theirs.detach(), equal_nan=True)


def test_gradient_multiplier_scales_the_gradient():
    gradient = torch.randn(10)
    results = []
    for multiplier, given in ((0.125, gradient), (1.0, gradient * 0.125)):
        states = zeros_like_states(torch.ones(10))
        reference_update(states, given, [Segment(0, 10, SgdRule(lr=0.1).scalars(1, multiplier))])
        results.append(states.param)
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.ones(10))


def test_only_the_segments_change():
    states = zeros_like_states(torch.ones(10))
    segments = [Segment(2, 4, AdamRule(lr=0.1).scalars(1)), Segment(7, 8, AdamRule(lr=0.2).scalars(1))]
    reference_update(states, torch.ones(10), segments)
    expected = torch.tensor([1, 1, 0.9, 0.9, 1, 1, 1, 0.8, 1, 1])
    torch.testing.assert_close(states.param, expected)


@pytest.mark.parametrize("bad", [[(0, 11)], [(4, 6), (5, 7)], [(6, 5)], [(4, 6), (0, 2)]])
def test_segments_that_do_not_fit_are_refused(bad):
    states = zeros_like_states(torch.ones(10))
    with pytest.raises(ValueError, match="segment"):
        reference_update(states, torch.ones(10), [Segment(b, e, AdamRule().scalars(1)) for b, e in bad])


def test_missing_moments_and_wrong_gradients_are_refused():
    states = ChunkStates(torch.ones(4), None, torch.zeros(4))
    with pytest.raises(ValueError, match="moment2"):
        reference_update(states, torch.ones(4), [Segment(0, 4, AdamRule().scalars(1))])
    with pytest.raises(ValueError, match="gradient"):
        reference_update(states, torch.ones(5), [Segment(0, 4, SgdRule().scalars(1))])


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="from 1"):
        AdamRule().scalars(0)


def test_adam_with_decoupled_decay_is_adamw():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], weight_decay=0.1, decoupled_weight_decay=True)
    rule = rule_of_group(torch.optim.Adam, optimizer.param_groups[0])
    assert isinstance(rule, AdamRule)
    assert rule.decoupled


def test_tensor_hyper_parameters_are_read():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.25))
    assert rule_of_group(torch.optim.AdamW, optimizer.param_groups[0]).lr == 0.25


class TunedAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.NAdam, TunedAdamW])
def test_other_optimizers_are_refused_by_name(kind):
    group = kind([torch.nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    with pytest.raises(OptionError, match=rf"{kind.__name__}.*torch\.optim\.AdamW"):
        rule_of_group(kind, group)


def test_differentiable_is_refused():
    group = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], differentiable=True).param_groups[0]
    with pytest.raises(OptionError, match="differentiable"):
        rule_of_group(torch.optim.AdamW, group)
