"""The verifier's checks of swapped values, each with a graph that is broken on purpose."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
from support.capture import gpt_program, mixed, write_schedule
from torch import fx

from passes.effects import EFFECTS, Call, Ledger, Step
from passes.schedule_graph import artefact_calls
from passes.verify import verify_schedule
from passes.verify_swaps import verify_swaps
from protrain_compile import ops
from protrain_compile.errors import VerifierError
from protrain_compile.program import results_of
from protrain_compile.schedule import Schedule


def swapped() -> Schedule:
    return write_schedule(gpt_program(4), mixed("sksk"))


def nodes_of(schedule: Schedule, graph: str, target: Any) -> list[fx.Node]:
    return list(schedule.graphs[graph].graph.find_nodes(op="call_function", target=target))


def release_before_the_copy(schedule: Schedule) -> None:
    nodes_of(schedule, "forward", ops.swap_out)[1].prepend(nodes_of(schedule, "forward", ops.release_swapped)[1])


def no_release(schedule: Schedule) -> None:
    graph = schedule.graphs["forward"].graph
    graph.erase_node(nodes_of(schedule, "forward", ops.release_swapped)[0])


def two_releases(schedule: Schedule) -> None:
    release = nodes_of(schedule, "forward", ops.release_swapped)[0]
    with release.graph.inserting_after(release):
        again = release.graph.node_copy(release)
    again.meta = dict(release.meta)


def a_wait_for_other_values(schedule: Schedule) -> None:
    first, second = nodes_of(schedule, "backward", ops.wait_reload)
    second.args = (second.args[0], first.args[1])


def a_reload_of_other_values(schedule: Schedule) -> None:
    first, second = nodes_of(schedule, "backward", ops.reload)
    first.args, second.args = second.args, first.args


def handles_in_another_order(schedule: Schedule) -> None:
    output = schedule.graphs["forward"].graph.output_node()
    results = results_of(schedule.graphs["forward"])
    output.args = ((*results[:-2], results[-1], results[-2]),)


def another_layout(schedule: Schedule) -> None:
    wait = nodes_of(schedule, "backward", ops.wait_reload)[0]
    layout = wait.meta["layout"]
    wait.meta["layout"] = dataclasses.replace(layout, values=layout.values[:-1])


def what_was_released_leaves(schedule: Schedule) -> None:
    packed: Any = nodes_of(schedule, "forward", ops.swap_out)[0].args[1]
    output = schedule.graphs["forward"].graph.output_node()
    output.args = ((packed.args[0], *results_of(schedule.graphs["forward"])),)


def a_policy_that_keeps(schedule: Schedule) -> None:
    schedule.plan = mixed("kksk").fit(schedule.program.block_names)


def no_reload(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"].graph
    wait = nodes_of(schedule, "backward", ops.wait_reload)[0]
    reload: Any = wait.args[1]
    wait.target = ops.reload
    wait.args = reload.args
    graph.erase_node(reload)


def nothing_comes_back(schedule: Schedule) -> None:
    for target in (ops.reload, ops.wait_reload):
        nodes_of(schedule, "backward", target)[0].target = operator.getitem


MUTANTS: list[tuple[Callable[[Schedule], None], str]] = [
    (release_before_the_copy, r"release_swapped\w* \(forward, block 2\): comes out of turn"),
    (no_release, r"swap_out\w* \(forward, block 0\): is not followed by release_swapped"),
    (two_releases, r"comes out of turn \(release_swapped\w*\)"),
    (a_wait_for_other_values, r"wait_reload\w* \(backward, block 0\): is not for the values of reload"),
    (a_reload_of_other_values, r"reloads what the forward did not swap for it"),
    (handles_in_another_order, r"reloads what the forward did not swap for it"),
    (another_layout, r"reloads values otherwise than they were swapped"),
    (what_was_released_leaves, r"leaves the graph, although release_swapped\w* frees it"),
    (a_policy_that_keeps, r"swaps a segment whose policy is keep"),
    (no_reload, r"is not followed by wait_reload"),
    (nothing_comes_back, r"swap_out\w* \(forward, block 2\): swaps values that the backward does not"),
]


@pytest.mark.parametrize(("mutate", "message"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_graph_is_refused(mutate: Callable[[Schedule], None], message: str) -> None:
    schedule = swapped()
    verify_swaps(schedule, "after x: ")
    mutate(schedule)
    with pytest.raises(VerifierError, match=message):
        verify_swaps(schedule, "after x: ")


def products() -> Schedule:
    return write_schedule(gpt_program(4), mixed("xkxk"))


def no_recompute(schedule: Schedule) -> None:
    """The backward takes what came back, and the values that it lacks from another block."""
    calls = [node for node in artefact_calls(schedule.graphs["backward"]) if "recompute" in str(node.target)]
    calls[1].replace_all_uses_with(calls[0])
    packed = calls[1].args[0]
    assert isinstance(packed, fx.Node)
    schedule.graphs["backward"].graph.erase_node(calls[1])
    schedule.graphs["backward"].graph.erase_node(packed)


PRODUCTS: list[tuple[Callable[[Schedule], None], Callable[[Schedule, str], None], str]] = [
    (no_reload, verify_swaps, r"is not followed by wait_reload"),
    (nothing_comes_back, verify_swaps, r"swap_out\w* \(forward, block 2\): swaps values that the backward does not"),
    (no_recompute, verify_schedule, r"runs block 0 without the recompute that its policy asks for"),
]


@pytest.mark.parametrize(("mutate", "check", "message"), PRODUCTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_recompute_lacks_what_it_needs(
    mutate: Callable[[Schedule], None], check: Callable[[Schedule, str], None], message: str
) -> None:
    schedule = products()
    verify_schedule(schedule, "x")
    mutate(schedule)
    with pytest.raises(VerifierError, match=message):
        check(schedule, "x")


def test_a_recompute_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = products()
    monkeypatch.setitem(EFFECTS, ops.wait_reload, lambda call, ledger: ())
    message = r"t1_recompute_pointwise\w* \(backward, block 2\): reads .* may still be written by reload"
    with pytest.raises(VerifierError, match=message):
        verify_schedule(schedule, "x")


WAITS = [
    (
        ops.swap_out,
        "computed",
        r"swap_out \(forward, block 0\): reads .* may still be written by t\d_forward",
    ),
    (
        ops.release_swapped,
        "swapped",
        r"release_swapped \(forward, block 0\): writes .* may still be read by swap_out",
    ),
    (
        ops.reload,
        "allocated",
        r"reload\w* \(backward, block 2\): writes .*, which may still be written by reload",
    ),
    (
        ops.wait_reload,
        "reloaded",
        r"t1_backward\w* \(backward, block 2\): reads .* may still be written by reload",
    ),
]


@pytest.mark.parametrize(("target", "kind", "message"), WAITS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_missing_wait(target: Any, kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, row = swapped(), EFFECTS[target]

    def changed_row(call: Call, ledger: Ledger) -> tuple[Step, ...]:
        steps = row(call, ledger)
        return tuple(dataclasses.replace(s, waits=tuple(e for e in s.waits if e.kind != kind)) for s in steps)

    verify_schedule(schedule, "x")
    monkeypatch.setitem(EFFECTS, target, changed_row)
    with pytest.raises(VerifierError, match=message):
        verify_schedule(schedule, "x")
