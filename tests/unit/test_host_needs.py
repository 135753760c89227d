"""Host memory told from parameters alone, against what packing takes."""

import pytest
import torch

from protrain_compile.chunks import ParameterSpec
from protrain_compile.host_needs import guess_segments, host_needs
from protrain_compile.packing import LANDINGS, Preparation, decide
from protrain_compile.plan import Plan
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.update_book import UpdateBook

BLOCKS = 12
NUMEL = 1 << 16


def specs(dtype=torch.bfloat16):
    names = ["embedding", *(f"blocks.{i}.{part}" for i in range(BLOCKS) for part in ("up", "down")), "norm", "head"]
    return [ParameterSpec(f"{name}.weight", (NUMEL,), dtype, True) for name in names]


def book(parameters):
    made = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return UpdateBook(made, [0] * len(parameters), [each.dtype for each in parameters])


def preparation(plan, **fields):
    given = {"max_grad_norm": None, "micro_batches": 1, "memory_budget": None, **fields}
    return Preparation(device=torch.device("cpu"), host_budget=HostBudget(), plan=plan, **given)


def test_segments_are_numbered_children_and_what_lies_between():
    assert guess_segments(specs()) == [[0], *([2 * i + 1, 2 * i + 2] for i in range(BLOCKS)), [25, 26]]
    assert guess_segments([ParameterSpec("0", (1,), torch.float32, True)]) == [[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fields", [{}, {"max_grad_norm": 1.0}, {"micro_batches": 3}])
@pytest.mark.parametrize("residency", ["offloaded", "split", "persistent"])
def test_equals_packing(residency, fields, dtype):
    parameters = specs(dtype)
    plan = Plan(uniform_policy="keep", uniform_residency=residency, chunk_bytes=4 * NUMEL * dtype.itemsize)
    given = preparation(plan, **fields)
    packed = decide(parameters, guess_segments(parameters), {}, plan, given, book(parameters))
    assert host_needs(parameters, given, book(parameters), 0) == packed.spec.most_host_bytes()
    assert (packed.spec.most_host_bytes() == 0) == (residency == "persistent")


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({"max_grad_norm": 1.0}, 14),
        ({}, 14),
        ({"micro_batches": 2}, 16),
        ({"micro_batches": 2, "accumulation_dtype": torch.bfloat16}, 14),
    ],
)
def test_bytes_of_a_bf16_parameter(fields, each):
    """Weight, remainder, two moments; a gradient that waits, in its own type or in fp32; and shared landings."""
    parameters = specs()
    plan = Plan(uniform_policy="keep", uniform_residency="offloaded", chunk_bytes=4 * NUMEL)
    landings = 0 if "max_grad_norm" in fields else LANDINGS * 4 * NUMEL
    found = host_needs(parameters, preparation(plan, **fields), book(parameters), 0)
    assert found == each * NUMEL * len(parameters) + landings


def test_frozen_parameters_take_their_weights_only():
    parameters = [ParameterSpec(each.name, each.shape, each.dtype, False) for each in specs()]
    frozen = UpdateBook(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), [None] * 27, [torch.bfloat16] * 27)
    assert host_needs(parameters, preparation(Plan.uniform("keep", "offloaded")), frozen, 0) == 2 * NUMEL * 27


def test_default_rule_and_lists():
    parameters = specs()
    needed = [
        host_needs(parameters, preparation(None, memory_budget=size), book(parameters), 0) for size in (1, 1 << 30)
    ]
    assert needed[0] > 12 * NUMEL * len(parameters)
    assert needed[1] == 0
    half = Plan(uniform_policy="keep", residency=("persistent", "offloaded"), chunk_bytes=4 * NUMEL)
    everything = Plan(uniform_policy="keep", uniform_residency="offloaded", chunk_bytes=4 * NUMEL)
    found, most = (host_needs(parameters, preparation(plan), book(parameters), 0) for plan in (half, everything))
    assert 0.4 * most < found < 0.6 * most


def test_one_long_parameter_costs_one_landing():
    long = ParameterSpec("embedding.weight", (NUMEL * 100,), torch.bfloat16, True)
    plan = Plan(uniform_policy="keep", uniform_residency="offloaded", chunk_bytes=4 * NUMEL)
    needed = [host_needs(each, preparation(plan), book(each), 0) for each in (specs(), [long, *specs()[1:]])]
    assert needed[1] - needed[0] <= 99 * NUMEL * (14 + 2) + 4 * NUMEL


def test_originals_on_meta_lie_on_the_host_first():
    parameters = specs()
    given = preparation(Plan.uniform("keep", "persistent"))
    assert host_needs(parameters, given, book(parameters), 2 * NUMEL * 27) == 2 * NUMEL * 27
