"""The printed schedule (DESIGN 8): header, plan, memory, then one table per graph with equal blocks folded."""

from __future__ import annotations

import collections
from typing import Any

import torch
from tabulate import tabulate

from protrain_compile.liveness import liveness
from protrain_compile.plan import POLICIES
from protrain_compile.program import GraphInput, InputKind, fake_value
from protrain_compile.report.rows import Fold, Row, fold, graph_rows
from protrain_compile.runtime.compiled_graph import CompiledGraph
from protrain_compile.schedule import Schedule
from protrain_compile.sizes import size_bytes

COLUMNS = ("#", "stream", "op", "what", "saved", "live", "after")
GRAPH_ORDER = ("forward", "backward", "inference")


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
    start = 1
    for name in GRAPH_ORDER:
        if name not in schedule.graphs:
            continue
        rows = graph_rows(schedule, schedule.graphs[name], start)
        start += len(rows)
        shown: list[Row | Fold] = [*rows] if full else [*fold(schedule, rows)]
        lines += [f"[{name}]", *_table(name, shown)]
    return "\n".join(lines)


def _header(graph: CompiledGraph, schedule: Schedule) -> str:
    program = schedule.program
    return (
        f"protrain schedule: {program.name}, {_device(program.graph)}, built in {graph.build_s:.1f} s "
        f"({len(program.templates)} templates, {len(program.segments)} segments)"
    )


def _device(module: torch.fx.GraphModule) -> str:
    devices = {
        str(value.device)
        for node in module.graph.nodes
        if isinstance(value := fake_value(node), torch.Tensor) and value.device.type != "cpu"
    }
    return ", ".join(sorted(devices)) or "cpu"


def _plan_line(schedule: Schedule) -> str:
    counts: collections.Counter[str] = collections.Counter(schedule.plan.policies)
    return f"plan      {len(schedule.plan.policies or ())} blocks: " + ", ".join(f"{counts[p]} {p}" for p in POLICIES)


def _memory_line(schedule: Schedule) -> str:
    program = schedule.program
    parameters = size_bytes(
        fake_value(node)
        for node, source in zip(program.primals, program.inputs, strict=True)
        if source.kind is InputKind.PARAMETER
    )
    text = f"memory    parameters {format_bytes(parameters)}"
    if program.differentiable:
        text += f", saved for the backward {format_bytes(saved_bytes(schedule))}"
    peak = max(liveness(module).peak_bytes for module in schedule.graphs.values())
    return f"{text}; peak live {format_bytes(peak)} (without what a call allocates and frees inside)"


def saved_bytes(schedule: Schedule) -> int:
    """Return the bytes that the forward leaves for the backward."""
    placeholders = schedule.graphs["backward"].graph.find_nodes(op="placeholder")
    return size_bytes(node.meta.get("val") for node in placeholders if node.meta.get("kind") == "kept")


def _notes(graph: CompiledGraph) -> list[str]:
    notes = list(graph.program.notes)
    if graph.origin.break_reason:
        notes.append(
            f"this graph ends at a graph break ({graph.origin.break_reason}) at {graph.origin.break_place}; "
            "blocks cut by it are planned one graph at a time"
        )
    return [f"note      {note}" for note in notes]


def _table(name: str, shown: list[Row | Fold]) -> list[str]:
    """Return table lines with fold lines between them, at the place of the rows that they stand for."""
    cells = [_cells(each) for each in shown if isinstance(each, Row)]
    aligned = tabulate([COLUMNS, *cells], tablefmt="plain", colalign=("right", "left", "left", "left", *("right",) * 3))
    header, *lines = aligned.splitlines()
    remaining = iter(lines)
    return [header, *(next(remaining) if isinstance(each, Row) else _fold_line(name, each) for each in shown)]


def _cells(row: Row) -> tuple[Any, ...]:
    operation = row.operation
    saved = format_bytes(operation.saved_bytes) if operation.saved_bytes else "-"
    after = " ".join(map(str, row.after)) if len(row.after) <= 4 else f"{row.after[0]} .. {row.after[-1]}"
    return row.number, operation.stream, operation.op, operation.what, saved, format_bytes(row.live_bytes), after


def _fold_line(name: str, each: Fold) -> str:
    numbers = [each.first.removeprefix("block "), each.last.removeprefix("block ")]
    blocks = f"block {numbers[0]}" if each.count == 1 else f"blocks {numbers[0]} to {numbers[1]}"
    return f"[{name}, {blocks} x{each.count}, {each.policy}, same pattern]"


def to_dict(graph: CompiledGraph, schedule: Schedule) -> dict[str, Any]:
    """Return the schedule as JSON-ready data: plan, segments, and every operation of every graph."""
    program = schedule.program
    start = 1
    graphs: dict[str, list[dict[str, Any]]] = {}
    for name in GRAPH_ORDER:
        if name in schedule.graphs:
            rows = graph_rows(schedule, schedule.graphs[name], start)
            start += len(rows)
            graphs[name] = [_row_dict(row) for row in rows]
    return {
        "model": program.name,
        "plan": {"policies": list(schedule.plan.policies or ()), "blocks": list(program.block_names)},
        "templates": len(program.templates),
        "segments": [
            {"name": segment.stage.name, "path": segment.stage.path, "template": program.templates[index].name}
            for segment, index in zip(program.segments, program.template_of, strict=True)
        ],
        "inputs": [_input_dict(source) for source in program.inputs],
        "peak_live_bytes": {name: liveness(module).peak_bytes for name, module in schedule.graphs.items()},
        "passes": [{"name": r.name, "ms": round(r.ms, 3), "changed": r.changed} for r in graph.records],
        "notes": list(program.notes),
        "graph_break": {"reason": graph.origin.break_reason, "place": graph.origin.break_place}
        if graph.origin.break_reason
        else None,
        "graphs": graphs,
    }


def _row_dict(row: Row) -> dict[str, Any]:
    operation = row.operation
    return {
        "number": row.number,
        "stream": operation.stream,
        "op": operation.op,
        "what": operation.what,
        "saved_bytes": operation.saved_bytes,
        "live_bytes": row.live_bytes,
        "after": list(row.after),
    }


def _input_dict(source: GraphInput) -> dict[str, Any]:
    return {"name": source.name, "kind": source.kind.value, "trainable": source.trainable, "mutated": source.mutated}
