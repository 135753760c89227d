"""Which losses get a sliced form, what it looks like, and what is left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capture import capture, gpt_program
from torch import Tensor, fx, nn

from passes import structure_pipeline
from passes.slice_loss import MAX_SLICE_BYTES, slice_rows
from protrain_compile import Plan, PlanError
from protrain_compile.plan import Loss
from protrain_compile.planner import SLICED_LOGITS_BYTES, choose_loss
from protrain_compile.profiler.footprint import workspace_bytes
from protrain_compile.profiler.kernels import kernels_of, source_of
from protrain_compile.program import Program, fake_value, results_of
from protrain_compile.row_loop import RowLoop, loop_of, row_loops
from protrain_compile.shape_reader import step_shape

WORDS, WIDTH, ROWS, LENGTH = 80, 16, 4, 16


class Speaker(nn.Module):
    def __init__(self, ending: Callable[..., Any], dtype: torch.dtype = torch.float32, words: int = WORDS) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, words, bias=False, dtype=dtype)
        self.ending = ending

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.ending(self.head(self.inside(x)), labels)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def with_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return mean(logits, labels), logits


def with_own_type(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return mean(logits, labels), logits.float()


def with_capped(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    capped = 5 * torch.tanh(logits / 5)
    return mean(capped, labels), capped


def with_turned(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return mean(logits, labels), logits.transpose(1, 2)


def with_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return mean(logits, labels), logits.softmax(-1)


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def per_token_and_mean(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    losses = per_token(logits, labels)
    return losses, losses.mean()


def over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits.softmax(1), labels)


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels).square()


def two_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return mean(logits, labels), logits.float().logsumexp(-1).mean()


def logits_only(logits: Tensor, labels: Tensor) -> Tensor:
    return logits


def program_of(ending: Callable[..., Any], dtype: torch.dtype = torch.float32, words: int = WORDS) -> Program:
    x, labels = torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype), torch.randint(words, (ROWS, LENGTH))
    program = capture(Speaker(ending, dtype, words), x, labels)
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    return program


def _sliced_joint(program: Program) -> fx.GraphModule:
    ((_, index),) = program.sliced.items()
    return program.templates[index].joint


def loop_in(program: Program) -> RowLoop:
    (call,) = row_loops(_sliced_joint(program).graph)
    return loop_of(call)


def test_sliced_form() -> None:
    program = program_of(mean)
    loop = loop_in(program)
    assert (loop.total, loop.rows, loop.slices) == (ROWS * LENGTH, 16, 4)
    assert loop.wide_bytes == ROWS * LENGTH * WORDS * 4
    assert sorted(output.kind for output in loop.outputs) == ["product", "rows", "rows"]


def test_no_wide_value_is_left_outside_of_the_loop() -> None:
    program = program_of(mean)
    ((before, after),) = program.sliced.items()

    def wide(index: int) -> list[str]:
        nodes = program.templates[index].joint.graph.nodes
        values = ((node, fake_value(node)) for node in nodes)
        return [n.name for n, v in values if isinstance(v, Tensor) and v.numel() == ROWS * LENGTH * WORDS]

    assert len(wide(before)) > 5
    assert wide(after) == []


@pytest.mark.parametrize("ending", [with_logits, with_own_type], ids=lambda ending: ending.__name__)
def test_of_returned_logits_only_these_are_whole(ending: Callable[..., Any]) -> None:
    """Their tangent is there for who has a loss of his own; what is planned for does without."""
    program = program_of(ending, torch.bfloat16)
    ((_, index),) = program.sliced.items()
    assert program.absent_tangents == {1}
    parts = program.templates[index].parts
    assert parts is not None
    assert parts.backward is not None
    returned = results_of(parts.forward)[0 if fake_value(results_of(parts.forward)[0]).dim() else 1]
    assert fake_value(returned).dtype == (torch.bfloat16 if ending is with_logits else torch.float32)
    values = [node for graph in (parts.forward, parts.backward) for node in graph.graph.nodes]
    wide = [n for n in values if isinstance(v := fake_value(n), Tensor) and v.numel() == ROWS * LENGTH * WORDS]
    assert {source_of(node) for node in wide} == {source_of(returned)}
    assert parts.complete_backward is not None


@pytest.mark.parametrize(("words", "direct"), [(80, True), (84, False)])
def test_a_slice_of_returned_logits_is_computed_into_its_place(words: int, direct: bool) -> None:
    """But not where 16-bit rows are no multiple of 16 bytes."""
    program = program_of(with_logits, torch.bfloat16, words)
    loop = loop_in(program)
    assert (loop.direct is not None) == direct
    (counted,) = (each for each in kernels_of(_sliced_joint(program), fused=True) if each.parts)
    assert counted.repeats * sum(each.flops for each in counted.parts) == 3 * 2 * ROWS * LENGTH * WIDTH * words
    products = [node for node in loop.slice_graph.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == (1 if direct else 2)
    assert loop_in(program_of(mean, torch.bfloat16, words)).direct is None


@pytest.mark.parametrize(
    ("ending", "words", "gathered"),
    [(mean, 80, True), (mean, 84, False), (with_logits, 80, False), (with_logits, 84, False)],
)
def test_gradients_of_several_slices_are_multiplied_at_once(
    ending: Callable[..., Any], words: int, gathered: bool
) -> None:
    """But not where rows are no multiple of 16 bytes, nor beside logits that are whole already."""
    program = program_of(ending, torch.bfloat16, words)
    loop = loop_in(program)
    assert (loop.window is not None) == gathered
    if loop.window is None:
        return
    assert loop.window.rows == loop.rows == ROWS * LENGTH // 4
    assert sorted(loop.outputs[each].kind for each in loop.window.operands) == ["product", "rows"]
    (counted,) = (each for each in kernels_of(_sliced_joint(program), fused=True) if each.parts)
    assert counted.repeats * sum(each.flops for each in counted.parts) == 3 * 2 * ROWS * LENGTH * WIDTH * words


def test_a_window_and_a_slice_are_what_a_loop_takes() -> None:
    """Of 1024 tokens: the gradient of 256, and the logits of 64; both in fp32 here."""
    x, labels = torch.randn(4, 256, WIDTH), torch.randint(WORDS, (4, 256))
    program = capture(Speaker(mean), x, labels)
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    loop = loop_in(program)
    assert loop.window is not None
    assert (loop.rows, loop.window.rows) == (64, 256)
    (call,) = row_loops(_sliced_joint(program).graph)
    module = fx.GraphModule({}, fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    for node in call.all_input_nodes:
        copies[node] = module.graph.placeholder(node.name)
    made = module.graph.node_copy(call, lambda each: copies[each])
    module.graph.output((made,))
    for node, copied in copies.items():
        copied.meta = dict(node.meta)
    taken = workspace_bytes(module, fused=True)
    assert 0 <= taken - (256 + 64) * WORDS * 4 <= 64 * WIDTH * 4


@pytest.mark.parametrize("loss", ["whole", "sliced"])
def test_returned_logits_count_until_the_backward_is_over(loss: Loss) -> None:
    """As the caller holds them; their tangent, which is as large, does not exist."""
    shape = step_shape(program_of(with_logits), loss=loss)
    logits = [life for life in shape.lives if life.returned and life.size_bytes >= ROWS * LENGTH * WORDS * 4]
    assert [life.birth for life in logits] == ["forward"]


def test_saved_values_are_as_large_as_the_gradients() -> None:
    """The backward has nothing left to do but to multiply: it saves gradients, not logits."""
    program = program_of(mean)
    ((before, after),) = program.sliced.items()

    def saved(index: int) -> int:
        parts = program.templates[index].parts
        assert parts is not None
        results = parts.forward.graph.output_node().args[0][parts.num_outputs :]
        return sum(fake_value(node).numel() for node in results)

    assert saved(before) > ROWS * LENGTH * WORDS
    assert saved(after) <= WORDS * WIDTH + 2 * ROWS * LENGTH * WIDTH + 1


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (with_capped, "takes nothing of the region"),
        (with_turned, "takes a way around the loss"),
        (with_probabilities, "is not known to be linear in the tangents"),
        (per_token_and_mean, "more than one scalar tangent"),
        (over_tokens, "is not its last"),
        (squared, "is used for each row again"),
        (two_losses, "more than one scalar tangent"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_left_alone(ending: Callable[..., Any], says: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "protrain_compile.passes"):
        program = program_of(ending)
    assert program.sliced == {}
    assert says in caplog.text


@pytest.mark.parametrize("ending", [per_token, logits_only], ids=lambda ending: ending.__name__)
def test_no_scalar_loss(ending: Callable[..., Any]) -> None:
    assert program_of(ending).sliced == {}


def test_fp16_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "protrain_compile.passes"):
        assert program_of(mean, torch.float16).sliced == {}
    assert "fp16" in caplog.text


def test_narrow_heads_are_left_alone() -> None:
    """A classifier of fewer classes than its width: nothing to gain."""
    assert program_of(mean, words=8).sliced == {}


def test_batches_without_tokens_are_left_alone() -> None:
    program = capture(Speaker(lambda logits, labels: logits.logsumexp(-1).sum()), x=torch.zeros(0, WIDTH), labels=None)
    structure_pipeline(inductor=False, inductor_draws=False).run(program)
    assert program.sliced == {}


def test_blocks_are_left_alone() -> None:
    program = gpt_program()
    assert set(program.template_of).isdisjoint(program.sliced.values())


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [(16384, 2 * 128256, 2048), (65536, 2 * 151936, 3520), (64, 320, 16), (5, 320, 5), (100, 1 << 30, 16)],
)
def test_slice_rows(rows: int, row_bytes: int, expected: int) -> None:
    found = slice_rows(rows, row_bytes)
    assert found == expected
    assert found % 16 == 0 or found == rows
    assert found * row_bytes <= MAX_SLICE_BYTES or found <= 16


def test_the_plan_decides() -> None:
    program = program_of(mean)
    assert loop_in(program).wide_bytes < SLICED_LOGITS_BYTES
    assert choose_loss(program, Plan.uniform()) == "whole"
    loop_in(program).wide_bytes = SLICED_LOGITS_BYTES
    assert choose_loss(program, Plan.uniform()) == "sliced"
    assert choose_loss(program, Plan.uniform(loss="whole")) == "whole"


def test_plans_with_a_loss() -> None:
    plan = Plan.uniform("recompute", loss="sliced")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match=r"loss='thin': choose one of whole, sliced"):
        Plan.uniform(loss="thin")
