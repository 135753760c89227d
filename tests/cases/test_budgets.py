"""Cases 13 to 16 and 20 as plans: budgets are kept, named, and used, on the CPU with an explicit memory_budget."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import light
from support.compare import assert_close, compile_model
from support.models import tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan
from protrain_compile.commands.models import resolve
from protrain_compile.commands.outlook import Workload, step_of
from protrain_compile.cost_model import Prediction, simulate
from protrain_compile.errors import BudgetError, OptionError, PlanError
from protrain_compile.planner import Budgets, Decision, decide
from protrain_compile.profile import HardwareProfile
from protrain_compile.roles import RECOMPUTES
from protrain_compile.runtime.agreement import Agreement
from protrain_compile.runtime.planning import Planning
from protrain_compile.step_shape import StepShape

WIDTH = 1024
"""Of a model with 16 MiB of parameters a block: each block has a chunk of its own."""
BLOCKS = 3
MIB = 1 << 20


def data() -> Tensor:
    return tokens(4, 128)


class Run:
    """A prepared, compiled model under a budget."""

    def __init__(self, budget: int | None, model: nn.Module | None = None, **arguments: Any) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model = model if model is not None else light.GPT(BLOCKS, width=WIDTH)
        optimizer = torch.optim.AdamW(self.model.parameters(), eps=1e-4)
        _, self.optimizer = protrain_compile.prepare(
            self.model, optimizer, memory_budget=budget, device="cpu", **arguments
        )
        self.compiled = compile_model(self.model)

    def step(self, rows: Tensor | None = None) -> Tensor:
        loss = self.compiled(data() if rows is None else rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def prediction(self, part: int = 0) -> Prediction:
        found = protrain_compile.schedule(self.compiled).parts[part]
        planned = found.graph.planned(found.schedule)
        assert planned is not None
        assert planned.prediction is not None
        return planned.prediction

    @property
    def residency(self) -> tuple[str, ...]:
        chunks = protrain_compile.schedule(self.compiled).parts[0].schedule.chunks
        assert chunks is not None
        return chunks.residency


@functools.cache
def resident_peak() -> int:
    """Return the peak of the plan that keeps everything on the device."""
    run = Run(1 << 40)
    run.compiled(data())
    assert set(run.residency) == {"persistent"}, "case 14: what fits stays resident"
    return run.prediction().peak_bytes


@functools.cache
def needed() -> int:
    """Return the smallest feasible budget, as the error names it."""
    run = Run(MIB)
    before = {name: value.clone() for name, value in light_values().items()}
    with pytest.raises(BudgetError) as caught:
        run.compiled(data())
    assert run.optimizer._managed.layout is None, "refused before anything is packed"
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    return caught.value.needed_bytes


def light_model() -> nn.Module:
    torch.manual_seed(0)
    return light.GPT(BLOCKS, width=WIDTH)


def light_values() -> dict[str, Tensor]:
    return light_model().state_dict()


def test_budgets_are_kept_and_slower_the_smaller_they_are() -> None:
    """Case 13."""
    torch.manual_seed(0)
    eager = light.GPT(BLOCKS, width=WIDTH)
    expected = eager(data()).detach()
    times = []
    for share in (1.0, 0.75, 0.5):
        budget = int(share * resident_peak())
        run = Run(budget)
        assert_close("loss", run.step(), expected)
        prediction = run.prediction()
        assert prediction.peak_bytes <= budget
        times.append(prediction.step_ms)
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_the_smallest_feasible_budget() -> None:
    """Case 13: what the error names is enough, and a MiB less is not."""
    run = Run(needed())
    run.step()
    assert run.prediction().peak_bytes <= needed() < resident_peak() / 2
    with pytest.raises(BudgetError, match="memory_budget"):
        Run(needed() - MIB).compiled(data())


def test_slightly_over_budget_moves_little() -> None:
    """Case 14."""
    run = Run(resident_peak() - MIB)
    run.compiled(data())
    policies = protrain_compile.schedule(run.compiled).plan.policies
    moved = sum(each != "persistent" for each in run.residency) + sum(each != "keep" for each in policies or ())
    assert 1 <= moved <= 2


def test_exactly_enough_is_resident() -> None:
    """Case 14, with a search: less than by far, and enough all the same."""
    run = Run(resident_peak())
    run.compiled(data())
    assert set(run.residency) == {"persistent"}
    assert set(protrain_compile.schedule(run.compiled).plan.policies or ()) == {"keep"}


def test_evaluation() -> None:
    """Case 15: cheaper than training at an equal batch; a far larger one is refused with numbers."""
    run = Run(needed() + 16 * MIB)
    run.step()
    trained = run.prediction().peak_bytes
    with torch.no_grad():
        run.compiled(data())
        assert run.prediction(1).peak_bytes < trained
        with pytest.raises(BudgetError, match=r"\d (MiB|GiB)") as caught:
            run.compiled(tokens(4 * 64, 128))
    assert caught.value.needed_bytes > needed() + 16 * MIB
    run.step()


def test_evaluation_first_leaves_room_for_training() -> None:
    budget = int(0.8 * resident_peak())
    run = Run(budget)
    with torch.no_grad():
        run.compiled(data())
    run.step()
    assert run.prediction(1).peak_bytes <= budget


def test_the_budget_that_an_evaluation_first_asks_for_is_enough() -> None:
    """Training, of which nothing is known yet, has its share of it."""
    rows = tokens(4 * 64, 128)
    with torch.no_grad():
        with pytest.raises(BudgetError, match="for training, which has not begun") as caught:
            Run(MIB).compiled(rows)
        enough = caught.value.needed_bytes
        Run(enough).compiled(rows)
        with pytest.raises(BudgetError):
            Run(enough - MIB).compiled(rows)


def test_a_new_shape_keeps_residency_and_plans_policies_again() -> None:
    """Case 20."""
    budget = int(0.6 * resident_peak())
    run = Run(budget)
    run.step(tokens(4, 64))
    residency = run.residency
    run.step(tokens(4, 96))
    parts = protrain_compile.schedule(run.compiled).parts
    assert len(parts) == 2
    assert all(part.schedule.chunks.residency == residency for part in parts)
    assert all(run.prediction(i).peak_bytes <= budget for i in range(2))


def test_a_new_shape_swaps_within_the_host_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have their memory already; values may be swapped to what the budget leaves, with what they have now."""
    host: list[int | None] = []
    budget = int(0.6 * resident_peak())

    def watched(shape: StepShape, budgets: Budgets, *others: Any) -> Decision:
        host.append(budgets.host_bytes)
        return decide(shape, budgets, *others)

    monkeypatch.setattr("protrain_compile.runtime.planning.decide", watched)
    allowed = 512 * MIB
    run = Run(budget, host_memory_budget=allowed)
    run.step(tokens(4, 64))
    run.optimizer._managed.swap_space().reserve([4 * MIB])
    run.step(tokens(4, 96))
    assert host == pytest.approx([allowed] * len(host), abs=MIB)  # slabs are rounded up
    assert len(host) > 1


