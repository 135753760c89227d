"""The backend: found by name, options checked, what AOTAutograd is told, where schedules go."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.capture import compiled, schedule_of
from support.light import GPT
from support.models import tokens
from torch import Tensor, fx, nn

import protrain_compile
from passes import pass_names
from protrain_compile import OptionError, Plan, PlanError, ProtrainError
from protrain_compile.backend import protrain, traced_by_another_compiler


def compile_with(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="protrain", options={"compile": "eager", "schedule": "off", **options})


def test_the_entry_point() -> None:
    (entry,) = metadata.entry_points(group="torch_dynamo_backends", name="protrain")
    assert entry.load() is protrain
    assert "protrain" in torch._dynamo.list_backends()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plans": 1}, "unknown option 'plans'; the options are"),
        ({"compile": "fast"}, "choose one of inductor, eager"),
        ({"plan": "{"}, "plan is not JSON"),
        ({"plan": Plan(policies=("keep",) * 7)}, "7 block policies, but this graph has 2 blocks"),
        ({"plan": Plan(policies=("keep",) * 2, blocks=("a", "b"))}, "made for block 0 = 'a'"),
        ({"print_after": "nothing"}, "the passes are"),
    ],
)
def test_bad_options_reach_the_user(options: dict[str, Any], message: str) -> None:
    """As themselves: not inside an error of Dynamo, and with a traceback that begins in the user's code."""
    model = GPT(2)
    with pytest.raises(ProtrainError, match=message) as caught:
        compile_with(model, **options)(tokens())
    assert type(caught.value) in (OptionError, PlanError)
    assert caught.value.__cause__ is None
    assert compile_with(model)(tokens()).isfinite().all()


def test_errors_of_a_backend_called_by_hand_are_not_wrapped() -> None:
    with pytest.raises(OptionError, match="unknown option"):
        protrain(fx.symbolic_trace(nn.Identity()), [], options={"plans": 1})


def test_other_errors_are_dynamos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protrain_compile.backend.describe_inputs", lambda gm: 1 / 0)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="ZeroDivisionError"):
        compile_with(GPT(2))(tokens())


def test_modes_are_refused() -> None:
    torch._dynamo.reset()
    with pytest.raises(OptionError, match="the protrain backend has no modes"):
        torch.compile(GPT(2), backend="protrain", mode="reduce-overhead")(tokens())


def test_the_default_mode_passes() -> None:
    torch._dynamo.reset()
    model = nn.Linear(3, 3)
    torch.compile(model, backend="protrain", mode="default")


def test_it_prints_by_default_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(2)
    torch._dynamo.reset()
    function: Any = torch.compile(model, backend="protrain", options={"compile": "eager"})
    function(tokens()).backward()
    function(tokens()).backward()
    printed = capsys.readouterr().out
    assert printed.count("protrain schedule: GPT, cpu") == 1
    assert "[forward]" in printed
    assert "[backward]" in printed


def test_off_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compile_with(GPT(2))(tokens())
    assert capsys.readouterr().out == ""


def test_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.txt"
    function = compile_with(GPT(3), schedule=path)
    function(tokens())
    with torch.no_grad():
        function(tokens())
    text = path.read_text()
    assert text.count("protrain schedule: GPT") == 2
    assert "same pattern" not in text, "files have every block"
    assert capsys.readouterr().out == ""


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    compile_with(GPT(2), schedule="print")(tokens())
    assert capsys.readouterr().out == ""


def test_print_after(capsys: pytest.CaptureFixture[str]) -> None:
    compile_with(GPT(2), print_after="tag_blocks")(tokens())
    printed = capsys.readouterr().out
    assert "# after tag_blocks: joint\n" in printed
    assert "torch.ops.aten.addmm.default" in printed
    compile_with(GPT(2), print_after="apply_policies")(tokens())
    printed = capsys.readouterr().out
    assert "# after apply_policies: forward\n" in printed
    assert "artefact.t1_forward" in printed


def test_passes_leave_records() -> None:
    _, schedule = compiled(GPT(2), tokens())
    records = schedule.parts[0].graph.records
    assert tuple(record.name for record in records) == pass_names()
    (apply,) = (record for record in records if record.name == "apply_policies")
    assert apply.changed
    assert apply.op_counts["t1_forward"] == apply.op_counts["t1_backward"] == 2
    assert all(record.ms >= 0 for record in records)


def test_one_token_is_all_that_autograd_saves() -> None:
    saved: list[Any] = []

    def pack(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    model = GPT(2)
    function, _ = compiled(model, tokens())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = function(tokens())
    assert [(each.shape, each.dtype) for each in saved] == [((), torch.int64)]
    loss.backward()


def test_hooks_that_copy_are_refused_by_name() -> None:
    function, _ = compiled(GPT(2), tokens())
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
        loss = function(tokens())
    with pytest.raises(ProtrainError, match="saved-tensor hooks"):
        loss.backward()


def test_the_stub_graphs_are_never_run() -> None:
    with pytest.raises(ProtrainError, match="turn compiled autograd off"):
        traced_by_another_compiler()


def test_a_graph_without_any_parameter() -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda x: (x * 2).sin(), backend="protrain", options={"compile": "eager", "schedule": "off"}
    )
    x = torch.ones(3, requires_grad=True)
    result = function(x)
    torch.testing.assert_close(result, (x * 2).sin())
    result.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (torch.ones(3) * 2).cos())


def test_graphs_are_graph_modules() -> None:
    _, schedule = compiled(GPT(2), tokens())
    assert set(schedule.graphs) == {"forward", "backward"}
    assert all(isinstance(module, fx.GraphModule) for module in schedule.graphs.values())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context: Any) -> None:
    model = GPT(2)
    with context():
        expected = model(tokens())
        torch.testing.assert_close(compile_with(model)(tokens()), expected, rtol=1e-5, atol=1e-6)
        assert set(protrain_compile.schedule(model).graphs) == {"inference"}


def test_the_plan_option_is_used() -> None:
    plan = Plan.uniform("recompute")
    assert schedule_of(GPT(2), tokens(), plan=plan).plan.policies == ("recompute", "recompute")
    assert schedule_of(GPT(2), tokens(), plan=plan.to_json()).plan.policies == ("recompute", "recompute")
