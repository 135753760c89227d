"""UpdateGuard: when a backward may update, and what is refused after it did."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from protrain_compile import DoorError
from protrain_compile.update_guard import UpdateGuard

RULES = ("rules",)


def guard(*, steps: int = 1, **arguments: Any) -> UpdateGuard:
    """Return a guard after ``steps`` ordinary steps."""
    made = UpdateGuard(**{"clips": False, "micro_batches": 1, "half": False, **arguments})
    for _ in range(steps):
        backward(made)
        made.before_step(RULES, waiting=True)
    return made


def backward(which: UpdateGuard, *, alone: bool = True, waiting: bool = False) -> str:
    which.before_forward()
    return which.mode_of_backward(alone=alone, waiting=waiting, rules=RULES)


def test_in_backward_from_the_second_step() -> None:
    first = guard(steps=0)
    assert backward(first) == "at_step"
    first.before_step(RULES, waiting=True)
    assert backward(first) == "in_backward"
    first.before_step(RULES, waiting=False)
    assert backward(first) == "in_backward"


def test_steps_without_gradients_do_not_count() -> None:
    first = guard(steps=0)
    first.before_step(RULES, waiting=False)
    assert backward(first) == "at_step"


@pytest.mark.parametrize("arguments", [{"clips": True}, {"half": True}])
def test_waits_always(arguments: dict[str, bool]) -> None:
    waits = guard(steps=3, **arguments)
    assert backward(waits) == "at_step"
    waits.before_forward()
    waits.before_zero_grad()
    waits.gradient_read("w")


def test_waits_for_other_forwards_and_waiting_gradients() -> None:
    assert backward(guard(), alone=False) == "at_step"
    assert backward(guard(), waiting=True) == "at_step"


def test_waits_once_a_gradient_was_read() -> None:
    reads = guard(steps=0)
    backward(reads)
    reads.gradient_read("w")
    reads.before_step(RULES, waiting=True)
    assert backward(reads) == "at_step"
    assert reads.gradients_were_read


def test_the_last_declared_micro_batch_updates() -> None:
    accumulates = guard(micro_batches=3)
    assert [backward(accumulates, waiting=i > 0) for i in range(3)] == ["at_step", "at_step", "in_backward"]
    accumulates.before_step(RULES, waiting=False)
    assert backward(accumulates) == "at_step"
    accumulates.before_zero_grad()
    assert [backward(accumulates, waiting=i > 0) for i in range(3)] == ["at_step", "at_step", "in_backward"]
    with pytest.raises(DoorError, match="gradient_accumulation_steps"):
        backward(accumulates)


@pytest.mark.parametrize(
    "door",
    [
        lambda g: g.before_forward(),
        lambda g: g.mode_of_backward(alone=True, waiting=False, rules=RULES),
        lambda g: g.gradient_read("w"),
        lambda g: g.before_zero_grad(),
        lambda g: g.before_step(("others",), waiting=False),
    ],
)
def test_doors_after_an_update(door: Any) -> None:
    ahead = guard()
    assert backward(ahead) == "in_backward"
    assert ahead.ahead
    with pytest.raises(DoorError, match=r"max_grad_norm|gradient_accumulation_steps"):
        door(ahead)
    ahead.before_step(RULES, waiting=False)
    assert not ahead.ahead
    door(ahead)


def test_a_broken_backward_is_told_once() -> None:
    broken = guard()
    backward(broken)
    broken.broke_off(0.25)
    broken.before_zero_grad()
    with pytest.warns(RuntimeWarning, match="after 25% of the trainable chunks"):
        broken.before_forward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        broken.before_forward()
    assert backward(broken) == "in_backward"


def test_a_broken_backward_that_updated_nothing_is_silent() -> None:
    broken = guard(clips=True)
    backward(broken)
    broken.broke_off(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        broken.before_forward()