def test_a_shape_that_does_not_fit_is_refused_with_numbers() -> None:
    """Case 20."""
    run = Run(needed() + 8 * MIB)
    run.step(tokens(2, 64))
    with pytest.raises(BudgetError):
        run.compiled(tokens(64, 512))
    run.step(tokens(2, 64))


def test_a_rank_whose_larger_shape_would_need_another_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others could not follow a plan that fits, the one that they have does not run over the budget."""
    given: list[Plan] = []

    def first(agreement: Agreement, own: Plan, *_: Any) -> Plan:
        given.append(own)
        return given[0]

    enough = needed() + MIB
    monkeypatch.setattr(Agreement, "allows", lambda *_: False)
    monkeypatch.setattr(Agreement, "plan", first)
    run = Run(enough)
    run.step(tokens(2, 64))
    with pytest.raises(BudgetError, match="by the plan that all ranks have") as caught:
        run.compiled(data())
    assert given[0] != given[-1]
    assert caught.value.needed_bytes > enough
    run.step(tokens(2, 64))


def test_planning_for_a_new_shape_that_breaks_off_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(1 << 40)
    run.step(tokens(2, 32))
    run.step(tokens(2, 48))
    graph = protrain_compile.schedule(run.compiled).parts[-1].graph
    (binding,) = graph._bindings.values()
    known = binding.sizes
    assert known

    def fail(*_: object) -> None:
        raise RuntimeError("profiling broke off")

    with monkeypatch.context() as patch:
        patch.setattr(Planning, "plan", fail)
        with pytest.raises(RuntimeError, match="broke off"):
            run.compiled(tokens(2, 64))
    assert binding.sizes == known
    run.step(tokens(2, 64))
    assert binding.sizes != known


def test_after_a_refusal_a_smaller_batch_or_a_larger_budget_works() -> None:
    """In one process, as in a notebook: the same compiled model, or prepared and compiled again."""
    run = Run(needed() - MIB)
    optimizer, values = run.optimizer, light_values()
    state = optimizer.state_dict()
    with pytest.raises(BudgetError):
        run.compiled(data())
    expected = compile_model(light_model())(data()).detach()
    for another in (False, True):
        given = torch.optim.AdamW(run.model.parameters(), eps=1e-4) if another else optimizer
        _, run.optimizer = protrain_compile.prepare(run.model, given, memory_budget=1 << 40, device="cpu")
        assert run.optimizer is given
        assert run.optimizer.state_dict() == state
        for name, value in run.model.state_dict().items():
            assert torch.equal(value, values[name]), name
    assert type(optimizer) is torch.optim.AdamW, "the one that was left is as it was"
    assert_close("loss", run.step(), expected)
    run.step(data()[:1])
    with pytest.raises(OptionError, match="has run"):
        protrain_compile.prepare(run.model, run.optimizer, device="cpu")

    again = Run(needed() - MIB)
    with pytest.raises(BudgetError):
        again.compiled(data())
    again.step(data()[:1])


@pytest.mark.parametrize(
    ("dtype", "arguments"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.float32, {"max_grad_norm": 1.0}),
        (torch.bfloat16, {"gradient_accumulation_steps": 2}),
    ],
)
def test_predicted_host_bytes_are_what_the_model_asks_for(dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """All of it, or a plan would be chosen for which the host has no room: gradients of the first step wait there."""
    plan = Plan(uniform_policy="keep", uniform_residency="offloaded", chunk_bytes=40_000)
    run = Run(None, light.GPT(6, width=64).to(dtype), plan=plan, **arguments)
    run.compiled(data())
    (found,) = protrain_compile.schedule(run.compiled).predict()
    spec = run.optimizer._managed.packed.store.spec
    assert len(spec.layout.chunks) > spec.landings
    assert found.host_bytes == pytest.approx(spec.most_host_bytes(), rel=0.01)  # parts begin at multiples of 256 bytes


@pytest.mark.parametrize("door", ["prepare", "options"])
def test_a_plan_by_hand_is_held_to_a_budget_that_was_set(door: str) -> None:
    keep, budget = Plan.uniform("keep", "persistent"), resident_peak() - MIB
    if door == "prepare":
        run = Run(budget, plan=keep)
    else:
        run = Run(None)
        run.compiled = compile_model(run.model, memory_budget=budget, plan=keep)
    with pytest.raises(BudgetError, match="the plan that was given") as caught:
        run.compiled(data())
    assert caught.value.needed_bytes == resident_peak()
    run.step(data()[:1])


def test_the_smaller_budget_counts() -> None:
    run = Run(1 << 40)
    run.compiled = compile_model(run.model, memory_budget=resident_peak() // 2)
    run.compiled(data())
    assert run.prediction().peak_bytes <= resident_peak() // 2


def test_a_model_that_is_not_prepared_has_its_policies_planned() -> None:
    """Its optimizer's states (of Adam, two of each parameter) are counted though they are not there yet."""
    model = light.GPT(BLOCKS, width=WIDTH)
    rows = tokens(16, 128)
    states = 2 * sum(p.nbytes for p in model.parameters())
    compiled = compile_model(model, memory_budget=1 << 40)
    expected = compiled(rows)
    part = protrain_compile.schedule(compiled).parts[0]
    keep = part.graph.planned(part.schedule)
    assert keep is not None
    assert keep.prediction is not None
    torch._dynamo.reset()
    budget = keep.prediction.peak_bytes + states - 8 * MIB
    compiled = compile_model(model, memory_budget=budget)
    torch.testing.assert_close(compiled(rows), expected)
    found = protrain_compile.schedule(compiled).parts[-1].schedule.plan.policies or ()
    assert set(found) & set(RECOMPUTES)
    torch._dynamo.reset()
    with pytest.raises(BudgetError):
        compile_model(model, memory_budget=states)(rows)


