"""The printed schedule: header, plan, memory, then one table over all graphs with equal blocks folded."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate

from protrain_compile.chunks import ChunkBinding
from protrain_compile.cost_model import TimedOperation
from protrain_compile.liveness import saved_bytes, schedule_liveness
from protrain_compile.program import GraphInput, InputKind, fake_value
from protrain_compile.report.plan_table import chunks_text, memory_text, policies_text, prediction_dict, time_text
from protrain_compile.report.rows import Fold, Row, fold, schedule_rows
from protrain_compile.report.units import format_bytes
from protrain_compile.runtime.compiled_graph import CompiledGraph
from protrain_compile.runtime.planning import Planned
from protrain_compile.schedule import Schedule, operation_of
from protrain_compile.shards import SHARDINGS
from protrain_compile.sizes import size_bytes

COLUMNS = {
    "#": "right",
    "stream": "left",
    "op": "left",
    "what": "left",
    "saved": "right",
    "moved": "right",
    "live": "right",
    "at ms": "right",
    "ms": "right",
    "after": "left",
}
"""Columns and their alignment. ``moved`` is left out where nothing moves, times where no prediction was measured."""

Times = Mapping[int, TimedOperation]
"""The predicted operation of each row, by the row's number."""


def render(graph: CompiledGraph, schedule: Schedule, *, full: bool = False) -> str:
    """Return the schedule as text; ``full`` prints every block."""
    planned = graph.planned(schedule)
    rows = schedule_rows(schedule)
    lines = [_header(graph, schedule), _plan_line(schedule), *_predicted_line(planned), _memory_line(schedule)]
    shown: dict[str, list[Row | Fold]] = {
        name: [*each] if full else [*fold(schedule, each)] for name, each in rows.items()
    }
    return "\n".join([*lines, *_notes(graph), *_table(shown, _times(planned, rows))])


def _predicted_line(planned: Planned | None) -> list[str]:
    """Return the line of what was predicted; times only where they were measured on the device."""
    if planned is None or planned.prediction is None:
        return []
    memory = memory_text(planned.prediction)
    time = f"{time_text(planned.prediction, measured=True)}; " if planned.decision.measured else ""
    budget = planned.budget
    allowed = "" if budget.allowed_bytes is None else f"; budget {format_bytes(budget.allowed_bytes)}"
    others = f", {format_bytes(budget.other_bytes)} of it held by others" if budget.other_bytes else ""
    return [f"predicted {time}{memory}{allowed}{others}"]


def _times(planned: Planned | None, rows: Mapping[str, list[Row]]) -> Times:
    """Return the predicted operation of every row, where times were measured: both are in the order of the graphs."""
    if planned is None or planned.prediction is None or not planned.decision.measured:
        return {}
    flat = [row for each in rows.values() for row in each]
    predicted = planned.prediction.operations
    if [row.operation.op for row in flat] != [each.op for each in predicted]:
        return {}
    return {row.number: each for row, each in zip(flat, predicted, strict=True)}


def _header(graph: CompiledGraph, schedule: Schedule) -> str:
    program = schedule.program
    return (
        f"protrain schedule: {program.name}, {_device(program.graph)}, built in {graph.build_s:.1f} s "
        f"({program.structures} templates, {len(program.segments)} segments)"
    )


def _device(module: torch.fx.GraphModule) -> str:
    devices = {
        str(value.device)
        for node in module.graph.nodes
        if isinstance(value := fake_value(node), torch.Tensor) and value.device.type != "cpu"
    }
    return ", ".join(sorted(devices)) or "cpu"


def _plan_line(schedule: Schedule) -> str:
    policies, chunks = schedule.plan.policies or (), schedule.chunks
    text = f"plan      {policies_text(policies)}"
    if not schedule.program.differentiable:
        text = f"plan      {len(policies)} blocks: no backward, so nothing is kept for one"
    if schedule.loss_slices > 1:
        text += f"; loss in {schedule.loss_slices} slices"
    if chunks is None:
        return text
    moved = chunks_text(chunks.residency, chunks.layout.largest_bytes, chunks.buffers, chunks.sharding)
    return f"{text}; {moved}{_ranks_text(chunks)}"


def _ranks_text(chunks: ChunkBinding) -> str:
    if chunks.sharding is None:
        return ""
    kinds: collections.Counter[str] = collections.Counter(chunks.sharding)
    divided = ", ".join(f"{kind} of {kinds[kind]}" for kind in SHARDINGS if kinds[kind])
    return f"; {chunks.ranks} ranks divide {divided}"


def _memory_line(schedule: Schedule) -> str:
    program = schedule.program
    parameters = size_bytes(
        fake_value(node)
        for node, source in zip(program.primals, program.inputs, strict=True)
        if source.kind is InputKind.PARAMETER
    )
    text = f"memory    parameters {format_bytes(parameters)}"
    if program.differentiable:
        text += f", saved for the backward {format_bytes(sum(saved_bytes(schedule).values()))}"
    peak = max(schedule_liveness(schedule).values(), key=lambda each: each.peak_bytes)
    operation = operation_of(peak.peak_at) if peak.peak_at is not None else None
    where = f" in {operation.op} {operation.what}" if operation is not None else ""
    return f"{text}; peak live {format_bytes(peak.peak_bytes)}{where} (without what a call allocates and frees inside)"


