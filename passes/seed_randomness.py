"""Pass seed_randomness: make random draws functions of seeds that the prologue makes.

Before, inside block i::

    u = aten.rand(size)

After, with the seeds of the whole graph drawn once in the prologue::

    seeds = inductor_seeds(n)            # prologue
    s_i   = inductor_lookup_seed(seeds, i)   # prologue; one 0-d tensor, so that equal blocks stay equal
    u     = inductor_random(size, s_i, "rand")

A block can then be recomputed without keeping its dropout masks. This needs Inductor's random kernels; with
``compile="eager"`` (and with Inductor's ``fallback_random``) draws stay as they are and ``partition_templates`` has
their results saved.
"""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import torch
from torch import fx
from torch._inductor import inductor_prims

from protrain_compile.program import Program, fake_value

aten = torch.ops.aten

DRAW_MODES: dict[Any, str] = {aten.rand.default: "rand", aten.randn.default: "randn"}


class SeedRandomness:
    """Turn random draws into functions of seeds from the prologue."""

    name: ClassVar[str] = "seed_randomness"
    requires: ClassVar[frozenset[str]] = frozenset({"stages"})
    provides: ClassVar[frozenset[str]] = frozenset({"seeded"})

    def __init__(self, *, inductor_draws: bool) -> None:
        """Take whether Inductor's random kernels will run the graph."""
        self.inductor_draws = inductor_draws

    def run(self, program: Program) -> bool:
        """Rewrite the draws that Inductor can make from a seed."""
        by_device: dict[torch.device, list[fx.Node]] = collections.defaultdict(list)
        for node in program.graph.graph.nodes if self.inductor_draws else ():
            if _can_be_seeded(node):
                by_device[fake_value(node).device].append(node)
        for device, draws in by_device.items():
            _seed(program, device, draws)
        return bool(by_device)


def _can_be_seeded(node: fx.Node) -> bool:
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or node.kwargs.get("generator") is not None or node.kwargs.get("pin_memory"):
        return False
    return node.target in DRAW_MODES or node.target is aten.randint.low


def _seed(program: Program, device: torch.device, draws: list[fx.Node]) -> None:
    graph = program.graph.graph
    fake_mode = fake_value(draws[0]).fake_mode
    seeds = _insert(program, draws[0], inductor_prims.seeds, (len(draws), device))
    with fake_mode:
        seeds.meta["val"] = torch.empty([len(draws)], device=device, dtype=torch.int64)
    for index, draw in enumerate(draws):
        seed = _insert(program, draws[0], inductor_prims.lookup_seed, (seeds, index))
        with fake_mode:
            seed.meta["val"] = torch.empty([], device=device, dtype=torch.int64)
        replacement = _seeded_draw(program, draw, seed)
        draw.replace_all_uses_with(replacement)
        program.stage_of.pop(draw)
        program.backward_nodes.discard(draw)
        graph.erase_node(draw)


def _seeded_draw(program: Program, draw: fx.Node, seed: fx.Node) -> fx.Node:
    result = fake_value(draw)
    mode = DRAW_MODES.get(draw.target)
    if mode is None:
        low, high, size = draw.args
        made = _insert(program, draw, inductor_prims.randint, (low, high, size, seed), like=draw)
        natural = torch.int64
    else:
        made = _insert(program, draw, inductor_prims.random, (draw.args[0], seed, mode), like=draw)
        natural = torch.float32
    with result.fake_mode:
        made.meta["val"] = torch.empty(result.shape, device=result.device, dtype=natural)
    if result.dtype == natural:
        return made
    cast = _insert(program, draw, torch.ops.prims.convert_element_type.default, (made, result.dtype), like=draw)
    cast.meta["val"] = result
    return cast


def _insert(
    program: Program, before: fx.Node, target: Any, arguments: tuple[Any, ...], like: fx.Node | None = None
) -> fx.Node:
    """Insert a call before ``before``, in the stage of ``like`` (default: the prologue)."""
    with program.graph.graph.inserting_before(before):
        node = program.graph.graph.call_function(target, arguments)
    if like is not None:
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")}
    program.stage_of[node] = 0 if like is None else program.stage_of[like]
    if like is not None and like in program.backward_nodes:
        program.backward_nodes.add(node)
    return node