def test_logits_are_the_peak() -> None:
    """Case 16: vocabulary 151k, two blocks: logits and their gradient. Their fp32 copy is fused away."""
    sizes = "vocab_size=151936,hidden_size=512,num_hidden_layers=2,num_attention_heads=8,intermediate_size=1024"
    step = step_of(Workload(resolve(f"llama:{sizes}"), 8, 512, loss="whole"), HardwareProfile.load("h200"))
    found = simulate(step.shapes["whole"], step.profile, Plan.uniform("recompute", "offloaded"))
    logits = 8 * 512 * 151936 * 2
    assert "epilogue" in found.peak_at
    assert found.device_bytes["activations"] + found.device_bytes["inside calls"] >= 2 * logits


@pytest.mark.parametrize("given", [{"residency": "offloaded"}, {"sharding": "parameters"}])
def test_a_plan_for_chunks_needs_a_prepared_model(given: dict[str, str]) -> None:
    plan = protrain_compile.Plan.uniform("keep", **given)
    compiled = compile_model(light.GPT(2), plan=plan)
    with pytest.raises(PlanError, match=r"one is not: call protrain_compile\.prepare"):
        compiled(tokens(2, 16))


def test_a_loss_that_cannot_be_sliced_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Square(light.GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    compile_model(Square(2), plan=protrain_compile.Plan.uniform("keep", loss="sliced"))(tokens(2, 16))
    assert "no loss of Square can be computed in slices" in caplog.text
