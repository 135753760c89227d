"""The printed schedule: header, plan, memory, then one table over all graphs with equal blocks folded."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate

from protrain_compile.chunks import RESIDENCIES, ChunkBinding
from protrain_compile.liveness import saved_bytes, schedule_liveness
from protrain_compile.plan import POLICIES
from protrain_compile.program import GraphInput, InputKind, fake_value
from protrain_compile.report.rows import Fold, Row, fold, schedule_rows
from protrain_compile.runtime.compiled_graph import CompiledGraph
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
    "after": "left",
}
"""Columns and their alignment. ``moved`` is left out where nothing moves."""


def format_bytes(size: int) -> str:
    """Return ``size`` in bytes with a binary unit, three figures."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def render(graph: CompiledGraph, schedule: Schedule, *, full: bool = False) -> str:
    """Return the schedule as text; ``full`` prints every block."""
    lines = [_header(graph, schedule), _plan_line(schedule), _memory_line(schedule), *_notes(graph)]
    shown: dict[str, list[Row | Fold]] = {
        name: [*rows] if full else [*fold(schedule, rows)] for name, rows in schedule_rows(schedule).items()
    }
    return "\n".join([*lines, *_table(shown)])


def _header(graph: CompiledGraph, schedule: Schedule) -> str:
    program = schedule.program
    return (
        f"protrain schedule: {program.name}, {_device(program.graph)}, built in {graph.build_s:.1f} s "
        f"({len(set(program.template_of))} templates, {len(program.segments)} segments)"
    )


def _device(module: torch.fx.GraphModule) -> str:
    devices = {
        str(value.device)
        for node in module.graph.nodes
        if isinstance(value := fake_value(node), torch.Tensor) and value.device.type != "cpu"
    }
    return ", ".join(sorted(devices)) or "cpu"


def _plan_line(schedule: Schedule) -> str:
    blocks = len(schedule.plan.policies or ())
    counts: collections.Counter[str] = collections.Counter(schedule.plan.policies)
    text = f"plan      {blocks} blocks: " + ", ".join(f"{counts[p]} {p}" for p in POLICIES)
    if not schedule.program.differentiable:
        text = f"plan      {blocks} blocks: no backward, so nothing is kept for one"
    if schedule.loss_slices > 1:
        text += f"; loss in {schedule.loss_slices} slices"
    return text if schedule.chunks is None else f"{text}; {_chunks_text(schedule.chunks)}"


def _chunks_text(chunks: ChunkBinding) -> str:
    kinds: collections.Counter[str] = collections.Counter(chunks.residency)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in RESIDENCIES)
    largest = format_bytes(chunks.layout.largest_bytes)
    buffers = f", {chunks.buffers} buffers" if kinds["offloaded"] else ""
    return f"{len(chunks.layout.chunks)} chunks of up to {largest}: {counts}{buffers}{_ranks_text(chunks)}"


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


def _table(shown: Mapping[str, list[Row | Fold]]) -> list[str]:
    """Return table lines, with a line before each graph and fold lines at the place of the rows they stand for."""
    rows = [row for parts in shown.values() for row in parts if isinstance(row, Row)]
    columns = [name for name in COLUMNS if name != "moved" or any(row.operation.moved_bytes for row in rows)]
    cells = [[cells[name] for name in columns] for cells in map(_cells, rows)]
    alignment = [COLUMNS[name] for name in columns]
    aligned = tabulate([columns, *cells], tablefmt="plain", colalign=alignment, disable_numparse=True)
    header, *lines = (line.rstrip() for line in aligned.splitlines())
    remaining = iter(lines)
    found = [header]
    for name, parts in shown.items():
        found.append(f"[{name}]")
        found += [next(remaining) if isinstance(each, Row) else _fold_line(name, each) for each in parts]
    return found


def _cells(row: Row) -> dict[str, Any]:
    operation = row.operation
    return {
        "#": row.number,
        "stream": operation.stream,
        "op": operation.op,
        "what": operation.what,
        "saved": format_bytes(row.saved_bytes) if row.saved_bytes else "-",
        "moved": format_bytes(operation.moved_bytes) if operation.moved_bytes else "-",
        "live": format_bytes(row.live_bytes),
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
        "templates": len(set(program.template_of)),
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
