"""Reports: rows, folding, the printed table, JSON, finding a model's schedules, and where they go."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.capture import compiled, gpt_program, mixed, write_schedule
from support.light import GPT
from support.models import tokens
from torch import Tensor, nn

import protrain_compile
from protrain_compile import Plan, ProtrainError
from protrain_compile.liveness import saved_bytes, schedule_liveness
from protrain_compile.report.registry import live_graphs
from protrain_compile.report.render import format_numbers
from protrain_compile.report.rows import Fold, Row, fold, schedule_rows, unfold
from protrain_compile.report.units import format_bytes
from protrain_compile.schedule import Operation, Schedule, operation_of


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12 * 1024, "12.0 KiB"),
        (123 * 1024, "123 KiB"),
        (1024**2 - 1, "1024 KiB"),
        (5 * 1024**2 // 2, "2.50 MiB"),
        (3 * 1024**3, "3.00 GiB"),
        (5000 * 1024**3, "5000 GiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((3, 4), "3 4"),
        ((3, 4, 5), "3-5"),
        ((1, 3, 4, 5, 9), "1 3-5 9"),
        ((1, 2, 5, 6, 7, 8), "1 2 5-8"),
    ],
)
def test_numbers(numbers: tuple[int, ...], text: str) -> None:
    assert format_numbers(numbers) == text


# --- rows


@pytest.fixture(params=["kkkkk", "rrrrr", "krkrr"])
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return write_schedule(gpt_program(5), mixed(request.param))


def test_rows_are_the_operations_in_order(schedule: Schedule) -> None:
    rows = schedule_rows(schedule)
    assert list(rows) == ["forward", "backward"]
    for name, found in rows.items():
        operations = [operation_of(node) for node in schedule.graphs[name].graph.nodes]
        assert [row.operation for row in found] == [each for each in operations if each is not None]
    numbers = [row.number for found in rows.values() for row in found]
    assert numbers == list(range(1, len(numbers) + 1))


def test_rows_come_after_what_they_use(schedule: Schedule) -> None:
    rows = schedule_rows(schedule)
    by_what = {(row.operation.op, row.operation.what): row for found in rows.values() for row in found}
    for row in by_what.values():
        assert list(row.after) == sorted(set(row.after))
        assert all(number < row.number for number in row.after)
    assert by_what["forward", "block 3"].after == (by_what["forward", "block 2"].number,)
    recompute = by_what.get(("recompute", "block 3"))
    backward = by_what["backward", "block 3"]
    assert by_what["backward", "block 4"].number in backward.after
    if recompute is not None:
        assert recompute.after == (by_what["forward", "block 2"].number,)
        assert recompute.number in backward.after
    else:
        assert by_what["forward", "block 3"].number in backward.after


def test_rows_add_up(schedule: Schedule) -> None:
    rows = schedule_rows(schedule)
    assert sum(row.saved_bytes for found in rows.values() for row in found) == sum(saved_bytes(schedule).values())
    for name, alive in schedule_liveness(schedule).items():
        assert [row.live_bytes for row in rows[name]] == list(alive.live_bytes.values())


# --- folding


def test_folding_loses_nothing(schedule: Schedule) -> None:
    for rows in schedule_rows(schedule).values():
        shown = list(fold(schedule, rows))
        assert list(unfold(shown)) == rows
        assert len(shown) <= len(rows)


def shown(letters: str, graph: str) -> list[str]:
    schedule = write_schedule(gpt_program(5), mixed(letters))
    found = fold(schedule, schedule_rows(schedule)[graph])
    return [
        f"x{each.count} {each.policy}" if isinstance(each, Fold) else f"{each.operation.op} {each.operation.what}"
        for each in found
    ]


def test_equal_blocks_fold() -> None:
    assert shown("kkkkk", "forward") == ["forward prologue", "forward block 0", "x4 keep", "forward epilogue"]
    assert shown("kkkkk", "backward") == ["backward epilogue", "backward block 4", "x4 keep", "backward prologue"]
    assert shown("rrrrr", "backward") == [
        "backward epilogue",
        "recompute block 4",
        "backward block 4",
        "x4 recompute",
        "backward prologue",
    ]


def test_policies_do_not_fold_together() -> None:
    assert shown("kkrrr", "forward") == [
        "forward prologue",
        "forward block 0",
        "forward block 1",
        "forward block 2",
        "x2 recompute",
        "forward epilogue",
    ]


def test_alternating_blocks_fold_by_pairs() -> None:
    assert shown("krkrk", "forward") == [
        "forward prologue",
        "forward block 0",
        "forward block 1",
        "x1 keep+recompute",
        "forward block 4",
        "forward epilogue",
    ]


def rows_of(text: str) -> list[Row]:
    """Return a row per letter of ``text``; equal letters have equal patterns."""
    return [
        Row(i, Operation("forward", f"block {i}", "compute", 0), 0, 0, (), (letter,)) for i, letter in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a", ["0"]),
        ("aa", ["0", "1"]),
        ("aaa", ["0", "1-2 x2"]),
        ("abab", ["0", "1", "2-3 x1"]),
        ("xabababy", ["0", "1", "2", "3-6 x2", "7"]),
        ("paabcabcabc", ["0", "1", "2", "3", "4", "5-10 x2"]),
        ("aabaab", ["0", "1", "2", "3-5 x1"]),
        ("abcabd", ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_repetitions_of_any_length_fold(text: str, expected: list[str]) -> None:
    schedule, rows = write_schedule(gpt_program(5), mixed("kkkkk")), rows_of(text)
    found = list(fold(schedule, rows))
    assert list(unfold(found)) == rows
    assert [
        f"{each.rows[0].number}-{each.rows[-1].number} x{each.count}" if isinstance(each, Fold) else str(each.number)
        for each in found
    ] == expected


def test_the_moved_column_appears_where_something_moves() -> None:
    _, schedule = compiled(GPT(2), tokens())
    assert "moved" not in schedule.render()
    node = next(node for node in schedule.graphs["forward"].graph.nodes if operation_of(node) is not None)
    node.meta["operation"] = dataclasses.replace(node.meta["operation"], moved_bytes=2048, chunk=3)
    assert schedule.render().splitlines()[3].split() == ["#", "stream", "op", "what", "saved", "moved", "live", "after"]
    assert "2.00 KiB" in schedule.render()
    assert json.loads(schedule.to_json())["graphs"][0]["graphs"]["forward"][0]["moved_bytes"] == 2048


def test_operations_on_a_chunk_come_after_each_other() -> None:
    schedule = write_schedule(gpt_program(5), mixed("kkkkk"))
    operations = [node for node in schedule.graphs["forward"].graph.nodes if operation_of(node) is not None]
    for node in (operations[0], operations[4]):
        node.meta["operation"] = dataclasses.replace(node.meta["operation"], chunk=1)
    rows = schedule_rows(schedule)["forward"]
    assert rows[4].after == (1, 4)


def test_one_equal_row_is_shown_rather_than_folded() -> None:
    assert shown("krrkk", "forward").count("x1 recompute") == 0


# --- the printed schedule


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[nn.Module, protrain_compile.ModelSchedule]]:
    return {letters: compiled(GPT(5), tokens(), plan=mixed(letters)) for letters in ("kkkkk", "krrrr")}


def test_the_head(models: dict[str, Any]) -> None:
    lines = models["krrrr"][1].render().splitlines()
    assert re.fullmatch(r"protrain schedule: GPT, cpu, built in \d+\.\d s \(3 templates, 7 segments\)", lines[0])
    assert re.fullmatch(r"plan {6}5 blocks: 1 keep, 4 recompute", lines[1])
    assert re.fullmatch(
        r"memory {4}parameters \S+ KiB, saved for the backward \S+ KiB; "
        r"peak live \S+ KiB in (backward|recompute) block \d "
        r"\(without what a call allocates and frees inside\)",
        lines[2],
    )
    assert lines[3].split() == ["#", "stream", "op", "what", "saved", "live", "after"]


def test_tables_line_up(models: dict[str, Any]) -> None:
    lines = models["krrrr"][1].render().splitlines()[3:]
    start = lines[0].index("stream")
    rows = [line for line in lines[1:] if not line.startswith("[")]
    assert rows
    assert all(line[start:].startswith("compute") for line in rows)
    assert all(line == line.rstrip() for line in lines)
    assert lines.count("[forward]") == lines.count("[backward]") == 1


def test_fold_lines(models: dict[str, Any]) -> None:
    text = models["krrrr"][1].render()
    assert re.search(
        r"^\[forward, blocks 2 to 4 x3, recompute, same pattern: saved \S+ KiB, live \S+ KiB after them\]$", text, re.M
    )
    assert re.search(r"^\[backward, blocks 3 to 1 x3, recompute, same pattern: live \S+ KiB after them\]$", text, re.M)


def test_full_prints_every_block(models: dict[str, Any]) -> None:
    _, schedule = models["kkkkk"]
    text = schedule.render(full=True)
    assert "same pattern" not in text
    assert all(f"forward   block {i}" in text for i in range(5))
    assert len(schedule.render().splitlines()) < len(text.splitlines())


def test_inference_has_no_policy() -> None:
    with torch.no_grad():
        text = compiled(GPT(4), tokens(), plan="recompute")[1].render()
    assert "plan      4 blocks: no backward, so nothing is kept for one" in text
    assert "saved for the backward" not in text
    assert "[inference, blocks 1 to 3 x3, same pattern: live" in text


def test_notes() -> None:
    assert (
        "note      no repeated blocks found: the graph is planned as one segment"
        in compiled(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4))[1].render()
    )


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_graph_breaks() -> None:
    model = Broken()
    _, schedule = compiled(model, torch.ones(2, 4))
    text = schedule.render()
    assert text.startswith("protrain: 2 graphs, bound 2 times, 1 of them ending at a graph break: values that cross")
    assert re.search(r"note {6}this graph ends at a graph break \(.*\) at .*test_report.py:\d+; ", text)
    assert set(schedule.graphs) == {"forward", "backward", "forward.1", "backward.1"}
    found = json.loads(schedule.to_json())["graphs"]
    assert found[0]["graph_break"]["place"].rpartition(":")[0].endswith("test_report.py")
    assert found[1]["graph_break"] is None


# --- JSON


def test_json(models: dict[str, Any]) -> None:
    _, schedule = models["krrrr"]
    (found,) = json.loads(schedule.to_json())["graphs"]
    assert found["model"] == "GPT"
    assert Plan.from_mapping(found["plan"]) == schedule.plan
    assert found["templates"] == 3
    assert [each["name"] for each in found["segments"]][:2] == ["prologue", "block 0"]
    assert found["segments"][1] == {"name": "block 0", "path": "blocks.0", "template": "t1"}
    assert {each["kind"] for each in found["inputs"]} == {"parameter", "input"}
    rows = schedule_rows(schedule.parts[0].schedule)
    for name, operations in found["graphs"].items():
        assert [each["number"] for each in operations] == [row.number for row in rows[name]]
        assert [each["live_bytes"] for each in operations] == [row.live_bytes for row in rows[name]]
        assert all(each["live_bytes"] <= found["peak_live_bytes"][name] for each in operations)
    assert {each["name"] for each in found["passes"]} >= {"tag_blocks", "apply_policies"}


# --- finding a model's schedules


def test_the_compiled_model_and_its_original_are_one(models: dict[str, Any]) -> None:
    function, schedule = models["kkkkk"]
    assert protrain_compile.schedule(function._orig_mod).parts[0].graph is schedule.parts[0].graph


def test_a_model_that_did_not_run() -> None:
    with pytest.raises(ProtrainError, match="has not run under the protrain backend yet"):
        protrain_compile.schedule(GPT(2))


@pytest.mark.parametrize("value", [None, 3, "model", lambda x: x])
def test_what_is_no_model(value: Any) -> None:
    with pytest.raises(TypeError, match=r"must be the compiled torch\.nn\.Module"):
        protrain_compile.schedule(value)


def test_training_and_inference_are_two_graphs() -> None:
    model = GPT(2)
    function, _ = compiled(model, tokens())
    with torch.no_grad():
        function(tokens())
    schedule = protrain_compile.schedule(model)
    assert list(schedule.graphs) == ["forward", "backward", "inference"]
    assert schedule.render().count("protrain schedule: GPT") == 2
    schedule.use(Plan.uniform("recompute"))
    assert all(part.schedule.plan.policies == ("recompute",) * 2 for part in schedule.parts)


def test_use_takes_every_form_of_a_plan() -> None:
    _, schedule = compiled(GPT(2), tokens())
    for plan in (
        Plan.uniform("recompute"),
        '{"uniform_policy": "recompute"}',
        {"policies": ["recompute", "recompute"]},
    ):
        schedule.use('{"uniform_policy": "keep"}')
        schedule.use(plan)  # type: ignore[arg-type]
        assert schedule.plan.policies == ("recompute", "recompute")


def test_the_registry_holds_nothing_alive() -> None:
    gc.collect()
    before = len(live_graphs)
    torch._dynamo.reset()
    compiled(GPT(2), tokens())
    torch._dynamo.reset()
    gc.collect()
    assert len(live_graphs) <= before


def test_schedules_are_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text("before\n")
    compiled(GPT(2), tokens(), schedule=path)
    assert path.read_text().startswith("before\nprotrain schedule: GPT")


def test_a_fold_stands_for_its_rows() -> None:
    rows = tuple(
        Row(i, Operation("forward", f"block {i}", "compute", i), 10, 100 + i, (), ("t1", "forward", 10))
        for i in range(3)
    )
    assert list(unfold([Fold(rows, 3, "blocks 0 to 2", "keep")])) == list(rows)


def test_a_prepared_models_plan_line_counts_its_chunks() -> None:
    model = GPT(3)
    plan = dataclasses.replace(Plan.uniform("recompute", "offloaded"), chunk_bytes=10_000, buffers=3)
    model, _ = protrain_compile.prepare(model, torch.optim.AdamW(model.parameters()), plan=plan, device="cpu")
    function = torch.compile(model, backend="protrain", options={"compile": "eager", "schedule": "off"})
    function(tokens()).sum().backward()
    shown = protrain_compile.schedule(function)
    chunks = shown.parts[0].schedule.chunks
    assert chunks is not None
    count = len(chunks.layout.chunks)
    assert count > 1
    line = next(line for line in shown.render().splitlines() if line.startswith("plan"))
    assert line.startswith(f"plan      3 blocks: 3 recompute; {count} chunks of up to ")
    assert line.endswith(f": 0 persistent, {count} offloaded, 0 split, 3 buffers")
    assert shown.render().splitlines()[-1].startswith("moved ")
