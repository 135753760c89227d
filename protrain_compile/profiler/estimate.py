"""Estimates what templates cost on a machine that is not at hand, from its HardwareProfile: a roofline.

A kernel takes the longer of its arithmetic and its traffic::

    ms = max(flops / (rate x 1e12), moved_bytes / (device_gb_per_s x 1e9)) x 1e3

where ``rate`` is ``matmul_tflops`` of the factors' type, times ``ATTENTION_SHARE`` for fused attention. A part takes
the sum of its kernels' times: they run one after another. Launches are counted, not added: a launching thread that is
slower than the device is for the cost model to see. Which kernels there are, and what they read and write, is in
``kernels``; a graph captured with CPU tensors stands for the same graph on the device.

No constant here is fitted. With the H200's profile, against bench/results: 8 Llama-like blocks of width 4096, forward
and backward, 607 TFLOPS (596 measured) and, all recomputed, 479 (478); Llama 3.43B, whose attention has no fused kernel
there (head size 100), all recomputed, 1288 ms with its device updates (1375 busy).
"""

from __future__ import annotations

import torch
from torch import fx

from passes.node_facts import op_name
from protrain_compile.options import CompileMode
from protrain_compile.profile import ArtefactCost, HardwareProfile, NodeCost, Profile, TemplateProfile
from protrain_compile.profiler.footprint import node_changes, workspace_bytes
from protrain_compile.profiler.kernels import Kernel, kernels_of, launches_of
from protrain_compile.program import Parts, Program, Ref, Template
from protrain_compile.roles import Role

ATTENTION_SHARE = 0.5
"""Speed of a fused attention's products relative to plain ones. FlashAttention-3's authors report 35% utilization for
FlashAttention-2 on an H100 (arXiv:2407.08608), about half of what plain products reach there."""

SIXTEEN_BITS = ("bfloat16", "float16")
WHOLE_RATE_SHARE = 67 / 989
"""Speed of fp32 products relative to 16-bit ones, for a profile that has only those: the data sheet's for an H200."""


def estimate_profile(program: Program, hardware: HardwareProfile, mode: CompileMode = "inductor") -> Profile:
    """Return the Profile of ``program`` on ``hardware``, nothing run."""
    return Profile(hardware, tuple(estimate_template(template, hardware, mode) for template in program.templates))


def estimate_template(template: Template, hardware: HardwareProfile, mode: CompileMode = "inductor") -> TemplateProfile:
    """Return what a template costs: its parts as ``mode`` compiles them, its nodes one by one."""
    assert template.parts is not None
    parts: dict[Role, ArtefactCost] = {}
    for role, module in template.parts.graphs().items():
        dying = dying_inputs(template.parts) if role == "backward" else ()
        parts[role] = _estimate_part(module, hardware, mode, dying)
    return TemplateProfile(parts, tuple(estimate_nodes(template.joint, hardware)))


def dying_inputs(parts: Parts) -> tuple[fx.Node, ...]:
    """Return the placeholders of the backward that are freed at their last use in it.

    They are the saved values, and the tangents that autograd does not hold.
    """
    assert parts.backward is not None
    placeholders = parts.backward.graph.find_nodes(op="placeholder")
    held = [Ref("tangent", index) for index in parts.held_tangents]
    refs = zip(placeholders, parts.backward_inputs, strict=True)
    return tuple(node for node, ref in refs if ref.kind != "input" and ref not in held)


def matmul_tflops(hardware: HardwareProfile, dtype: torch.dtype) -> float:
    """Return the rate of matrix products of ``dtype``; of one that was not measured, told from one that was."""
    name = str(dtype).removeprefix("torch.")
    known = hardware.matmul_tflops
    if name in known:
        return known[name]
    sixteen = next((known[each] for each in SIXTEEN_BITS if each in known), None)
    if name in SIXTEEN_BITS:
        return sixteen if sixteen is not None else max(known.values())
    if "float32" in known or sixteen is None:
        return known.get("float32", min(known.values()))
    return sixteen * WHOLE_RATE_SHARE


def kernel_ms(kernel: Kernel, hardware: HardwareProfile) -> float:
    """Return the time of one kernel (see the module docstring); of a row loop, that of its slices' kernels."""
    if kernel.parts:
        return kernel.repeats * sum(kernel_ms(part, hardware) for part in kernel.parts)
    rate = matmul_tflops(hardware, kernel.dtype) * (ATTENTION_SHARE if kernel.attention else 1.0)
    return max(kernel.flops / (rate * 1e9), kernel.moved_bytes / (hardware.device_gb_per_s * 1e6))


def _estimate_part(
    module: fx.GraphModule, hardware: HardwareProfile, mode: CompileMode, dying: tuple[fx.Node, ...]
) -> ArtefactCost:
    fused = mode == "inductor"
    kernels = kernels_of(module, fused=fused)
    ms = sum(kernel_ms(kernel, hardware) for kernel in kernels)
    return ArtefactCost(ms, workspace_bytes(module, fused=fused, dying=dying), launches_of(kernels))


def estimate_nodes(joint: fx.GraphModule, hardware: HardwareProfile) -> list[NodeCost]:
    """Return the cost of every call in a joint graph, run node by node."""
    ms = {kernel.nodes[0]: kernel_ms(kernel, hardware) for kernel in kernels_of(joint, fused=False)}
    return [
        NodeCost(node.name, op_name(node), ms.get(node, 0.0), change, inside)
        for node, change, inside in node_changes(joint)
    ]
