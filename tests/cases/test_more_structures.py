"""Constants, higher-order operations, sub-module compiles, hooks, sparse gradients: in and around blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import light
from support.compare import alternating, assert_same, check_plans, compile_model, run_step
from support.models import GPT, VOCABULARY, WIDTH, GPTBlock, tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan, ProtrainError


def step(model: nn.Module) -> Tensor:
    return model(tokens())


class Block(GPTBlock):
    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)


def light_stack(block: type[light.Block], blocks: int) -> light.GPT:
    model = light.GPT(blocks)
    model.blocks = nn.ModuleList(block() for _ in range(blocks))
    return model


class ConstantBlock(light.Block):
    """Makes tensors from Python numbers in its forward; tracing lifts them as attributes of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 0.5, 0.25, 2.0]).repeat(x.shape[-1] // 4)
        return super().forward(x * scale)


def test_tensor_constants() -> None:
    schedule = check_plans(light_stack(ConstantBlock, 4), step, blocks=4, templates=4)
    assert schedule.parts[0].graph.program.template_of[1:4] == (1, 1, 1)


def test_different_constants_in_equal_blocks() -> None:
    model = light.GPT(4)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, y, i=i: y * torch.tensor(1.0 + i))
    check_plans(model, step, blocks=4)


class CondBlock(light.Block):
    """``torch.cond``: two sub-graphs inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


def test_cond_in_a_block() -> None:
    check_plans(light_stack(CondBlock, 3), step, blocks=3)


def test_blocks_compiled_one_by_one() -> None:
    """Regional compilation: every block is its own compiled call, and all share one entry."""
    model = light.GPT(4)
    expected = run_step(copy.deepcopy(model), step)
    for block in model.blocks:
        block.compile(backend="protrain", options={"compile": "eager", "schedule": "off"})
    assert_same(run_step(model, step), expected)
    schedule = protrain_compile.schedule(model)
    assert [len(part.bindings) for part in schedule.parts] == [4]
    schedule.use(Plan.uniform("recompute"))
    assert_same(run_step(model, step), expected)


def test_hooks_on_gradients() -> None:
    """Tensor hooks and post-accumulate hooks run as in eager."""
    model = light.GPT(3)
    eager = copy.deepcopy(model)
    seen: dict[str, list[str]] = {"eager": [], "compiled": []}
    for label, owner in (("eager", eager), ("compiled", model)):
        for name, p in owner.named_parameters():
            p.register_hook(lambda g: g * 2)
            p.register_post_accumulate_grad_hook(lambda p, label=label, name=name: seen[label].append(name))
    assert_same(run_step(compile_model(model), step, owner=model), run_step(eager, step))
    assert sorted(seen["eager"]) == sorted(seen["compiled"])


def test_padding_and_sparse_embeddings() -> None:
    class Padded(GPT):
        def __init__(self, sparse: bool) -> None:
            super().__init__(3, tied=False)
            self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3, sparse=sparse)

    check_plans(Padded(sparse=False), step, blocks=3)
    torch._dynamo.reset()
    model = Padded(sparse=True)
    eager = copy.deepcopy(model)
    step(eager).backward()
    step(compile_model(model)).backward()
    # No backend traces a sparse gradient: Dynamo leaves the embedding to eager and compiles what follows.
    ours, theirs = model.embed.weight.grad, eager.embed.weight.grad
    assert ours.layout == theirs.layout == torch.sparse_coo
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-5, atol=1e-6)
    assert protrain_compile.schedule(model).parts


def test_saved_tensor_hooks_are_refused() -> None:
    """``save_on_cpu`` copies the token that keeps the context: a clear error, no wrong numbers."""
    model = light.GPT(3)
    compiled = compile_model(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = step(compiled)
    with pytest.raises(ProtrainError, match="saved-tensor hooks"):
        loss.backward()


def test_compiled_autograd_is_refused() -> None:
    model = light.GPT(3)
    compiled = compile_model(model)
    loss = step(compiled)
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(Exception, match="compiled_autograd"),
    ):
        loss.backward()


def test_deep_copy_of_a_compiled_model() -> None:
    model = light.GPT(3)
    compiled = compile_model(model)
    run_step(compiled, step, owner=model)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(0.5)
    eager = copy.deepcopy(copied._orig_mod)
    assert_same(run_step(copied, step, owner=copied._orig_mod), run_step(eager, step))
    assert_same(run_step(compiled, step, owner=model), run_step(copy.deepcopy(model), step))


class Recurrent(nn.Module):
    """Loops over one block until a Python condition on the step number: a weight-shared, depth-varying model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, light.WIDTH), light.Block()

    def forward(self, ids: Tensor, times: int) -> Tensor:
        x = self.embed(ids)
        for _ in range(times):
            x = self.block(x)
        return x.square().mean()


def test_depth_that_varies() -> None:
    model = Recurrent()
    eager = copy.deepcopy(model)
    compiled = compile_model(model, plan=Plan.uniform("recompute"))
    for times in (2, 3, 2):
        expected = run_step(eager, lambda m, n=times: m(tokens(), n))
        assert_same(run_step(compiled, lambda m, n=times: m(tokens(), n), owner=model), expected)


def test_blocks_with_arguments_of_their_own() -> None:
    """Each block gets its own slice of an input and a Python number: one template where the number is equal."""

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Inner() for _ in range(4))

        def forward(self, x: Tensor, conditions: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x, conditions[i], 1.0 if i else 0.5)
            return x.square().mean()

    class Inner(Block):
        def forward(self, x: Tensor, condition: Tensor, scale: float) -> Tensor:  # type: ignore[override]
            return super().forward(x + condition * scale)

    x, conditions = torch.randn(2, 8, WIDTH), torch.randn(4, WIDTH)
    check_plans(Conditioned(), lambda m: m(x, conditions), blocks=4)


def test_values_used_by_every_block() -> None:
    """A value made before the blocks (and needing a gradient) feeds each of them: its gradient is their sum."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(16, 16) * 0.1)
            self.blocks = nn.ModuleList(Biased() for _ in range(5))

        def forward(self, ids: Tensor) -> Tensor:
            bias = self.table.tanh()
            x = self.embed(ids[:, :-1])
            for block in self.blocks:
                x = block(x, bias)
            return x.square().mean()

    class Biased(Block):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            q = self.ln_1(x)
            attended = F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], attn_mask=bias)
            return super().forward(x + attended[:, 0])

    check_plans(Shared(), step, blocks=5, templates=7)


def test_one_forward_many_batches_of_plans() -> None:
    """Every plan of three blocks."""
    model = light.GPT(3)
    expected = run_step(copy.deepcopy(model), step)
    compiled = compile_model(model)
    step(compiled)
    schedule = protrain_compile.schedule(compiled)
    for code in range(8):
        policies: Any = tuple("recompute" if code >> i & 1 else "keep" for i in range(3))
        schedule.use(Plan(policies=policies))
        assert_same(run_step(compiled, step, owner=model), expected)
    assert schedule.parts[0].graph.compiled_artefacts <= 3 * 3
    schedule.use(alternating(3))


def test_batch_norm_under_no_grad() -> None:
    """An inference that mutates buffers (train mode under no_grad) mutates them once."""

    model = light.GPT(3)
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(17)
    eager = copy.deepcopy(model)
    compiled = compile_model(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(tokens()), eager(tokens()), rtol=1e-5, atol=1e-6)
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
