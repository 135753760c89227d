"""Make a StepShape from a Program and its chunks.

The reader follows the passes ``apply_policies``, ``move_chunks`` and ``insert_updates`` under all policies at once,
with one record per storage instead of graph nodes. As in ``liveness``, tensors that share memory are one storage, which
lives as long as any of them, and a result that views an argument has the argument's storage.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import fx

from passes.apply_policies import SavedValue
from passes.node_facts import is_effectful
from protrain_compile.chunks import Chunk, ChunkLayout
from protrain_compile.plan import Loss
from protrain_compile.profile import Format
from protrain_compile.program import InputKind, Parts, Program, Recompute, Ref, Segment, fake_value, results_of
from protrain_compile.roles import RecomputeRole, Role
from protrain_compile.shards import ALONE, World
from protrain_compile.sizes import storage_bytes, storage_key
from protrain_compile.step_shape import (
    Birth,
    CallShape,
    ChunkShape,
    Life,
    SegmentShape,
    StepShape,
    UpdateMode,
    Use,
    block_rounded,
    segment_rounded,
)
from protrain_compile.swap_layout import SwapLayout, lay_out
from protrain_compile.updates.formats import StateFormat

Key = fx.Node | SavedValue
CallsOf = list[dict[Role, CallShape]]
Swap = Literal["swap", "swap_products"]


@dataclasses.dataclass(frozen=True)
class Training:
    """How a prepared model trains, as far as planning needs to know.

    Attributes:
        layout: Its chunks.
        place_of: Chunk and slot of the program's managed inputs, by position.
        moments: Per chunk, how many fp32 moments its update keeps.
        update_mode: When chunks are updated, from the second step on.
        landings: Landing slots for gradients; 0 for one to each chunk.
        clips: Whether ``step()`` waits for the gradient's norm.
        gradient_dtype: In what gradients add up; None for the chunk's own type.
        micro_batches: How many backwards make a step; gradients of several add up on the host.
        world: The ranks that train it.
    """

    layout: ChunkLayout
    place_of: Mapping[int, tuple[int, int]]
    moments: tuple[int, ...]
    update_mode: UpdateMode = "in_backward"
    landings: int = 4
    clips: bool = False
    gradient_dtype: torch.dtype | None = None
    micro_batches: int = 1
    world: World = ALONE


def step_shape(program: Program, training: Training | None = None, loss: Loss = "whole") -> StepShape:
    """Return the shape of one step of ``program``; ``training`` is None for a model that is not prepared."""
    reader = _Reader(program, training, loss)
    reader.read()
    blocks = iter(range(len(program.segments)))
    segments = tuple(
        SegmentShape(
            s.stage.name,
            next(blocks) if s.stage.kind == "block" else -1,
            program.template_index(i, loss),
            calls,
            reader.recompute_of(i),
        )
        for i, (s, calls) in enumerate(zip(program.segments, reader.calls, strict=True))
    )
    shape = StepShape(
        name=program.name,
        block_names=program.block_names,
        segments=segments,
        chunks=() if training is None else tuple(_chunks(training, reader)),
        lives=_grouped(reader.storages),
        held_bytes=reader.held_bytes,
        differentiable=program.differentiable,
    )
    if training is None:
        return shape
    mode, landings, clips = training.update_mode, training.landings, training.clips
    shape = dataclasses.replace(shape, update_mode=mode, landings=landings, clips=clips)
    return dataclasses.replace(shape, micro_batches=training.micro_batches, world=training.world)


@dataclasses.dataclass(eq=False)
class _Storage:
    """One storage, while its uses are found."""

    birth: Birth
    segment: int
    size_bytes: int
    forward_until: int = -1
    uses: dict[int, Use] = dataclasses.field(default_factory=dict)
    collects: set[int] = dataclasses.field(default_factory=set)
    returned: bool = False
    views: dict[Swap, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Whether it outlives the call that makes it."""
        return self.forward_until >= 0 or bool(self.uses or self.collects) or self.returned

    def use(self, segment: int, by: Role | None, role: Role) -> None:
        """Note that ``role`` of a segment takes it while the segment is recomputed ``by`` a call, or kept (None)."""
        changed: dict[str, Any] = {by or "kept": role}
        self.uses[segment] = dataclasses.replace(self.uses.get(segment, Use(segment)), **changed)

    def life(self) -> Life:
        """Return the storage as plain data, of no size."""
        uses = tuple(self.uses[segment] for segment in sorted(self.uses))
        collects = tuple(sorted(self.collects))
        life = Life(self.birth, self.segment, self.forward_until, uses, collects, self.returned, 0, 0, 0)
        return dataclasses.replace(life, staged=self._staged("swap"), products_staged=self._staged("swap_products"))

    def swapped_bytes(self, policy: Swap) -> int:
        """Return what crosses the link where ``policy`` swaps it."""
        return self._layout(policy).moved_bytes

    def _staged(self, policy: Swap) -> bool:
        return bool(self.views.get(policy)) and all(bundle.staged for bundle in self._layout(policy).bundles)

    def _layout(self, policy: Swap) -> SwapLayout:
        views = self.views.get(policy, [])
        return lay_out(views, [0] * len(views))


