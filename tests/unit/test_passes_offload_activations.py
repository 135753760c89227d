"""Which values are swapped, and where their copies start and end."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.capture import gpt_program, mixed, schedule_of, write_schedule
from support.light import GPT
from support.models import tokens
from torch import Tensor, fx, nn

from passes.schedule_graph import artefact_calls
from protrain_compile import Plan, ops
from protrain_compile.liveness import kept_sources, saved_bytes, schedule_liveness
from protrain_compile.program import Program, results_of
from protrain_compile.schedule import Schedule, operation_of


def swapped_bytes(schedule: Schedule) -> dict[int, int]:
    """Return the bytes that each segment swaps."""
    forward = schedule.graphs["forward"].graph
    return {
        int(node.kwargs["segment"]): operation_of(node).moved_bytes  # type: ignore[arg-type, union-attr]
        for node in forward.find_nodes(op="call_function", target=ops.swap_out)
    }


def shown(schedule: Schedule, graph: str) -> list[str]:
    """Return what a graph does, as ``offload 1``."""
    operations = (operation_of(node) for node in schedule.graphs[graph].graph.nodes)
    return [f"{each.op} {each.segment}" for each in operations if each is not None]


def test_nothing_changes_where_nothing_is_swapped() -> None:
    schedule = write_schedule(gpt_program(), "keep")
    assert schedule.swapped_bytes == ()
    assert not any("swap" in node.meta for module in schedule.graphs.values() for node in module.graph.nodes)


def test_the_order_of_operations() -> None:
    schedule = write_schedule(gpt_program(4), mixed("sksr"))
    assert shown(schedule, "forward") == [
        "forward 0", "forward 1", "offload 1", "forward 2", "forward 3", "release 1", "offload 3", "forward 4",
        "forward 5", "release 3",
    ]  # fmt: skip
    assert shown(schedule, "backward") == [
        "reload 3", "backward 5", "recompute 4", "backward 4", "wait 3", "reload 1", "backward 3", "backward 2",
        "wait 1", "backward 1", "backward 0",
    ]  # fmt: skip


def test_all_that_a_block_saves_alone_leaves() -> None:
    """Under keep it lies on the device; under swap nothing of it does, and the forward ends lower by its bytes."""
    keep, swap = (write_schedule(gpt_program(), plan) for plan in ("keep", "swap"))
    blocks = [i for i, s in enumerate(swap.program.segments) if s.stage.kind == "block"]
    assert list(swapped_bytes(swap)) == blocks
    left = sum(saved_bytes(keep).values()) - sum(saved_bytes(swap).values())
    ends = [schedule_liveness(each)["forward"].end_bytes for each in (keep, swap)]
    assert ends[0] - ends[1] == left
    assert left <= sum(swapped_bytes(swap).values()) <= 1.05 * left  # padding of small pieces
    assert 0 < sum(saved_bytes(swap).values()) < 0.3 * sum(saved_bytes(keep).values())


def test_kept_values_are_bound_as_before() -> None:
    schedule = write_schedule(gpt_program(), mixed("sks"))
    inputs = schedule.backward_inputs
    sources = kept_sources(schedule)
    assert inputs.num_kept == len(sources) == len(inputs.kept_outputs) == len(inputs.kept_arguments)
    handles = [node for node in sources.values() if node.target is ops.swap_out]
    assert results_of(schedule.graphs["forward"])[-2:] == tuple(handles)
    assert len(schedule.swapped_bytes) == len(handles) == 2
    kinds = [node.meta.get("kind") for node in schedule.graphs["backward"].graph.find_nodes(op="placeholder")]
    assert kinds == [None, *sorted(kinds[1:], key=["primals", "kept", "tangents"].index)]


class Shared(nn.Module):
    """Values that two blocks save, that leave the graph, or that are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.stem(x).sigmoid()
        seen = x
        for block in self.blocks:
            x, seen = block(x, shared, scale)
        return x.sum(), seen


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, shared: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.tanh(self.down(torch.tanh(self.up(x))))
        return x + torch.tanh(seen * shared * scale), seen


@functools.cache
def shared_program() -> Program:
    return schedule_of(Shared(), torch.randn(4, 8), torch.randn(4, 8)).program


def swapped_sources(schedule: Schedule) -> dict[int, list[fx.Node]]:
    forward = schedule.graphs["forward"].graph
    return {
        int(node.kwargs["segment"]): list(node.args[1].all_input_nodes)  # type: ignore[arg-type, union-attr]
        for node in forward.find_nodes(op="call_function", target=ops.swap_out)
    }


def test_what_two_blocks_save_stays() -> None:
    schedule = write_schedule(shared_program(), "swap")
    sources, kept = swapped_sources(schedule), set(kept_sources(schedule).values())
    gone = {node for values in sources.values() for node in values}
    assert len(sources) == 3
    assert gone.isdisjoint(kept)
    prologue = next(call for call in artefact_calls(schedule.graphs["forward"]))
    assert any(node.args[0] is prologue for node in kept if node.args), "the value that all blocks save is kept once"


def test_outputs_and_arguments_stay() -> None:
    schedule = write_schedule(shared_program(), "swap")
    outputs = set(results_of(schedule.graphs["forward"])[: schedule.program.num_outputs])
    for values in swapped_sources(schedule).values():
        assert outputs.isdisjoint(values)
        assert all(node.op == "call_function" for node in values)


@pytest.mark.parametrize("plan", ["sks", "srs", "sss", "rss"])
def test_every_value_has_one_place(plan: str) -> None:
    """What the backward takes of the forward is swapped or kept, and nothing is both."""
    schedule = write_schedule(shared_program(), mixed(plan))
    names: list[Any] = [node for values in swapped_sources(schedule).values() for node in values]
    assert len(names) == len(set(names))


class Frozen(nn.Module):
    """Its middle block saves nothing: its backward reads its weights and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_a_block_may_have_nothing_to_swap() -> None:
    schedule = schedule_of(Frozen(), torch.randn(4, 8), plan=Plan.uniform("swap"))
    first, _, last = (i for i, s in enumerate(schedule.program.segments) if s.stage.kind == "block")
    assert list(swapped_sources(schedule)) == [first, last]


def test_inference_swaps_nothing() -> None:
    with torch.no_grad():
        schedule = schedule_of(GPT(3), tokens(), plan=Plan.uniform("swap"))
    assert schedule.swapped_bytes == ()
    assert list(schedule.graphs) == ["inference"]
