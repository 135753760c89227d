"""A Profile in words: what each template costs, what each operation costs, and what the machine can do."""

from __future__ import annotations

import collections
import textwrap
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from protrain_compile.profile import HardwareProfile, NodeCost, Profile, TemplateProfile
from protrain_compile.program import Program
from protrain_compile.report.units import format_bytes
from protrain_compile.roles import RECOMPUTES, ROLES

OPS_SHOWN = 12
"""Operations of a template that have a row of their own; the others share one."""

SOURCE_COLUMNS = 100


def render_profile(program: Program, profile: Profile) -> str:
    """Return the tables of ``profile``, which is one of ``program``: templates, then their operations."""
    named = list(zip(template_names(program), profile.templates, strict=True))
    parts = [_templates_table(program, named)]
    parts += [_ops_table(name, found.nodes) for name, found in named if found.nodes]
    return "\n\n".join(parts)


def template_names(program: Program) -> list[str]:
    """Return what each template is of, such as ``blocks 0-25 (26)``."""
    stages = collections.defaultdict(list)
    for template, segment in zip(program.template_of, program.segments, strict=True):
        stages[template].append(segment.stage.name)
    sliced = {number: [f"{_joined(stages[whole])}, sliced"] for whole, number in program.sliced.items()}
    return [_joined({**stages, **sliced}[i]) for i in range(len(program.templates))]


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _templates_table(program: Program, named: Sequence[tuple[str, TemplateProfile]]) -> str:
    counts = collections.Counter(program.template_of)
    counts.update({number: counts[whole] for whole, number in program.sliced.items()})
    rows = []
    for i, (name, found) in enumerate(named):
        for role, cost in found.parts.items():
            workspace = format_bytes(max(0, cost.workspace_bytes))
            rows.append([name, role, f"{cost.ms:.3f}", f"{cost.ms * counts[i]:.2f}", cost.launches, workspace])
            name = ""
    header = ("template", "part", "ms", "ms a step", "launches", "workspace")
    return "\n".join([_table(header, rows, left=2), _total(program, [found for _, found in named])])


def _total(program: Program, templates: Sequence[TemplateProfile]) -> str:
    ms: dict[str, float] = dict.fromkeys(ROLES, 0.0)
    for segment, number in zip(program.segments, program.template_of, strict=True):
        for role, cost in templates[number].parts.items():
            is_run = role not in RECOMPUTES or segment.stage.kind == "block"
            ms[role] += cost.ms if is_run else 0.0
    how = "measured" if all(found.measured for found in templates) else "estimated, not measured"
    kept = ms["forward"] + ms["backward"]
    return f"compute of a step, {how}: {kept:.1f} ms; everything recomputed: {kept + ms['recompute']:.1f} ms"


def _ops_table(name: str, nodes: Sequence[NodeCost]) -> str:
    groups: dict[str, list[NodeCost]] = collections.defaultdict(list)
    for node in nodes:
        groups[node.op].append(node)
    order = sorted(groups, key=lambda op: -_sum_ms(groups[op]))
    shown, others = order[:OPS_SHOWN], order[OPS_SHOWN:]
    rows = [_op_row(op, groups[op], nodes) for op in shown]
    if others:
        rows.append(_op_row(f"{len(others)} others", [node for op in others for node in groups[op]], nodes))
    rows.append(_op_row("all", nodes, nodes))
    header = (f"{name}, node by node", "nodes", "ms", "share", "change", "most inside")
    return _table(header, rows, left=1)


def _op_row(op: str, nodes: Sequence[NodeCost], all_nodes: Sequence[NodeCost]) -> list[str]:
    share = _sum_ms(nodes) / max(_sum_ms(all_nodes), 1e-12)
    change = sum(node.change_bytes for node in nodes)
    sign = "-" if change < 0 else ""
    inside = max(node.inside_bytes for node in nodes)
    return [
        op,
        str(len(nodes)),
        f"{_sum_ms(nodes):.3f}",
        f"{share:.0%}",
        sign + format_bytes(abs(change)),
        format_bytes(inside),
    ]


def _sum_ms(nodes: Iterable[NodeCost]) -> float:
    return sum(node.ms for node in nodes)


def render_hardware(hardware: HardwareProfile) -> str:
    """Return the figures of a machine as a table, and where they come from."""
    products = [(f"products, {dtype}", f"{rate:.1f} TFLOPS") for dtype, rate in hardware.matmul_tflops.items()]
    links = [
        (
            f"copies, {name}",
            f"{rate.alone_gb_per_s:.1f} GB/s alone, {rate.both_gb_per_s:.1f} both ways, "
            f"{rate.beside_updates_gb_per_s:.1f} beside updates",
        )
        for name, rate in (("host to device", hardware.h2d), ("device to host", hardware.d2h))
    ]
    host = [
        (
            f"host updates, {rate.format}, {rate.threads} threads",
            f"{rate.gparams_per_s:.2f} G/s alone, {rate.beside_copies_gparams_per_s:.2f} beside copies",
        )
        for rate in hardware.host_updates
    ]
    device = [(f"device updates, {f}", f"{rate:.1f} G/s") for f, rate in hardware.device_update_gparams_per_s.items()]
    nvme = hardware.nvme
    disk = [] if nvme is None else [("disk", f"{nvme.read_gb_per_s:.1f} GB/s read, {nvme.write_gb_per_s:.1f} written")]
    memory = f"{format_bytes(hardware.device_bytes)} device, {format_bytes(hardware.host_bytes)} host"
    shared = f", shared by {hardware.devices} such devices" if hardware.devices > 1 else ""
    rows = [
        ("device", hardware.name),
        ("memory", f"{memory}, {hardware.cores} cores{shared}"),
        *products,
        ("device memory", f"{hardware.device_gb_per_s:.0f} GB/s"),
        *links,
        *host,
        *device,
        *disk,
        ("a launch", f"{hardware.launch_us:.1f} us"),
    ]
    return "\n".join([tabulate(rows, tablefmt="plain"), textwrap.fill(hardware.source, SOURCE_COLUMNS)])


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int) -> str:
    align = ["left"] * left + ["right"] * (len(header) - left)
    return tabulate(rows, headers=header, tablefmt="plain", colalign=align, disable_numparse=True)
