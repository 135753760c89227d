"""The node profile: every ATen node of a template's joint graph, run one by one with random inputs.

Time is the median over a few runs of the graph. Memory is told in one more run (equations 2 and 3 of the ProTrain
paper): for each node the change of allocated memory, values freed at their last use, and the most allocated inside.
Inputs are held throughout. On a device whose memory nobody counts, it is told from the values' sizes.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.node_facts import op_name
from protrain_compile.profile import HardwareProfile, NodeCost
from protrain_compile.profiler.estimate import estimate_nodes
from protrain_compile.profiler.footprint import node_changes
from protrain_compile.profiler.inputs import make_inputs
from protrain_compile.profiler.meter import Meter, make_meter
from protrain_compile.profiler.templates import measuring, template_device
from protrain_compile.program import Template

log = logging.getLogger("protrain_compile.profiler")

TIMED_RUNS = 3

Around = Callable[[Callable[[], Any]], Any]
"""Runs a node by calling the function that it is given, and returns its result."""


def measure_nodes(template: Template, hardware: HardwareProfile) -> tuple[NodeCost, ...]:
    """Return the cost of every call in the joint graph of ``template``, on the device that it was captured for.

    A graph whose data does not fit on the device is estimated from ``hardware``, with a warning: run node by node it
    holds all that lies between forward and backward.
    """
    device = template_device(template)
    with measuring(device):
        try:
            return tuple(_measure(template.joint, make_meter(device)))
        except torch.OutOfMemoryError:
            log.warning("the nodes of %s do not fit on %s: they are estimated, not measured", template.name, device)
            return tuple(estimate_nodes(template.joint, hardware))


def _measure(joint: fx.GraphModule, meter: Meter) -> list[NodeCost]:
    inputs = make_inputs(joint.graph.find_nodes(op="placeholder"))
    _NodeByNode(joint, lambda call: call()).run(*inputs)  # loads kernels, and fills the allocator's cache
    runs = []
    for _ in range(TIMED_RUNS):
        watch = meter.stopwatch()
        _NodeByNode(joint, watch.lap).run(*inputs)
        runs.append(watch.laps_ms())
    memory = _memory(joint, inputs, meter) or [(change, inside) for _, change, inside in node_changes(joint)]
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    return [
        NodeCost(node.name, op_name(node), statistics.median(ms), *sizes)
        for node, ms, sizes in zip(calls, zip(*runs, strict=True), memory, strict=True)
    ]


def _memory(joint: fx.GraphModule, inputs: list[Any], meter: Meter) -> list[tuple[int, int]] | None:
    """Return for every call the change of allocated memory and the most inside; None if nobody counts it."""
    before: list[int] = []
    inside: list[int] = []

    def watch(call: Callable[[], Any]) -> Any:
        before.append(meter.allocated_bytes() or 0)
        result, peak_bytes = meter.peak_bytes(call)
        inside.append(peak_bytes or 0)
        return result

    if meter.allocated_bytes() is None:
        return None
    results = _NodeByNode(joint, watch).run(*inputs)
    before.append(meter.allocated_bytes() or 0)  # while the results live
    del results
    changes = [after - then for then, after in itertools.pairwise(before)]
    return [(change, max(change, peak)) for change, peak in zip(changes, inside, strict=True)]


class _NodeByNode(fx.Interpreter):
    """Runs a graph, each call through ``around``; a value is freed after its last use."""

    def __init__(self, module: fx.GraphModule, around: Around) -> None:
        super().__init__(module)
        self.around = around

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.op != "call_function":
            return super().run_node(n)
        return self.around(lambda: super(_NodeByNode, self).run_node(n))
