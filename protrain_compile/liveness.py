"""Liveness: which bytes are alive at every operation of a schedule graph.

A value is born when the call that makes it returns and dies inside the call that uses it last (calls are boxed).
Tensors that share storage count once. Counted are graph inputs, values between calls, and what leaves the graph; not
counted is what a call allocates and frees inside (its workspace), which only a profile knows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.program import results_of
from protrain_compile.schedule import Schedule, operation_of
from protrain_compile.sizes import storage_bytes, storage_key


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Bytes alive in one schedule graph.

    Attributes:
        held_bytes: Graph inputs that the caller holds throughout (parameters, buffers, the batch).
        live_bytes: For every operation, bytes alive right after it, ``held_bytes`` included.
        end_bytes: Bytes alive at the end: ``held_bytes`` and what the graph returns.
        peak_bytes: The most that is alive at once, while a call still holds its inputs and already has its results.
        peak_at: The operation in which that is; None if nothing exceeds what is alive at entry.
    """

    held_bytes: int
    live_bytes: dict[fx.Node, int]
    end_bytes: int
    peak_bytes: int
    peak_at: fx.Node | None


Storage = tuple[Hashable, int]
"""Names one storage (the call or graph that it belongs to, and its number there) in one schedule."""

StoragesOf = dict[fx.Node, list[tuple[Storage, int]]]
"""The storages behind each value, with their bytes."""


def schedule_liveness(schedule: Schedule) -> dict[str, Liveness]:
    """Return the liveness of every graph of ``schedule``.

    A kept value is the same storage in forward and backward, and what the caller holds is held during both.
    """
    entry = list(schedule.entry.graph.nodes)
    made = storages_of(entry, {})
    held = dict(pair for node in entry if node.op in ("placeholder", "get_attr") for pair in made.get(node, ()))
    found = {"forward" if schedule.program.differentiable else "inference": _liveness(entry, made, held)}
    if "backward" in schedule.graphs:
        given = {placeholder: made.get(source, []) for placeholder, source in kept_sources(schedule).items()}
        backward = list(schedule.graphs["backward"].graph.nodes)
        found["backward"] = _liveness(backward, storages_of(backward, given), held)
    return found


def saved_bytes(schedule: Schedule) -> dict[fx.Node, int]:
    """Return the bytes that each operation of the forward leaves for the backward, and no others keep alive."""
    if "backward" not in schedule.graphs:
        return {}
    made = storages_of(list(schedule.entry.graph.nodes), {})
    seen = {key for node in schedule.entry.graph.find_nodes(op="placeholder") for key, _ in made.get(node, ())}
    found: dict[fx.Node, int] = {}
    for source in kept_sources(schedule).values():
        if source.target is ops.swap_out:
            continue
        for key, size in made.get(source, ()):
            if key not in seen:
                seen.add(key)
                found[_maker(source)] = found.get(_maker(source), 0) + size
    return found


def kept_sources(schedule: Schedule) -> dict[fx.Node, fx.Node]:
    """Return, for each placeholder of the backward that is a kept value, the node of the forward graph that it is."""
    results = results_of(schedule.graphs["forward"])
    kept = results[len(results) - schedule.backward_inputs.num_kept :]
    placeholders = schedule.graphs["backward"].graph.find_nodes(op="placeholder")
    return dict(zip((node for node in placeholders if node.meta.get("kind") == "kept"), kept, strict=True))


def kept_aliases(schedule: Schedule) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Return, for each kept value, the positions of the forward's output and of its argument that share its memory."""
    nodes = list(schedule.graphs["forward"].graph.nodes)
    made = storages_of(nodes, {})
    results = results_of(schedule.graphs["forward"])
    split = len(results) - schedule.backward_inputs.num_kept

    def positions(values: Iterable[Any]) -> tuple[int | None, ...]:
        found = {key: i for i, value in enumerate(values) for key, _ in made.get(value, ())}
        return tuple(
            next((found[key] for key, _ in made.get(kept, ()) if key in found), None) for kept in results[split:]
        )

    return positions(results[:split]), positions(node for node in nodes if node.op == "placeholder")


