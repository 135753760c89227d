"""Repeating a block: the Program of a deep model from that of a shallow one, since equal blocks share a template.

A shallow model has blocks 0, 1, 2 and 3. How block 3 is wired to block 2 must be how block 2 is wired to block 1; then
copies of block 2 are put between them, wired alike::

    0 - 1 - 2 - 3          forward outputs go to the next block, gradients to the one before
    0 - 1 - 2 - c - c - 3  a copy has parameters of its own, and shares what 2 and 3 share

Only what planning reads is repeated: inputs, results and segments. The graph between them stays that of the shallow
model, so the Program can be planned and not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from protrain_compile import compat
from protrain_compile.chunks import ParameterSpec
from protrain_compile.commands.trace import TracedModel
from protrain_compile.program import GraphInput, Program, Segment, Stage, fake_value
from protrain_compile.update_book import UpdateBook

SHALLOW = 4
"""Blocks of the shallow model: the first and the last may have other neighbours than those between."""


class NotRepeatableError(Exception):
    """The blocks are not wired alike: only a trace of the whole model tells."""


def deepen(traced: TracedModel, specs: Sequence[ParameterSpec], book: UpdateBook, depth: int) -> TracedModel:
    """Return the traced model with ``depth`` blocks; ``traced``, which has ``SHALLOW``, is used up.

    Args:
        traced: The shallow model.
        specs: All parameters of the deep model.
        book: Their updates.
        depth: How many blocks, at least ``SHALLOW``.

    Raises:
        NotRepeatableError: If the blocks are not wired alike.
    """
    wiring = _wiring(traced.program)
    return _Copies(traced, wiring, depth).deepened(tuple(specs), book)


@dataclasses.dataclass(frozen=True)
class _Wiring:
    """How block 2 (``source``) is connected.

    Attributes:
        first: Position of block 2 among the segments; 1 and 3 are its neighbours.
        source: Block 2.
        after: Block 3.
        from_before: For each of its inputs that block 1 makes, the position among block 1's outputs.
        from_after: For each of its tangents that block 3 makes, the position among block 3's gradients.
        own: Its inputs that block 3 has others of (parameters), by the input that they are of block 3.
    """

    first: int
    source: Segment
    after: Segment
    from_before: Mapping[int, int]
    from_after: Mapping[int, int]
    own: Mapping[fx.Node, fx.Node]


def _wiring(program: Program) -> _Wiring:
    blocks = [i for i, segment in enumerate(program.segments) if segment.stage.kind == "block"]
    if len(blocks) != SHALLOW or blocks[-1] - blocks[0] != SHALLOW - 1:
        raise NotRepeatableError
    if len({program.template_of[i] for i in blocks[1:]}) > 1:
        raise NotRepeatableError
    before, source, after = (program.segments[i] for i in blocks[1:])
    from_before: dict[int, int] = {}
    from_after: dict[int, int] = {}
    own: dict[fx.Node, fx.Node] = {}
    for i, (ours, theirs) in enumerate(zip(source.inputs, after.inputs, strict=True)):
        if theirs in source.outputs:
            from_before[i] = _same_place(before.outputs, ours, source.outputs, theirs)
        elif ours is not theirs:
            own[ours] = theirs
    for i, (ours, theirs) in enumerate(zip(source.tangents, before.tangents, strict=True)):
        if theirs in source.gradients:
            from_after[i] = _same_place(after.gradients, ours, source.gradients, theirs)
        elif ours is not theirs:
            raise NotRepeatableError
    found = _Wiring(blocks[2], source, after, from_before, from_after, own)
    _check_uses(program, found, before)
    return found


def _same_place(mine: Sequence[fx.Node], node: fx.Node, others: Sequence[fx.Node], other: fx.Node) -> int:
    place = others.index(other)
    if mine[place] is not node:
        raise NotRepeatableError
    return place


def _check_uses(program: Program, wiring: _Wiring, before: Segment) -> None:
    """Refuse a block whose values others than its neighbours take, or that changes an input of its own."""
    position_of = {node: i for i, node in enumerate(program.primals)}
    own = {position_of.get(node) for node in wiring.own}
    others = [each for each in program.segments if each is not wiring.after]
    taken = {node for each in others for node in each.inputs} | set(program.results[: program.num_outputs])
    tangents = {node for each in program.segments if each is not before for node in each.tangents}
    returned = {node for i, node in enumerate(program.results[program.num_outputs :]) if i not in own}
    if None in own or any(i is not None and program.inputs[i].mutated for i in own):
        raise NotRepeatableError
    if taken & set(wiring.source.outputs) or (returned | tangents) & set(wiring.source.gradients):
        raise NotRepeatableError


@dataclasses.dataclass(frozen=True)
class _Primal:
    """One input of the graph: its node, what it is, its parameter's name, and its gradient."""

    node: fx.Node
    info: GraphInput
    parameter: str | None
    gradient: Any


