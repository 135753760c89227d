"""seed_randomness: draws become functions of seeds from the prologue, or stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.capture import capture
from support.light import GPT, WIDTH
from support.models import tokens
from torch import Tensor, fx, nn
from torch._inductor import inductor_prims

from passes.node_facts import draws_randomness
from passes.seed_randomness import SeedRandomness
from passes.tag_blocks import TagBlocks
from passes.verify import verify_program
from protrain_compile.program import Program, fake_value

aten = torch.ops.aten


def seeded(model: Any, *inputs: Any, inductor_draws: bool = True) -> tuple[Program, bool]:
    program = capture(model, *inputs)
    TagBlocks().run(program)
    changed = SeedRandomness(inductor_draws=inductor_draws).run(program)
    program.graph.graph.lint()
    verify_program(program, "seed_randomness")
    return program, changed


def calls(program: Program, target: Any) -> list[fx.Node]:
    return list(program.graph.graph.find_nodes(op="call_function", target=target))


class Noise(nn.Module):
    """Applies a drawing function between two blocks' worth of products."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * self.draw(x)).sum()


def test_dropout_of_a_decoder() -> None:
    before = capture(GPT(3, dropout=0.1), tokens())
    count = len(calls(before, aten.rand.default))
    assert count == 3
    program, changed = seeded(GPT(3, dropout=0.1), tokens())
    assert changed
    assert calls(program, aten.rand.default) == []
    assert len(calls(program, inductor_prims.seeds)) == 1
    lookups = calls(program, inductor_prims.lookup_seed)
    draws = calls(program, inductor_prims.random)
    assert len(lookups) == len(draws) == count
    assert sorted(node.args[1] for node in lookups) == list(range(count))  # type: ignore[type-var]
    assert len({node.args[1] for node in draws}) == count


def test_seeds_are_made_in_the_prologue_and_used_in_the_blocks() -> None:
    program, _ = seeded(GPT(3, dropout=0.1), tokens())
    made = calls(program, inductor_prims.seeds) + calls(program, inductor_prims.lookup_seed)
    assert {program.stage_of[node] for node in made} == {0}
    assert {program.stage_of[node] for node in calls(program, inductor_prims.random)} == {1, 2, 3}
    assert set(program.stage_of) == set(program.calls())
    assert not program.backward_nodes & set(made)


def test_seeded_draws_may_be_recomputed() -> None:
    program, _ = seeded(GPT(2, dropout=0.1), tokens())
    assert not any(draws_randomness(node) for node in calls(program, inductor_prims.random))


def test_each_block_gets_a_scalar_seed() -> None:
    """A look-up inside a block would name the block's index and make every block unique."""
    program, _ = seeded(GPT(2, dropout=0.1), tokens())
    for node in calls(program, inductor_prims.lookup_seed):
        assert fake_value(node).shape == ()
        assert fake_value(node).dtype == torch.int64


def test_without_inductor_nothing_changes() -> None:
    program, changed = seeded(GPT(2, dropout=0.1), tokens(), inductor_draws=False)
    assert not changed
    assert calls(program, inductor_prims.seeds) == []
    assert calls(program, aten.rand.default)


def test_without_draws_nothing_changes() -> None:
    _, changed = seeded(GPT(2), tokens())
    assert not changed


@pytest.mark.parametrize(
    ("draw", "target", "dtype"),
    [
        (torch.rand_like, inductor_prims.random, torch.float32),
        (torch.randn_like, inductor_prims.random, torch.float32),
        (lambda x: torch.randn(x.shape, dtype=torch.bfloat16), inductor_prims.random, torch.bfloat16),
        (lambda x: torch.randint(2, 7, x.shape), inductor_prims.randint, torch.int64),
        (lambda x: torch.randint(2, 7, x.shape, dtype=torch.int32), inductor_prims.randint, torch.int32),
    ],
    ids=["rand", "randn", "bf16", "randint", "int32"],
)
def test_shape_and_type_stay(draw: Any, target: Any, dtype: torch.dtype) -> None:
    program, changed = seeded(Noise(draw), torch.randn(3, WIDTH))
    assert changed
    (made,) = calls(program, target)
    natural = torch.int64 if target is inductor_prims.randint else torch.float32
    assert fake_value(made).dtype == natural
    casts = [user for user in made.users if user.target is torch.ops.prims.convert_element_type.default]
    if dtype is not natural:
        assert [fake_value(cast).dtype for cast in casts] == [dtype]
        assert program.stage_of[casts[0]] == program.stage_of[made]
    assert fake_value(made).shape == (3, WIDTH)


def test_other_draws_stay() -> None:
    program, changed = seeded(Noise(lambda x: torch.bernoulli(torch.full_like(x, 0.5))), torch.randn(3, WIDTH))
    assert any(draws_randomness(node) for node in program.calls()) or changed
