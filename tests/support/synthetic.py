"""Random programs and schedules without tracing, and what eager would compute for them, on symbols.

A synthetic program has what the schedule passes read of a real one: segments with inputs, outputs and gradients,
templates with parts, parameters in chunks. Its blocks differ in the number and size of parameters, in which are frozen,
shared with earlier blocks, needed by the backward or by the recompute, and in how many values they save::

    synthetic = draw(seed)
    schedule = synthetic.schedule()
    expected = Eager(synthetic, schedule).follow(tour)
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from support.capture import Graph
from torch import fx

from passes import schedule_pipeline
from passes.pack_chunks import pack_chunks
from passes.tours import Tour, Visit, rotated, trained_chunks
from protrain_compile import Plan
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.chunks import RESIDENCIES, ChunkBinding, ChunkLayout, ParameterSpec
from protrain_compile.program import GraphInput, InputKind, Parts, Program, Recompute, Ref, Segment, Stage, Template
from protrain_compile.schedule import Schedule
from protrain_compile.shards import Sharding, allowed_sharding

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One block: its parameters by number, and which of them its recompute and backward read."""

    parameters: tuple[int, ...]
    recompute_reads: tuple[int, ...]
    backward_reads: tuple[int, ...]
    saved: int
    reads_buffer: bool


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """A program, and a plan for it."""

    sizes: tuple[int, ...]
    trainable: tuple[bool, ...]
    blocks: tuple[BlockSpec, ...]
    policies: tuple[str, ...]
    residency: tuple[str, ...]
    buffers: int
    layout: ChunkLayout

    def schedule(self, *, train: bool = True, sharding: Sharding | None = None) -> Schedule:
        """Return the schedule that the passes write, for training or inference; the verifier runs after each.

        With ``sharding``, ranks share the chunks, each as far so as its residency allows.

        Raises:
            PlanError: If one call uses more chunks than there are buffers.
        """
        program = _Builder(self).program(train=train)
        chunks = ChunkBinding(
            self.layout,
            self.residency,  # type: ignore[arg-type]
            self.buffers,
            dict(enumerate(self.layout.place_of)),
        )
        if sharding is not None:
            divided = tuple(allowed_sharding(each, sharding) for each in self.residency)
            chunks = dataclasses.replace(chunks, ranks=4, sharding=divided)
        plan = Plan(policies=self.policies).fit(program.block_names)  # type: ignore[arg-type]
        schedule = Schedule(program, plan, ArtefactSet("eager"), chunks=chunks)
        schedule_pipeline().run(schedule)
        return schedule


def draw(seed: int) -> Synthetic:
    """Return the random program of a seed."""
    at = random.Random(seed)
    sizes: list[int] = []
    trainable: list[bool] = []
    blocks = []
    frozen = at.choice((0.0, 0.0, 0.3, 0.8))
    for _ in range(at.randint(1, 7)):
        shared = [at.randrange(len(sizes))] if sizes and at.random() < 0.2 else []
        new = list(range(len(sizes), len(sizes) + at.randint(0 if shared else 1, 4)))
        sizes += [at.choice((1, 7, 64, 65, 200, 500)) for _ in new]
        trainable += [at.random() >= frozen for _ in new]
        used = tuple(at.sample(shared + new, len(shared + new)))
        some = [tuple(i for i in used if at.random() < 0.7) for _ in range(2)]
        blocks.append(BlockSpec(used, *some, saved=at.randint(1, 3), reads_buffer=at.random() < 0.3))
    trainable[0] = True
    layout = _layout(sizes, trainable, blocks, at.choice((None, 512, 1024, 2048)))
    residency = tuple(at.choice(RESIDENCIES) for _ in layout.chunks)
    policies = tuple(at.choice(("keep", "recompute", "swap", "swap_products")) for _ in blocks)
    return Synthetic(tuple(sizes), tuple(trainable), tuple(blocks), policies, residency, at.randint(3, 6), layout)


def _layout(
    sizes: Sequence[int], trainable: Sequence[bool], blocks: Sequence[BlockSpec], chunk_bytes: int | None
) -> ChunkLayout:
    specs = [
        ParameterSpec(f"w{i}", (size,), torch.float32, learns)
        for i, (size, learns) in enumerate(zip(sizes, trainable, strict=True))
    ]
    return pack_chunks(specs, [block.parameters for block in blocks], chunk_bytes)


