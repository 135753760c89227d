"""Contexts: freed with their token, refused when stale."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support.capture import gpt_program, write_schedule
from torch import Tensor

from protrain_compile import ContextError
from protrain_compile.runtime.context import Context, ContextTable
from protrain_compile.schedule import Schedule


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return write_schedule(gpt_program(), "keep")


def test_a_context_lives_as_long_as_its_token(schedule: Schedule) -> None:
    table = ContextTable()
    token = table.open(Context(schedule, [], [torch.ones(2)]))
    assert len(table) == 1
    assert table.find(token) is table.find(token)
    del token
    gc.collect()
    assert len(table) == 0


def test_kept_values_die_with_the_context(schedule: Schedule) -> None:
    table, value = ContextTable(), torch.ones(2)
    reference = weakref.ref(value)
    token = table.open(Context(schedule, [], [value]))
    del value
    assert reference() is not None
    del token
    assert reference() is None


def test_contexts_do_not_mix(schedule: Schedule) -> None:
    table = ContextTable()
    contexts = [Context(schedule, [], [torch.full((1,), float(i))]) for i in range(3)]
    tokens = [table.open(context) for context in contexts]
    assert [table.find(token) for token in reversed(tokens)] == contexts[::-1]
    del tokens[1]
    assert len(table) == 2
    assert table.find(tokens[0]) is contexts[0]
    assert table.find(tokens[1]) is contexts[2]


def test_a_token_is_small_and_on_the_host(schedule: Schedule) -> None:
    token = ContextTable().open(Context(schedule, [], []))
    assert (token.shape, token.dtype, token.device.type) == ((), torch.int64, "cpu")


def test_a_copied_token_outlives_its_context(schedule: Schedule) -> None:
    table = ContextTable()
    token = copy.deepcopy(table.open(Context(schedule, [], [])))
    with pytest.raises(ContextError, match="its token was copied and the original freed, as saved-tensor hooks"):
        table.find(token)


def test_a_copied_token_finds_a_context_that_is_alive(schedule: Schedule) -> None:
    table = ContextTable()
    token = table.open(Context(schedule, [], []))
    assert table.find(token.clone()) is table.find(token)


def test_arguments_come_once(schedule: Schedule) -> None:
    primal, kept = torch.ones(2), torch.ones(3)
    context = Context(schedule, [primal], [kept])
    values = context.arguments(keep=False)
    assert values[0] is primal
    assert values[1] is kept
    with pytest.raises(ContextError, match=r"backward through the compiled graph a second time.*retain_graph=True"):
        context.arguments(keep=False)


def test_arguments_are_given_up(schedule: Schedule) -> None:
    """Each value dies at its last use in the backward, so the context must not hold it."""
    kept = torch.ones(3)
    reference = weakref.ref(kept)
    context = Context(schedule, [], [kept])
    del kept
    values = context.arguments(keep=False)
    values.clear()
    assert reference() is None


def test_arguments_stay_under_retain_graph(schedule: Schedule) -> None:
    context = Context(schedule, [torch.ones(2)], [torch.ones(3)])
    first = context.arguments(keep=True)
    first.clear()
    assert len(context.arguments(keep=False)) == 2
    with pytest.raises(ContextError):
        context.arguments(keep=False)


def primal_at(schedule: Schedule, position: int) -> tuple[list[Any], str]:
    values: list[Any] = [torch.ones(2, 3) for _ in schedule.backward_inputs.primals]
    return values, schedule.program.inputs[schedule.backward_inputs.primals[position]].name


@pytest.mark.parametrize("position", [0, -1])
def test_a_modified_input_is_named(schedule: Schedule, position: int) -> None:
    values, name = primal_at(schedule, position)
    context = Context(schedule, values, [])
    values[position].mul_(2)
    with pytest.raises(ContextError, match=rf"{name} \(shape \(2, 3\)\) .*modified by an inplace operation") as caught:
        context.arguments(keep=False)
    assert "at version 1, expected version 0" in str(caught.value)


def test_a_modified_output(schedule: Schedule) -> None:
    """An output that shares memory with a kept value is watched in its stead: it may be another tensor."""
    output = torch.ones(2)
    context = Context(schedule, [], [torch.ones(2)], [None, output])
    output.add_(1)
    with pytest.raises(ContextError, match="an output of the compiled graph"):
        context.arguments(keep=False)


def test_a_refused_backward_consumes_nothing(schedule: Schedule) -> None:
    output = torch.ones(2)
    context = Context(schedule, [], [output], [output])
    output.add_(1)
    for _ in range(2):
        with pytest.raises(ContextError, match="modified"):
            context.arguments(keep=False)


def test_what_has_no_version(schedule: Schedule) -> None:
    with torch.inference_mode():
        without = torch.ones(2)
    values: list[Any] = [3, None, without]
    assert Context(schedule, values, []).arguments(keep=False) == values


def test_modifications_before_the_forward_do_not_count(schedule: Schedule) -> None:
    value: Tensor = torch.ones(2)
    value.add_(1)
    assert Context(schedule, [value], []).arguments(keep=False)[0] is value
