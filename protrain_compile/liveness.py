"""Liveness: which bytes are alive at every operation of a schedule graph.

A value is born when the call that makes it returns and dies inside the call that uses it last (calls are boxed).
Tensors that share storage count once. Counted are graph inputs, values between calls, and what leaves the graph; not
counted is what a call allocates and frees inside (its workspace), which only a profile knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx

from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.schedule import operation_of
from protrain_compile.sizes import storage_bytes, storage_key


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Bytes alive in one schedule graph.

    Attributes:
        held_bytes: Graph inputs that the caller holds throughout (parameters, buffers, the batch).
        live_bytes: For every operation, bytes alive right after it, ``held_bytes`` included.
        peak_bytes: The most that is alive at once, while a call still holds its inputs and already has its results.
    """

    held_bytes: int
    live_bytes: dict[fx.Node, int]
    peak_bytes: int


def liveness(module: fx.GraphModule) -> Liveness:
    """Return the liveness of one schedule graph."""
    nodes = list(module.graph.nodes)
    keys = _storage_keys(nodes)
    last = _last_uses(nodes)
    births: dict[fx.Node, list[tuple[Hashable, int]]] = {}
    deaths: dict[fx.Node, list[Hashable]] = {}
    death_of: dict[Hashable, fx.Node] = {}
    order = {node: i for i, node in enumerate(nodes)}
    sizes: dict[Hashable, int] = {}
    held = 0
    for node in nodes:
        for key, size in keys.get(node, ()):
            if node.op == "placeholder" and _is_held(node):
                if key not in sizes:
                    held += size
                sizes[key] = 0
            elif key not in sizes:
                sizes[key] = size
                births.setdefault(_maker(node), []).append((key, size))
            end = last.get(node, _maker(node))
            if key not in death_of or order[end] > order[death_of[key]]:
                death_of[key] = end
    for key, end in death_of.items():
        deaths.setdefault(end, []).append(key)
    return _walk(nodes, births, deaths, sizes, held)


def _walk(
    nodes: list[fx.Node],
    births: dict[fx.Node, list[tuple[Hashable, int]]],
    deaths: dict[fx.Node, list[Hashable]],
    sizes: dict[Hashable, int],
    held: int,
) -> Liveness:
    live = peak = held
    after: dict[fx.Node, int] = {}
    for node in nodes:
        live += sum(size for _, size in births.get(node, ()))
        peak = max(peak, live)
        if node.op != "output":
            live -= sum(sizes[key] for key in deaths.get(node, ()))
        if operation_of(node) is not None:
            after[node] = live
    return Liveness(held, after, peak)


def _maker(node: fx.Node) -> fx.Node:
    """Return the call whose return brings ``node`` to life: for an item of a result, that call."""
    return node.args[0] if _is_item(node) else node  # type: ignore[return-value]


def _is_item(node: fx.Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], fx.Node) and isinstance(node.args[0].target, Artefact)


def _is_held(node: fx.Node) -> bool:
    return node.meta.get("input") is not None


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the operation (or output) inside which each node's value dies; a pack stands for the call it feeds."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        end = next(iter(node.users)) if node.target is ops.pack else node
        for source in node.all_input_nodes:
            last[source] = end
    return last


def _storage_keys(nodes: list[fx.Node]) -> dict[fx.Node, list[tuple[Hashable, int]]]:
    """Return, for every value, the storages behind it. An item that views an argument of its call has that one's."""
    found: dict[fx.Node, list[tuple[Hashable, int]]] = {}
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if _is_item(node):
            call: fx.Node = node.args[0]  # type: ignore[assignment]
            source = dict(_argument_storages(call)).get(storage_key(value))
            if source is not None and source in found:
                found[node] = found[source]
                continue
            found[node] = [((call, storage_key(value)), storage_bytes(value))]
        else:
            found[node] = [((node.op == "placeholder" and "graph", storage_key(value)), storage_bytes(value))]
    return found


def _argument_storages(call: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    handle: Any = call.target
    packed: fx.Node = call.args[0]  # type: ignore[assignment]
    for parameter, argument in zip(handle.graph.graph.find_nodes(op="placeholder"), packed.args, strict=True):
        value = parameter.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(argument, fx.Node):
            yield storage_key(value), argument