def _grouped(storages: Iterable[_Storage]) -> tuple[Life, ...]:
    """Return storages of one life together; a snapshot is an operation of its own, and so stays apart."""
    sizes: dict[tuple[Life, int], list[int]] = collections.defaultdict(list)
    moved: dict[Swap, dict[tuple[Life, int], int]]
    moved = {policy: collections.defaultdict(int) for policy in get_args(Swap)}
    for number, storage in enumerate(storages):
        if storage.lives:
            key = storage.life(), number if storage.birth == "snapshot" else -1
            sizes[key].append(storage.size_bytes)
            for policy, found in moved.items():
                found[key] += storage.swapped_bytes(policy)
    return tuple(
        dataclasses.replace(
            life,
            size_bytes=sum(each),
            block_bytes=sum(map(block_rounded, each)),
            segment_bytes=sum(map(segment_rounded, each)),
            swapped_bytes=moved["swap"][life, number],
            products_bytes=moved["swap_products"][life, number],
        )
        for (life, number), each in sizes.items()
    )


Result = tuple[int, int, int | None]
"""What a call returns at one position: a storage (by a number of its own), its bytes, and the argument it views."""


class _Reader:
    def __init__(self, program: Program, training: Training | None, loss: Loss) -> None:
        self.program = program
        self.device = program.device
        self.loss = loss
        self.place_of = dict(training.place_of) if training is not None else {}
        self.storages: list[_Storage] = []
        self.of: dict[Key, _Storage] = {}
        self.made_at: dict[Key, tuple[int, int]] = {}
        self.calls: CallsOf = [{} for _ in program.segments]
        self.held = _Storage("snapshot", 0, 0)  # stands for every storage that the caller holds
        self.held_bytes: dict[str, int] = {}
        self.last_gradients: dict[int, tuple[int, int]] = {}
        self._position = {node: i for i, node in enumerate(program.primals)}
        self._results: dict[fx.GraphModule, list[Result | None]] = {}

    def read(self) -> None:
        """Follow one step."""
        self._hold()
        for index, segment in enumerate(self.program.segments):
            self._forward(index, segment)
        for node in self.program.results[: self.program.num_outputs]:
            if node in self.of:
                self.of[node].forward_until = len(self.program.segments)
                self.of[node].returned = self.program.differentiable and fake_value(node).dim() > 0
        if self.program.differentiable:
            self._backward()

    def _hold(self) -> None:
        """Note what the caller holds: everything but managed parameters, which live in chunks."""
        sizes: dict[str, dict[int, int]] = collections.defaultdict(dict)
        kinds = {InputKind.PARAMETER: "parameters", InputKind.BUFFER: "buffers"}
        for position, (node, source) in enumerate(zip(self.program.primals, self.program.inputs, strict=True)):
            value = fake_value(node)
            if position not in self.place_of and isinstance(value, torch.Tensor):
                self.of[node] = self.held
                sizes[kinds.get(source.kind, "inputs")][storage_key(value)] = storage_bytes(value)
        self.held_bytes = {kind: sum(map(block_rounded, found.values())) for kind, found in sizes.items()}

    def _new(self, birth: Birth, segment: int, size_bytes: int) -> _Storage:
        self.storages.append(_Storage(birth, segment, size_bytes))
        return self.storages[-1]

    def _parts(self, index: int) -> Parts:
        parts = self.program.templates[self.program.template_index(index, self.loss)].parts
        assert parts is not None
        return parts

    def recompute_of(self, index: int) -> Mapping[str, RecomputeRole]:
        """Return by which call each policy recomputes a segment; of what is no block: nothing."""
        is_block = self.program.segments[index].stage.kind == "block"
        return self._parts(index).recompute_of if is_block else {}

    # ---- forward -------------------------------------------------------------------------------------------------

    def _forward(self, index: int, segment: Segment) -> None:
        parts = self._parts(index)
        arguments: list[Key] = [segment.inputs[i] for i in parts.forward_inputs]
        saved = range(len(results_of(parts.forward)) - parts.num_outputs)
        results: list[Key] = [*segment.outputs, *(SavedValue(index, j) for j in saved)]
        if not results and not any(is_effectful(node) for node in parts.forward.graph.nodes):
            return
        for storage in self._known(arguments):
            storage.forward_until = max(storage.forward_until, index)
        self._call(index, "forward", parts.forward, arguments, results, self.of)

    def _known(self, keys: Iterable[Key]) -> Iterator[_Storage]:
        return (self.of[key] for key in keys if key in self.of)

    def _call(
        self,
        index: int,
        role: Role,
        graph: fx.GraphModule,
        arguments: Sequence[Key],
        results: Sequence[Key | None],
        of: dict[Key, _Storage],
    ) -> None:
        """Note a call and the storages of its results, which ``of`` then has."""
        returned = {number: size for number, size, viewed in filter(None, self._returns(graph)) if viewed is None}
        chunks = [self.place_of[i][0] for i in map(self._position_of, arguments) if i in self.place_of]
        size = sum(map(block_rounded, returned.values()))
        self.calls[index][role] = CallShape(tuple(dict.fromkeys(chunks)), size)
        made: dict[int, _Storage] = {}
        for item, (key, result) in enumerate(zip(results, self._returns(graph), strict=True)):
            if key is None or key in of:
                continue
            self.made_at[key] = (index, item)
            if result is None:
                continue
            number, size, viewed = result
            if viewed is not None and arguments[viewed] in of:
                of[key] = of[arguments[viewed]]
                continue
            if number not in made:
                made[number] = self._new(role, index, size)
            of[key] = made[number]

    def _position_of(self, key: Key) -> int:
        return self._position.get(key, -1) if isinstance(key, fx.Node) else -1

    def _returns(self, graph: fx.GraphModule) -> list[Result | None]:
        """Return what a part returns, position by position; None for what is no tensor."""
        if graph not in self._results:
            values = [fake_value(node) for node in graph.graph.find_nodes(op="placeholder")]
            views = {storage_key(value): i for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
            self._results[graph] = [_result(each, views) for each in results_of(graph)]
        return self._results[graph]

    # ---- backward ------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        program = self.program
        for position, node in enumerate(program.tangents):
            value = fake_value(node)
            if isinstance(value, torch.Tensor) and position not in program.absent_tangents:
                self.of[node] = self._new("tangent", len(program.segments) - 1, storage_bytes(value))
                self.of[node].returned = True  # autograd's engine holds it until the backward is over
        self._snapshot()
        for index in reversed(range(len(program.segments))):
            if self._parts(index).backward is not None:
                self._segment(index, program.segments[index])
        for position, node in enumerate(program.results[program.num_outputs :]):
            self._gradient(position, node)

    def _snapshot(self) -> None:
        """Give inputs that change a copy where the backward needs the old value."""
        for index, segment in enumerate(self.program.segments):
            parts = self._parts(index)
            taken = [again.inputs for again in parts.recomputes.values()]
            for ref in itertools.chain(*taken, parts.backward_inputs):
                key = segment.inputs[ref.index] if ref.kind == "input" else None
                position = self._position_of(key) if key is not None else -1
                if key is None or position < 0 or self.of.get(key) is not self.held:
                    continue
                if self.program.inputs[position].mutated:
                    self.of[key] = self._new("snapshot", 0, storage_bytes(fake_value(key)))

    def _segment(self, index: int, segment: Segment) -> None:
        parts = self._parts(index)
        assert parts.backward is not None

        def keys(refs: Sequence[Ref]) -> list[Key]:
            source = {"input": segment.inputs, "tangent": segment.tangents}
            return [SavedValue(index, r.index) if r.kind == "saved" else source[r.kind][r.index] for r in refs]

        arguments = keys(parts.backward_inputs)
        made: dict[RecomputeRole | None, dict[Key, _Storage]] = {None: {}}
        if segment.stage.kind == "block":
            for role, again in parts.recomputes.items():
                made[role] = self._recompute(index, role, again, keys(again.inputs))
        for key in arguments:
            for by, results in made.items():
                storage = results.get(key, self.of.get(key))
                if storage is not None:
                    storage.use(index, by, "backward")
            self._view(key, "swap")
        if "swap_products" in parts.recompute_of:
            again = parts.recomputes[parts.recompute_of["swap_products"]]
            made_again = {SavedValue(index, j) for j in again.results}
            for key in [*keys(again.inputs), *(each for each in arguments if each not in made_again)]:
                self._view(key, "swap_products")
        self._call(index, "backward", parts.backward, arguments, segment.gradients, self.of)

    def _view(self, key: Key, policy: Swap) -> None:
        """Note that ``key``, a view of its storage, is what ``policy`` leaves for the backward."""
        storage = self.of.get(key)
        if isinstance(key, SavedValue):
            parts = self._parts(key.segment)
            value = fake_value(results_of(parts.forward)[parts.num_outputs + key.index])
        else:
            value = fake_value(key)
        if storage is not None and isinstance(value, torch.Tensor) and value.device == self.device:
            storage.views.setdefault(policy, []).append(value)

    def _recompute(
        self, index: int, role: RecomputeRole, again: Recompute, arguments: list[Key]
    ) -> dict[Key, _Storage]:
        """Note a recompute; return the storages of what it returns."""
        for storage in self._known(arguments):
            storage.use(index, role, role)
        results: list[Key] = [SavedValue(index, j) for j in again.results]
        of = {key: self.of[key] for key in arguments if key in self.of}
        self._call(index, role, again.graph, arguments, results, of)
        return {key: of[key] for key in results if key in of}

    def _gradient(self, position: int, node: Any) -> None:
        """Note where a gradient of an input goes."""
        if not isinstance(node, fx.Node):
            return
        storage = self.of.get(node)
        if position not in self.place_of:
            if storage is not None:
                storage.returned = True
            return
        chunk, _ = self.place_of[position]
        if storage is not None:
            storage.collects.add(chunk)
        # The backward runs from the last segment to the first, and returns its results in order.
        made = self.made_at.get(node, (len(self.program.segments), 0))
        before = self.last_gradients.get(chunk, made)
        self.last_gradients[chunk] = max(made, before, key=lambda at: (-at[0], at[1]))


def _result(node: Any, views: Mapping[int, int]) -> Result | None:
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return storage_key(value), storage_bytes(value), views.get(storage_key(value))


def _chunks(training: Training, reader: _Reader) -> Iterator[ChunkShape]:
    order = {chunk: number for number, chunk in enumerate(reader.last_gradients)}
    for chunk, moments in zip(training.layout.chunks, training.moments, strict=True):
        plain = ChunkShape(chunk.size_bytes, chunk.numel, chunk.trainable, _format(chunk))
        if not chunk.trainable:
            yield plain
            continue
        companion = StateFormat.of(chunk.dtype).companion_dtype
        gradient = (training.gradient_dtype or chunk.dtype).itemsize
        segment, item = reader.last_gradients.get(chunk.index, (-1, 0))
        yield dataclasses.replace(
            plain,
            companion_bytes=chunk.numel * (companion.itemsize if companion is not None else 0),
            moment_bytes=chunk.numel * 4 * moments,
            gradient_bytes=chunk.numel * gradient,
            accumulator_bytes=chunk.numel * gradient if training.landings else 0,
            last_gradient=segment,
            last_item=item,
            order=order.get(chunk.index, -1),
        )


def _format(chunk: Chunk) -> Format:
    try:
        return StateFormat.of(chunk.dtype).name.lower()  # type: ignore[return-value]
    except ValueError:
        return "fp32"  # a frozen chunk of another type, which is never updated