class _Builder:
    """Writes the program: a captured graph of stand-in nodes, a segment for each block, templates for equal ones."""

    def __init__(self, synthetic: Synthetic) -> None:
        self.synthetic = synthetic
        self.graph = Graph()
        self.weights = [self.graph.input(f"w{i}", size) for i, size in enumerate(synthetic.sizes)]
        self.buffer = self.graph.input("buffer", 4)
        self.batch = self.graph.input("batch", 4)
        self.tangent = self.graph.input("tangents_1", 4)
        self.templates: dict[Any, Template] = {}
        self.gradients: dict[int, fx.Node] = {}

    def program(self, *, train: bool) -> Program:
        values = [self.batch]
        values += [self._value(4) for _ in self.synthetic.blocks]
        arriving, segments = self.tangent, []
        for index in reversed(range(len(self.synthetic.blocks))):
            leaving = None if index == 0 else self._value(4)
            segments.append(self._segment(index, values[index], values[index + 1], arriving, leaving))
            arriving = leaving if leaving is not None else arriving
        segments.reverse()
        templates = list(self.templates.values())
        gradients = [*(self.gradients.get(i) for i in range(len(self.weights))), None, None]
        return Program(
            name="Synthetic",
            graph=self.graph.module(values[-1], *(gradients if train else ())),
            inputs=self._inputs(),
            num_outputs=1,
            differentiable=train,
            stages=tuple(segment.stage for segment, _ in segments),
            segments=tuple(segment for segment, _ in segments),
            templates=tuple(templates),
            template_of=tuple(templates.index(template) for _, template in segments),
        )

    def _inputs(self) -> tuple[GraphInput, ...]:
        weights = [
            GraphInput(f"w{i}", InputKind.PARAMETER, trainable=learns, managed=True, frozen=not learns)
            for i, learns in enumerate(self.synthetic.trainable)
        ]
        return (*weights, GraphInput("buffer", InputKind.BUFFER), GraphInput("batch", InputKind.INPUT))

    def _value(self, size: int) -> fx.Node:
        return self.graph.call(aten.relu.default, self.weights[0], meta={"val": self.graph.tensor(size)})

    def _segment(
        self, index: int, x: fx.Node, y: fx.Node, arriving: fx.Node, leaving: fx.Node | None
    ) -> tuple[Segment, Template]:
        block = self.synthetic.blocks[index]
        partial = [self.gradients[i] for i in block.parameters if i in self.gradients]
        template = self._template(block, len(partial), leaving is not None)
        learning = [i for i in block.parameters if self.synthetic.trainable[i]]
        self.gradients |= {i: self._value(self.synthetic.sizes[i]) for i in learning}
        gradients = [self.gradients[i] for i in learning]
        segment = Segment(
            stage=Stage("block", f"block {index}", f"blocks.{index}"),
            joint=template.joint,
            inputs=(x, *(self.weights[i] for i in block.parameters), *((self.buffer,) if block.reads_buffer else ())),
            tangents=(arriving, *partial),
            outputs=(y,),
            gradients=(*gradients, *((leaving,) if leaving is not None else ())),
            input_roles=template.input_roles,
        )
        return segment, template

    def _template(self, block: BlockSpec, partial: int, passes_on: bool) -> Template:
        sizes = [(self.synthetic.sizes[i], self.synthetic.trainable[i]) for i in block.parameters]
        reads = [tuple(block.parameters.index(i) for i in r) for r in (block.recompute_reads, block.backward_reads)]
        key = (tuple(sizes), *reads, block.saved, block.reads_buffer, partial, passes_on)
        if key not in self.templates:
            count = 1 + len(sizes) + block.reads_buffer
            results = sum(learns for _, learns in sizes) + passes_on
            parts = _parts(count, block.saved, *reads, partial, results)
            roles = ("value", *("parameter",) * len(sizes), *("buffer",) * block.reads_buffer)
            self.templates[key] = Template(f"t{len(self.templates)}", parts.forward, roles, 1, parts)
        return self.templates[key]


def _parts(
    inputs: int, saved: int, recompute: tuple[int, ...], backward: tuple[int, ...], partial: int, results: int
) -> Parts:
    again = (Ref("input", 0), *(Ref("input", 1 + i) for i in recompute))
    back = (
        *(Ref("input", 1 + i) for i in backward),
        *(Ref("saved", i) for i in range(saved)),
        *(Ref("tangent", i) for i in range(1 + partial)),
    )
    return Parts(
        forward=_part(inputs, 1 + saved),
        forward_inputs=tuple(range(inputs)),
        num_outputs=1,
        recomputes={"recompute": Recompute(_part(len(again), saved), again, tuple(range(saved)))},
        recompute_of={"recompute": "recompute", "swap_products": "recompute"},
        backward=_part(len(back), results),
        backward_inputs=back,
    )