def _notes(graph: CompiledGraph) -> list[str]:
    notes = list(graph.program.notes)
    if graph.origin.break_reason:
        notes.append(
            f"this graph ends at a graph break ({graph.origin.break_reason}) at {graph.origin.break_place}; "
            "blocks cut by it are planned one graph at a time"
        )
    return [f"note      {note}" for note in notes]


def _table(shown: Mapping[str, list[Row | Fold]], times: Times) -> list[str]:
    """Return table lines, with a line before each graph and fold lines at the place of the rows they stand for."""
    rows = [row for parts in shown.values() for row in parts if isinstance(row, Row)]
    left_out = set() if any(row.operation.moved_bytes for row in rows) else {"moved"}
    left_out |= set() if times else {"at ms", "ms"}
    columns = [name for name in COLUMNS if name not in left_out]
    cells = [[cells[name] for name in columns] for cells in (_cells(row, times.get(row.number)) for row in rows)]
    alignment = [COLUMNS[name] for name in columns]
    aligned = tabulate([columns, *cells], tablefmt="plain", colalign=alignment, disable_numparse=True)
    header, *lines = (line.rstrip() for line in aligned.splitlines())
    remaining = iter(lines)
    found = [header]
    for name, parts in shown.items():
        found.append(f"[{name}]")
        found += [next(remaining) if isinstance(each, Row) else _fold_line(name, each) for each in parts]
    return found


def _cells(row: Row, timed: TimedOperation | None) -> dict[str, Any]:
    operation = row.operation
    return {
        "#": row.number,
        "stream": operation.stream,
        "op": operation.op,
        "what": operation.what,
        "saved": format_bytes(row.saved_bytes) if row.saved_bytes else "-",
        "moved": format_bytes(operation.moved_bytes) if operation.moved_bytes else "-",
        "live": format_bytes(row.live_bytes),
        "at ms": f"{timed.begin_ms:.2f}" if timed is not None else "-",
        "ms": f"{timed.ms:.2f}" if timed is not None and timed.ms else "-",
        "after": format_numbers(row.after),
    }


def format_numbers(numbers: Sequence[int]) -> str:
    """Return ascending ``numbers`` as text, runs of three and more as ranges: ``2 5-9``."""
    runs = [
        [number for _, number in group]
        for _, group in itertools.groupby(enumerate(numbers), key=lambda it: it[1] - it[0])
    ]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def _fold_line(name: str, each: Fold) -> str:
    policy = f", {each.policy}" if each.policy and name != "inference" else ""
    sums = {
        "saved": sum(row.saved_bytes for row in each.rows),
        "moved": sum(row.operation.moved_bytes for row in each.rows),
    }
    totals = [f"{what} {format_bytes(size)}" for what, size in sums.items() if size]
    totals.append(f"live {format_bytes(each.rows[-1].live_bytes)} after them")
    return f"[{name}, {each.what} x{each.count}{policy}, same pattern: {', '.join(totals)}]"


def to_dict(graph: CompiledGraph, schedule: Schedule) -> dict[str, Any]:
    """Return the schedule as JSON-ready data: plan, segments, and every operation of every graph."""
    program = schedule.program
    return {
        "model": program.name,
        "plan": json.loads(schedule.plan.to_json()),
        "predicted": _predicted_dict(graph.planned(schedule)),
        "templates": program.structures,
        "segments": [
            {"name": segment.stage.name, "path": segment.stage.path, "template": program.templates[index].name}
            for segment, index in zip(program.segments, program.template_of, strict=True)
        ],
        "inputs": [_input_dict(source) for source in program.inputs],
        "peak_live_bytes": {name: each.peak_bytes for name, each in schedule_liveness(schedule).items()},
        "passes": [{"name": r.name, "ms": round(r.ms, 3), "changed": r.changed} for r in graph.records],
        "notes": list(program.notes),
        "graph_break": {"reason": graph.origin.break_reason, "place": graph.origin.break_place}
        if graph.origin.break_reason
        else None,
        "graphs": {name: [_row_dict(row) for row in rows] for name, rows in schedule_rows(schedule).items()},
    }


def _predicted_dict(planned: Planned | None) -> dict[str, Any] | None:
    if planned is None or planned.prediction is None:
        return None
    budget = {"budget_bytes": planned.budget.allowed_bytes, "other_bytes": planned.budget.other_bytes}
    return prediction_dict(planned.prediction, measured=planned.decision.measured) | budget


def _row_dict(row: Row) -> dict[str, Any]:
    operation = row.operation
    return {
        "number": row.number,
        "stream": operation.stream,
        "op": operation.op,
        "what": operation.what,
        "saved_bytes": row.saved_bytes,
        "moved_bytes": operation.moved_bytes,
        "live_bytes": row.live_bytes,
        "after": list(row.after),
    }


def _input_dict(source: GraphInput) -> dict[str, Any]:
    return {"name": source.name, "kind": source.kind.value, "trainable": source.trainable, "mutated": source.mutated}