class _Copies:
    def __init__(self, traced: TracedModel, wiring: _Wiring, depth: int) -> None:
        self.program = traced.program
        self.unfused = traced.unfused
        self.graph = traced.program.graph.graph
        self.wiring = wiring
        self.depth = depth
        names = {i: traced.specs[index].name for i, index in traced.places.items()}
        gradients = self.program.results[self.program.num_outputs :]
        parts = zip(self.program.primals, self.program.inputs, gradients, strict=True)
        self.primals = [_Primal(node, info, names.get(i), each) for i, (node, info, each) in enumerate(parts)]
        self.next_of = {ours: self._primal(theirs) for ours, theirs in wiring.own.items()}

    def _primal(self, node: fx.Node) -> _Primal:
        return next(each for each in self.primals if each.node is node)

    def deepened(self, specs: tuple[ParameterSpec, ...], book: UpdateBook) -> TracedModel:
        """Return the deep model, whose parameters are ``specs`` and are updated by ``book``."""
        program, first, outputs = self.program, self.wiring.first, self.program.results[: self.program.num_outputs]
        own = [primal for primal in self.primals if primal.node in self.wiring.own]
        at = self.primals.index(own[-1]) + 1 if own else len(self.primals)
        copies = [self._copy(number, own, at) for number in range(SHALLOW - 1, self.depth - 1)]
        chain = self._chained([self.wiring.source, *copies, self._last()])
        self.graph.output_node().args = ((*outputs, *(primal.gradient for primal in self.primals)),)
        template_of = program.template_of
        deep = dataclasses.replace(
            program,
            inputs=tuple(primal.info for primal in self.primals),
            segments=(*program.segments[:first], *chain, *program.segments[first + 2 :]),
            template_of=(*template_of[:first], *[template_of[first]] * len(chain), *template_of[first + 2 :]),
        )
        index_of = {spec.name: i for i, spec in enumerate(specs)}
        places = {i: index_of[each.parameter] for i, each in enumerate(self.primals) if each.parameter is not None}
        return TracedModel(deep, specs, book, places, self.unfused)

    def _copy(self, number: int, own: Sequence[_Primal], at: int) -> Segment:
        """Return block ``number``, not wired yet; put its inputs behind those of the copy before."""
        source = self.wiring.source
        with self.graph.inserting_before(self.graph.output_node()):
            made = {node: self._value(node) for node in (*source.outputs, *source.gradients)}
        position = at + len(own) * (number - SHALLOW + 1)
        for ours in own:
            with self.graph.inserting_after(self.primals[position - 1].node):
                node = made[ours.node] = self.graph.placeholder(f"{ours.node.name}_{number}")
            node.meta = {**ours.node.meta, "val": _apart(self.program, ours.node)}
            self.primals.insert(position, self._numbered(ours, number, node, made))
            position += 1
        return dataclasses.replace(
            source,
            stage=_stage(source.stage, number),
            inputs=tuple(made.get(node, node) for node in source.inputs),
            outputs=tuple(made[node] for node in source.outputs),
            gradients=tuple(made[node] for node in source.gradients),
        )

    def _numbered(self, ours: _Primal, number: int, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> _Primal:
        """Return what a primal of block 2 is in block ``number``."""
        theirs = self.next_of[ours.node]
        info = dataclasses.replace(ours.info, name=_renumbered(ours.info.name, theirs.info.name, number))
        if isinstance(ours.gradient, fx.Node) and ours.gradient not in made:
            raise NotRepeatableError
        return _Primal(node, info, _renumbered_parameter(ours, theirs, number), made.get(ours.gradient))

    def _last(self) -> Segment:
        """Return block 3 as the last block; its parameters are the deep model's last ones."""
        theirs_to_ours = {theirs: self._primal(ours) for ours, theirs in self.wiring.own.items()}
        for i, primal in enumerate(self.primals):
            if primal.node in theirs_to_ours:
                ours, number = theirs_to_ours[primal.node], self.depth - 1
                info = dataclasses.replace(primal.info, name=_renumbered(ours.info.name, primal.info.name, number))
                name = _renumbered_parameter(ours, primal, number)
                self.primals[i] = dataclasses.replace(primal, info=info, parameter=name)
        return dataclasses.replace(self.wiring.after, stage=_stage(self.wiring.after.stage, self.depth - 1))

    def _chained(self, chain: Sequence[Segment]) -> list[Segment]:
        """Wire every segment to the one before and the one after."""
        wired = []
        for number, segment in enumerate(chain):
            inputs, tangents = list(segment.inputs), list(segment.tangents)
            for place, output in self.wiring.from_before.items() if number else ():
                inputs[place] = chain[number - 1].outputs[output]
            for place, gradient in self.wiring.from_after.items() if number + 1 < len(chain) else ():
                tangents[place] = chain[number + 1].gradients[gradient]
            wired.append(dataclasses.replace(segment, inputs=tuple(inputs), tangents=tuple(tangents)))
        return wired

    def _value(self, like: fx.Node) -> fx.Node:
        node = self.graph.call_function(repeated_value)
        node.meta = {"val": fake_value(like)}
        return node


def repeated_value() -> None:
    """Stand for a value of a repeated block; never run."""


def _apart(program: Program, like: fx.Node) -> Any:
    """Return a fake value like that of ``like``, with memory of its own."""
    mode = compat.fake_mode_of(program.graph.graph)
    assert mode is not None
    with mode:
        return fake_value(like).clone()


def _stage(stage: Stage, number: int) -> Stage:
    return dataclasses.replace(stage, name=f"block {number}", path=f"{stage.path.rpartition('.')[0]}.{number}")


def _renumbered_parameter(ours: _Primal, theirs: _Primal, number: int) -> str | None:
    if ours.parameter is None or theirs.parameter is None:
        return None
    return _renumbered(ours.parameter, theirs.parameter, number)


def _renumbered(name: str, next_name: str, number: int) -> str:
    """Return ``h.7.weight`` for ``h.2.weight``, ``h.3.weight`` and 7."""
    ours, theirs = name.split("."), next_name.split(".")
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or len(differing) != 1:
        raise NotRepeatableError
    ours[differing[0]] = str(number)
    return ".".join(ours)
