"""``protrain plan``: what it prints, as text and JSON, and its refusals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from support.made_shapes import MB, Stack
from support.profiles import machine
from torch import Tensor, nn

from protrain_compile import Plan, cli
from protrain_compile.chunks import ChunkLayout
from protrain_compile.commands import plan
from protrain_compile.commands.families import FAMILIES, family
from protrain_compile.commands.models import resolve
from protrain_compile.commands.outlook import (
    Machine,
    NotAlikeError,
    Step,
    Workload,
    _mixed,
    between,
    largest,
    step_of,
)
from protrain_compile.errors import BudgetError, OptionError
from protrain_compile.links import Links
from protrain_compile.profile import CollectiveCost
from protrain_compile.shards import World
from protrain_compile.solver import search
from protrain_compile.step_shape import ChunkShape

TINY = "gpt2:n_embd=64,n_layer=5,n_head=4,vocab_size=256,n_positions=64,attn_pdrop=0,embd_pdrop=0,resid_pdrop=0"
ARGUMENTS = ["plan", TINY, "--batch", "2", "--seq", "32"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert set(found["plan"]["residency"]) == {"persistent"}
    assert len(found["plan"]["policies"]) == 5
    assert found["largest_batch"] > 1000
    predicted = found["predicted"]
    assert predicted["times"] == "estimated"
    assert found["tokens_per_s"] == pytest.approx(2 * 32 / predicted["step_ms"] * 1000)
    kinds = predicted["bytes"]
    total = kinds.pop("total")
    assert sum(each["device"] for each in kinds.values()) == total["device"] == predicted["peak_bytes"]


def test_ranks_share_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight ranks need less than one each, and all of them are told of."""
    peaks = {}
    for ranks, nodes in ((1, 1), (8, 1), (64, 8)):
        assert cli.main([*ARGUMENTS, "--ranks", str(ranks), "--nodes", str(nodes), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        peaks[ranks] = found["predicted"]["peak_bytes"]
        if ranks == 1:
            assert "world" not in found
            continue
        world = found["world"]
        assert (world["ranks"], world["nodes"]) == (ranks, nodes)
        assert world["divided_among"] in (8, 64)
        assert world["tokens_per_s_of_all"] == pytest.approx(ranks * found["tokens_per_s"])
        assert world["efficiency"] == pytest.approx(world["one_rank_step_ms"] / found["predicted"]["step_ms"])
        assert set(world["traffic_bytes"]) == {"all_gather", "reduce_scatter"}
        assert len(found["plan"]["sharding"]) == len(found["plan"]["residency"])
    assert peaks[8] < peaks[1]


@pytest.mark.parametrize(("ranks", "nodes", "parts"), [(1, 1, 1), (2, 1, 2), (8, 1, 4), (8, 2, 4)])
def test_ranks_of_a_machine_share_its_host(ranks: int, nodes: int, parts: int, tmp_path: Path) -> None:
    """A profile of four devices: four ranks have a quarter of its host each, two ranks half of it."""
    path = tmp_path / "four.json"
    path.write_text(machine(devices=4).to_json())
    none = dict.fromkeys(("memory_budget", "host_memory_budget", "links"))
    found = plan._machine(argparse.Namespace(hardware=str(path), ranks=ranks, nodes=nodes, **none))
    assert found.host_bytes == int((32 << 30) // parts * 0.97)
    assert found.device_bytes == int((8 << 30) * 0.97)


def test_what_fits_with_whole_parameters_alone_fits() -> None:
    """To gather one large frozen chunk takes buffers of its size, which it does not take where it stays whole."""
    stack = Stack(blocks=1, saved_mb=1, ends_mb=10)
    made = stack.shape()
    chunks = (made.chunks[0], ChunkShape(100 * MB, 100 * MB // 2, False, "split"), made.chunks[2])
    lives = tuple(life for life in made.lives if life.collects != (1,))
    shape = dataclasses.replace(made, chunks=chunks, lives=lives)
    step = Step({"whole": shape}, stack.profile(), ChunkLayout((), (), ()))
    needed = {}
    for sharding in ("gradients", "parameters"):
        shape = dataclasses.replace(step.shapes["whole"], world=World(8))
        with pytest.raises(BudgetError) as caught:
            search(shape, step.profile, device_bytes=1, host_bytes=0, given=Plan(uniform_sharding=sharding))
        needed[sharding] = caught.value.needed_bytes
    assert needed["gradients"] < needed["parameters"]
    assert step.fits(Machine(step.profile.hardware, needed["gradients"], 0, (World(8),)))
    assert not step.fits(Machine(step.profile.hardware, needed["gradients"] - 1, 0, (World(8),)))


def test_the_form_of_the_loss_is_searched_as_in_training() -> None:
    sizes = "vocab_size=50000,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=128"
    step = step_of(Workload(resolve(f"llama:{sizes}"), 4, 256), machine())
    assert list(step.shapes) == ["whole", "sliced"]
    plenty = Machine(step.profile.hardware, 1 << 40, 1 << 40)
    assert step.plan(plenty).plan.loss == "whole"
    with pytest.raises(BudgetError) as caught:
        search(step.shapes["whole"], step.profile, device_bytes=1, host_bytes=1 << 40)
    short = dataclasses.replace(plenty, device_bytes=caught.value.needed_bytes - 1)
    assert step.fits(short)
    solution = step.plan(short)
    assert solution.plan.loss == "sliced"
    source = resolve(f"llama:{sizes}")
    lines = plan._lines(plan.Outlook(Workload(source, 4, 256), short, step, solution, most_rows=4))
    assert any(line.startswith("plan ") and line.endswith("; loss in slices") for line in lines)
    with pytest.raises(BudgetError) as refused:
        step.plan(dataclasses.replace(plenty, device_bytes=1))
    assert refused.value.needed_bytes < caught.value.needed_bytes


def test_a_rank_is_planned_with_its_share_of_the_host() -> None:
    step = Step({"whole": Stack().shape()}, Stack().profile(), ChunkLayout((), (), ()))
    whole = Machine(machine(devices=4), 1 << 30, 1 << 40)
    for ranks in (1, 2, 4):
        _, profile = step._in(whole, World(2 * ranks, 1, 2), "whole")
        assert profile.hardware == whole.hardware.share(ranks)


def test_hybrid_sharding_where_the_network_is_slow(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By the links that were asked for, though other collectives were measured on the machine."""
    links, hardware = tmp_path / "links.json", tmp_path / "hardware.json"
    links.write_text(Links("slow network", 400.0, 5.0, 0.01, 10.0).to_json())
    measured = tuple(CollectiveCost(kind, 1 << 20, 16, 1e-3) for kind in ("all_gather", "reduce_scatter"))
    hardware.write_text(machine(collectives=measured).to_json())
    asked = ["--ranks", "16", "--nodes", "2", "--links", str(links), "--hardware", str(hardware)]
    assert cli.main([*ARGUMENTS, *asked]) == 0
    found = capsys.readouterr().out
    assert "chunks divided among the 8 of a node, replicated across nodes: mesh (2, 8)" in found


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--memory-budget", "100KiB"]) == 1
    found = capsys.readouterr().out
    assert "does not fit: memory_budget: " in found
    assert "smallest that works is" in found
    assert "not even one row fits" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either MODEL or --largest FAMILY"),
        ([TINY, "--largest", "gpt2"], "give either MODEL or --largest FAMILY"),
        (["--largest", "bloom"], "the families are gpt2, llama, opt"),
        ([TINY, "--batch", "0"], "argument --batch"),
        ([TINY, "--memory-budget", "much"], "--memory-budget='much'"),
        ([TINY, "--ranks", "6", "--nodes", "4"], "--ranks=6 do not spread evenly over --nodes=4"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", *arguments])
    assert message in capsys.readouterr().err


def test_an_unknown_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--hardware", "abacus"]) == 1
    assert "abacus" in capsys.readouterr().err


def test_budget_is_no_more_than_there_is() -> None:
    """Nor than training would have of it, which leaves 3% to gaps."""
    assert plan._budget("1TiB", "--memory-budget", 100) == 97
    assert plan._budget("50", "--memory-budget", 100) == 50
    assert plan._budget(None, "--memory-budget", 100) == 97


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("start", [1, 3, 8])
def test_largest(most: int, start: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= most

    assert largest(fits, start, 8) == min(most, 8)
    assert all(1 <= number <= 8 for number in asked)


def test_families_grow() -> None:
    for found in FAMILIES.values():
        assert len(found.names) == len(found.sizes)
        assert all(len(sizes) == len(found.fields) for sizes in found.sizes)
        sources = [found.member(index, 2048) for index in range(len(found.names))]
        assert all(source.depth == sizes[1] for source, sizes in zip(sources, found.sizes, strict=True))
    with pytest.raises(OptionError):
        family("bloom")


def test_mixing_takes_sizes_only() -> None:
    assert _mixed({"a_bytes": 1}, {"a_bytes": 3}, 0.5, "x_bytes") == {"a_bytes": 2}
    assert _mixed((10, 2.0), (20, 4.0), -0.5, "ms") == (5, 1.0)
    assert _mixed(10, 20, -3.0, "size_bytes") == 0
    assert _mixed(-10, -20, 0.5, "workspace_bytes") == -15
    for first, second, name in ((1, 2, "segment"), ("a", "b", "size_bytes"), ((1,), (1, 2), "ms"), (1, 2.0, "ms")):
        with pytest.raises(NotAlikeError):
            _mixed(first, second, 0.5, name)


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"protrain plan: {TINY}, ")
    assert [line.split()[0] for line in lines[1:5]] == ["plan", "predicted", "memory", "batch"]
    assert "tokens/s" in lines[2]
    assert lines[6].split() == ["bytes", "device", "host"]
    assert lines[-1].startswith("total")


def test_steps_are_alike_though_larger_values_would_be_staged() -> None:
    """A value is staged below some size: of two batches, perhaps in one alone."""
    stack = Stack(blocks=3)
    small, large = (dataclasses.replace(stack, saved_mb=mb, finer=()) for mb in (10, 30))
    made = [(life, life.birth == "forward") for life in small.shape().lives]
    staged = tuple(dataclasses.replace(life, staged=each, products_staged=each) for life, each in made)
    layout = ChunkLayout((), (), ())
    first = Step({"whole": dataclasses.replace(small.shape(), lives=staged)}, stack.profile(), layout)
    second = Step({"whole": large.shape()}, stack.profile(), layout)
    middle = between(first, second, 0.5).shapes["whole"]
    sizes = {life.size_bytes for life in middle.lives if life.birth == "forward" and life.forward_until < 0}
    assert sizes == {20 * MB}


@pytest.mark.parametrize(("family_name", "sizes"), [("gpt2", (124e6, 175e9)), ("llama", (1e9, 405e9))])
def test_names_of_a_family_tell_their_sizes(family_name: str, sizes: tuple[float, float]) -> None:
    found = family(family_name)
    counts = [found.parameters(index) for index in range(len(found.names))]
    assert (counts[0], counts[-1]) == sizes
    assert counts == sorted(counts)


class Blocks(nn.Module):
    """Returns the mean square of what its blocks make of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_of_inputs_of_its_own_no_tokens_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made_here")
    module.own = lambda: (Blocks(), torch.zeros(4, 8))  # type: ignore[attr-defined]
    module.lost = Blocks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    assert cli.main(["plan", "made_here:own"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "its own inputs" in lines[0]
    assert "tokens" not in "".join(lines)
    assert lines[4] == "batch     that of its own inputs; the largest is not known"
    assert cli.main(["plan", "made_here:own", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["seq"], found["tokens_per_s"], found["largest_batch"]) == (None, None, None, None)
    assert cli.main(["plan", "made_here:lost", "--batch", "2", "--seq", "16"]) != 0
    assert "[2, 16] X [8, 8]" in capsys.readouterr().err