def _liveness(nodes: list[fx.Node], storages: StoragesOf, held: dict[Storage, int]) -> Liveness:
    """Walk the graph; every storage that is not ``held`` is born at its maker and dies at its last use."""
    last = _last_uses(nodes)
    order = {node: i for i, node in enumerate(nodes)}
    births: dict[fx.Node, int] = collections.Counter()
    death_of: dict[Storage, tuple[fx.Node, int]] = {}
    for node in nodes:
        for key, size in storages.get(node, ()):
            if key in held:
                continue
            if key not in death_of:
                births[_maker(node)] += size
            end = last.get(node, _maker(node))
            if key not in death_of or order[end] > order[death_of[key][0]]:
                death_of[key] = (end, size)
    deaths: dict[fx.Node, int] = collections.Counter()
    for end, size in death_of.values():
        deaths[end] += size
    return _walk(nodes, births, deaths, sum(held.values()))


def _walk(nodes: list[fx.Node], births: dict[fx.Node, int], deaths: dict[fx.Node, int], held: int) -> Liveness:
    live = peak = held
    peak_at: fx.Node | None = None
    after: dict[fx.Node, int] = {}
    for node in nodes:
        live += births.get(node, 0)
        if live > peak:
            peak, peak_at = live, node if operation_of(node) is not None else None
        if node.op != "output":
            live -= deaths.get(node, 0)
        if operation_of(node) is not None:
            after[node] = live
    return Liveness(held, after, live, peak, peak_at)


def _maker(node: fx.Node) -> fx.Node:
    """Return the call that brings ``node`` to life: for an item of a result, that call; of reloaded values, reload."""
    if _is_reloaded(node):
        return node.args[0].args[1]  # type: ignore[union-attr, return-value]
    return node.args[0] if _is_item(node) else node  # type: ignore[return-value]


def _is_reloaded(node: fx.Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].target is ops.wait_reload


def _is_item(node: fx.Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], fx.Node) and isinstance(node.args[0].target, Artefact)


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the operation (or output) inside which each node's value dies; a pack stands for the call it feeds.

    Values on their way to the host die when they have left, those that pass through a staging buffer at once.
    """
    last: dict[fx.Node, fx.Node] = {}
    order = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        is_pack = node.target is ops.pack
        use = next(iter(node.users)) if is_pack else node
        for position, source in enumerate(node.args if is_pack else node.all_input_nodes):
            if isinstance(source, fx.Node):
                end = _release_of(use) if is_pack and _leaves_directly(use, position) else use
                last[source] = max(last.get(source, end), end, key=order.__getitem__)
    return last | {node: _release_of(node) for node in nodes if node.target is ops.swap_out}


def _leaves_directly(node: fx.Node, position: int) -> bool:
    if node.target is not ops.swap_out:
        return False
    bundle = node.meta["layout"].values[position].bundle
    return bundle >= 0 and not node.meta["layout"].bundles[bundle].staged


def _release_of(swapped: fx.Node) -> fx.Node:
    return next(user for user in swapped.users if user.target is ops.release_swapped)


def _bundle_storages(node: fx.Node) -> list[tuple[Storage, int]]:
    """Return the memory that moving swapped values takes: staging on the way out, everything on the way back."""
    return [
        ((node, number), bundle.size_bytes)
        for number, bundle in enumerate(node.meta["layout"].bundles)
        if node.target is ops.reload or bundle.staged
    ]


def storages_of(nodes: list[fx.Node], given: StoragesOf) -> StoragesOf:
    """Return, for every value, the storages behind it. An item that views an argument of its call has that one's.

    Equal blocks share the fake values of their template, so a storage is named by the call that makes it, too.
    """
    found: StoragesOf = {}
    for node in nodes:
        if node.target in (ops.swap_out, ops.reload):
            found[node] = _bundle_storages(node)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if node in given:
            found[node] = given[node]
            continue
        if _is_reloaded(node):
            found[node] = _reloaded_storages(node)
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


def _reloaded_storages(item: fx.Node) -> list[tuple[Storage, int]]:
    waited: fx.Node = item.args[0]  # type: ignore[assignment]
    bundle = waited.meta["layout"].values[item.args[1]].bundle
    reload: fx.Node = waited.args[1]  # type: ignore[assignment]
    return _bundle_storages(reload)[bundle : bundle + 1] if bundle >= 0 else []


def _argument_storages(call: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    handle: Any = call.target
    packed: fx.Node = call.args[0]  # type: ignore[assignment]
    for parameter, argument in zip(handle.graph.graph.find_nodes(op="placeholder"), packed.args, strict=True):
        value = parameter.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(argument, fx.Node):
            yield storage_key(value), argument
