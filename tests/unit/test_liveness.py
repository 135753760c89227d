"""Liveness: what it says is alive is what is alive when the graphs run."""

from __future__ import annotations

import operator

import pytest
import torch
from support.capture import gpt_program, mixed, schedule_of, write_schedule
from support.light import GPT
from support.memory import measured_live_bytes
from support.models import Llama, tokens
from torch import Tensor, fx, nn

from protrain_compile import Plan, ops
from protrain_compile.liveness import Liveness, kept_sources, saved_bytes, schedule_liveness
from protrain_compile.program import fake_value
from protrain_compile.schedule import Schedule, operation_of
from protrain_compile.sizes import size_bytes

PLANS = ["keep", "recompute", mixed("krk"), mixed("rkk"), "swap", mixed("srs")]


def check_against_measured(schedule: Schedule) -> None:
    predicted = schedule_liveness(schedule)
    measured = measured_live_bytes(schedule)
    assert predicted.keys() == measured.keys()
    for name, live in measured.items():
        assert [each - predicted[name].held_bytes for each in predicted[name].live_bytes.values()] == live, name


@pytest.mark.parametrize("plan", PLANS, ids=["keep", "recompute", "krk", "rkk", "swap", "srs"])
def test_a_decoder(plan: Plan | str) -> None:
    check_against_measured(write_schedule(gpt_program(), plan))


def test_another_structure() -> None:
    schedule = schedule_of(Llama(2), tokens())
    check_against_measured(schedule)
    for plan in ("recompute", "swap"):
        check_against_measured(write_schedule(schedule.program, plan))


class OneValueBlock(nn.Module):
    """Its backward needs the product alone: of what ``mix`` is multiplied with, no gradient asks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.down = nn.Buffer(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(x @ self.mix)  # type: ignore[no-any-return]


def test_a_swap_of_one_value() -> None:
    schedule = schedule_of(nn.Sequential(*(OneValueBlock() for _ in range(3))), torch.ones(4, 8), plan="swap")
    layouts = [node.meta["layout"] for node in schedule.graphs["forward"].graph.nodes if node.target is ops.swap_out]
    assert [len(layout.values) for layout in layouts] == [1] * 3
    check_against_measured(schedule)


def test_frozen_and_untied() -> None:
    model = GPT(3, tied=False)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    check_against_measured(schedule_of(model, tokens(), plan="recompute"))


def test_inference() -> None:
    with torch.no_grad():
        schedule = schedule_of(GPT(3), tokens())
    check_against_measured(schedule)
    (alive,) = schedule_liveness(schedule).values()
    assert alive.end_bytes == alive.held_bytes + size_bytes(map(fake_value, schedule.program.results))


@pytest.fixture(scope="module", params=PLANS[:3], ids=["keep", "recompute", "krk"])
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return write_schedule(gpt_program(), request.param)


def test_bounds(schedule: Schedule) -> None:
    for name, alive in schedule_liveness(schedule).items():
        operations = [node for node in schedule.graphs[name].graph.nodes if operation_of(node) is not None]
        assert list(alive.live_bytes) == operations
        assert all(alive.held_bytes <= live <= alive.peak_bytes for live in alive.live_bytes.values())
        assert alive.held_bytes <= alive.end_bytes <= alive.peak_bytes
        assert alive.peak_at in alive.live_bytes


def test_the_forward_ends_at_what_leaves_it(schedule: Schedule) -> None:
    alive = schedule_liveness(schedule)["forward"]
    loss = size_bytes(map(fake_value, schedule.program.results[:1]))
    assert alive.end_bytes == alive.held_bytes + loss + sum(saved_bytes(schedule).values())


def test_the_backward_ends_at_the_gradients(schedule: Schedule) -> None:
    alive = schedule_liveness(schedule)["backward"]
    gradients = schedule.program.results[schedule.program.num_outputs :]
    assert alive.end_bytes == alive.held_bytes + size_bytes(fake_value(n) for n in gradients if n is not None)


def test_both_graphs_hold_the_same(schedule: Schedule) -> None:
    """Parameters that the backward does not take are on the device all the same."""
    alive = schedule_liveness(schedule)
    assert alive["forward"].held_bytes == alive["backward"].held_bytes
    assert alive["forward"].held_bytes == size_bytes(map(fake_value, schedule.program.primals))


def test_every_kept_value_has_a_source(schedule: Schedule) -> None:
    sources = kept_sources(schedule)
    assert len(sources) == schedule.backward_inputs.num_kept
    for placeholder, made in sources.items():
        assert placeholder.graph is schedule.graphs["backward"].graph
        assert made.graph is schedule.graphs["forward"].graph
        assert fake_value(placeholder).shape == fake_value(made).shape


def test_equal_blocks_count_apart() -> None:
    """They share the fake values of one template."""
    saved = [sum(saved_bytes(write_schedule(gpt_program(n), "keep")).values()) for n in (2, 3, 4)]
    assert saved[2] - saved[1] == saved[1] - saved[0] > 0


def test_recompute_saves_less_and_peaks_lower() -> None:
    keep, recompute = (write_schedule(gpt_program(), plan) for plan in ("keep", "recompute"))
    assert sum(saved_bytes(recompute).values()) < sum(saved_bytes(keep).values())
    peaks = [schedule_liveness(each)["backward"].peak_bytes for each in (keep, recompute)]
    assert peaks[1] < peaks[0]


def test_tied_and_shared_storage_counts_once() -> None:
    tied, untied = (schedule_liveness(write_schedule(gpt_program(2, tied=t), "keep"))["forward"] for t in (True, False))
    assert untied.held_bytes - tied.held_bytes == 64 * 16 * 4


def test_a_copy_that_the_forward_makes_for_the_backward() -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("calls", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            loss = (x * self.weight * self.calls.sin()).sum()
            self.calls += 1
            return loss

    schedule = schedule_of(Counting(), torch.ones(8))
    copies = schedule.graphs["forward"].graph.find_nodes(op="call_function", target=ops.snapshot)
    assert len(list(copies)) == 1
    check_against_measured(schedule)


def test_a_call_holds_inputs_and_results_at_its_peak() -> None:
    """By hand: one call takes 400 bytes and returns 40; its peak has both."""
    schedule = write_schedule(gpt_program(), "recompute")
    alive = schedule_liveness(schedule)["backward"]
    peak = alive.peak_at
    assert peak is not None
    position = list(alive.live_bytes).index(peak)
    before = list(alive.live_bytes.values())[position - 1]
    items = [user for user in peak.users if user.target is operator.getitem]
    assert alive.peak_bytes == before + size_bytes(map(fake_value, items))


def test_an_empty_graph() -> None:
    """A graph that hands an input on has no operation; everything is held."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1)

    with torch.no_grad():
        schedule = schedule_of(nn.Sequential(nn.Linear(4, 4), Nothing()), torch.ones(2, 4))
    (alive,) = schedule_liveness(schedule).values()
    assert isinstance(alive, Liveness)
    assert isinstance(schedule.entry, fx.GraphModule)
