"""``prepare`` again, of a model that has not run: what is handed back is what was given, or nothing is undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.prepared import Stack, batch
from torch import nn

import protrain_compile
from protrain_compile import OptionError
from protrain_compile.guards import ManagedParameter


def trained(**options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model and an optimizer with states."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    model(batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def prepare(model: nn.Module, optimizer: Any) -> None:
    protrain_compile.prepare(model, optimizer, device="cpu", memory_budget="1GiB")


def test_a_refused_optimizer_leaves_what_was_prepared() -> None:
    model, optimizer = trained()
    prepare(model, optimizer)
    prepared = type(optimizer)
    other_model, other = trained()
    prepare(other_model, other)
    few = torch.optim.AdamW([next(model.parameters())])
    unsupported = torch.optim.Adagrad(model.parameters())
    for refused, message in ((other, "another model's"), (few, "optimizer lacks"), (unsupported, "not supported")):
        with pytest.raises(OptionError, match=message):
            prepare(model, refused)
        assert type(optimizer) is prepared
        assert all(isinstance(p, ManagedParameter) for p in model.parameters())
    prepare(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_another_optimizer_finds_the_first_as_it_was(options: dict[str, Any]) -> None:
    """Its states are the very tensors, wherever they are, and a fused one unscales gradients itself again."""
    model, optimizer = trained(**options)
    states = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    attributes = set(optimizer.__dict__)
    prepare(model, optimizer)
    prepare(model, torch.optim.AdamW(model.parameters()))
    assert type(optimizer) is torch.optim.AdamW
    assert set(optimizer.__dict__) == attributes
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == bool(options)
    for name, p in model.named_parameters():
        assert optimizer.state[p].keys() == states[name].keys()
        assert all(optimizer.state[p][key] is value for key, value in states[name].items())