@functools.cache
def _part(inputs: int, results: int) -> fx.GraphModule:
    """Return a graph that takes and returns so many values; what it computes is never run."""
    graph = Graph()
    given = [graph.input(f"primals_{i + 1}", 4) for i in range(inputs)]
    return graph.module(*(graph.call(aten.sin.default, given[0]) for _ in range(results)))


class Eager:
    """What a loop over the program computes without chunks, buffers or streams: one operation after the other."""

    def __init__(self, synthetic: Synthetic, schedule: Schedule) -> None:
        self.synthetic = synthetic
        self.schedule = schedule
        self.values = [hash(("initial", i)) for i in range(len(synthetic.sizes))]
        self.waiting: dict[int, int] = {}
        self.outputs: list[int] = []
        self.kept: dict[int, list[tuple[int, list[int]]]] = {}

    def follow(self, tour: Tour) -> tuple[list[int], list[int]]:
        """Return what the forwards of a tour return, and the parameters in the end."""
        for stop in tour.stops:
            if isinstance(stop, Visit):
                self._backward(stop) if stop.graph == "backward" else self._forward(stop.run)
            elif stop.kind == "step":
                self._step()
            elif stop.kind == "backward of others":
                self._backward_of_others(stop.first)
            elif stop.kind == "updates of others":
                self.values = [hash(("update", value, 0)) for value in self.values]
        return self.outputs, self.values

    def _template(self, index: int) -> Template:
        return self.schedule.program.templates[self.schedule.program.template_of[index]]

    def _inputs(self, index: int, run: int, x: int) -> list[int]:
        block = self.synthetic.blocks[index]
        buffer = [hash(("argument", run, "buffer"))] if block.reads_buffer else []
        return [x, *(self.values[i] for i in block.parameters), *buffer]

    def _forward(self, run: int) -> None:
        x, self.kept[run] = hash(("argument", len(self.kept), "batch")), []
        for index, block in enumerate(self.synthetic.blocks):
            made = _call(f"{self._template(index).name}_forward", self._inputs(index, run, x), 1 + block.saved)
            self.kept[run].append((x, made[1:]))
            x = made[0]
        self.outputs.append(x)

    def _backward(self, visit: Visit) -> None:
        gradient, total = hash(("argument", visit.run, "tangents_1")), {}
        for index in reversed(range(len(self.synthetic.blocks))):
            block, template = self.synthetic.blocks[index], self._template(index)
            assert template.parts is not None
            x, saved = self.kept[visit.run][index]
            inputs = self._inputs(index, visit.run, x)
            if self.synthetic.policies[index] in ("recompute", "swap_products"):
                given = [inputs[ref.index] for ref in template.parts.recomputes["recompute"].inputs]
                saved = _call(f"{template.name}_recompute", given, block.saved)
            tangents = [gradient, *(total[i] for i in block.parameters if i in total)]
            source = {"input": inputs, "saved": saved, "tangent": tangents}
            given = [source[ref.kind][ref.index] for ref in template.parts.backward_inputs]
            learning = [i for i in block.parameters if self.synthetic.trainable[i]]
            made = _call(f"{template.name}_backward", given, len(learning) + (index > 0))
            total |= dict(zip(learning, made, strict=False))
            gradient = made[-1] if made else gradient
        self._wait(total)
        if visit.mode == "in_backward":
            self._step()

    def _wait(self, gradients: dict[int, int]) -> None:
        for i, new in gradients.items():
            self.waiting[i] = hash(("sum", self.waiting[i], new)) if i in self.waiting else new

    def _step(self) -> None:
        for i, gradient in self.waiting.items():
            self.values[i] = hash(("update", self.values[i], gradient))
        self.waiting.clear()

    def _backward_of_others(self, first: int) -> None:
        assert self.schedule.chunks is not None
        trained = trained_chunks(self.schedule.chunks)
        for number in rotated(self.synthetic.buffers if trained else 0, first):
            chunk = trained[number % len(trained)]
            slots = self.synthetic.layout.chunks[chunk].slots
            made = _results(("gradients", number, chunk), [], len(slots))
            self._wait({slot.parameter: each for slot, each in zip(slots, made, strict=True)})


def _call(name: str, arguments: list[int], count: int) -> list[int]:
    return _results((name,), arguments, count)


def _results(how: tuple[Any, ...], arguments: list[int], count: int) -> list[int]:
    key = hash((how, *arguments))
    return [hash((key, index)) for index in range(count)]
