"""omit_tangents: which tangents a backward does without, and that it is then the backward for zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capture import capture
from torch import Tensor, nn

from passes import structure_pipeline
from protrain_compile.program import Program, fake_value

WORDS, WIDTH, ROWS = 24, 8, 6


class Ended(nn.Module):
    """A hidden layer and a head; the ending decides what is returned."""

    def __init__(self, ending: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.ending = ending

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = self.inside(x)
        return self.ending(self.head(hidden), hidden, labels)


def loss_of(logits: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def with_logits(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    return loss_of(logits, hidden, labels), logits


def with_both(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    return loss_of(logits, hidden, labels), logits, hidden


def with_probabilities(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    return loss_of(logits, hidden, labels), logits.softmax(-1)


def logits_only(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    return logits, labels


def apart(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    """Of the head's gradients there is nothing but that of the logits."""
    return hidden.square().mean(), logits


def two_outputs(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    """What is trained on cannot be told: there is no loss."""
    return logits, hidden


def twice(logits: Tensor, hidden: Tensor, labels: Tensor) -> Any:
    """Each of two tangents may be absent, but not both: the loss does not reach the head."""
    return hidden.square().mean(), logits, 2 * logits


def program_of(ending: Callable[..., Any]) -> Program:
    x, labels = torch.randn(ROWS, WIDTH), torch.randint(WORDS, (ROWS,))
    program = capture(Ended(ending), x, labels)
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    return program


@pytest.mark.parametrize(
    ("ending", "absent"),
    [
        (loss_of, set()),
        (with_logits, {1}),
        (with_both, {1, 2}),
        (with_probabilities, set()),
        (logits_only, set()),
        (apart, set()),
        (two_outputs, set()),
        (twice, {1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_which_are_absent(ending: Callable[..., Any], absent: set[int]) -> None:
    program = program_of(ending)
    assert program.absent_tangents == absent
    parts = program.templates[0].parts
    assert parts is not None
    assert (parts.complete_backward is not None) == bool(absent)


@pytest.mark.parametrize("ending", [with_logits, with_both], ids=lambda ending: ending.__name__)
def test_the_backward_without_is_the_complete_one_for_zeros(ending: Callable[..., Any]) -> None:
    parts = program_of(ending).templates[0].parts
    assert parts is not None
    assert parts.backward is not None
    assert parts.complete_backward is not None
    values = []
    for node in parts.complete_backward.graph.find_nodes(op="placeholder"):
        fake = fake_value(node)
        values.append(
            torch.randn(fake.shape) if fake.is_floating_point() else torch.zeros(fake.shape, dtype=fake.dtype)
        )
    places = [i for i, ref in enumerate(parts.backward_inputs) if ref.kind == "tangent" and ref.index > 0]
    given = [None if i in places else value for i, value in enumerate(values)]
    zeros = [torch.zeros_like(value) if i in places else value for i, value in enumerate(values)]
    torch.testing.assert_close(parts.backward(*given), parts.complete_backward(*zeros))
    assert parts.complete_backward(*values)[0].ne(parts.backward(*given)[0]).any()
