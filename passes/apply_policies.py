"""Pass apply_policies: write the forward and backward graphs that carry out a Plan's policies.

For a block with policy *keep* and one with *recompute* (``->`` names results)::

    forward    t1_forward(inputs)  -> outputs, saved values        both; a recomputed block's saved values die here
    backward   t1_backward(inputs, saved, tangents) -> gradients   keep
               t1_recompute(inputs, pinned) -> saved values        recompute, just before
               t1_backward(inputs, saved, tangents) -> gradients

Between them, ``recompute_products`` and ``recompute_pointwise`` keep some saved values and call
``t1_recompute_products(inputs, kept) -> the other saved values``; which, ``cut_recompute`` says.
Everything outside blocks is kept. Arguments pass through ``pack``, so that the boxed call that follows holds the only
reference to a value that is not used again. What the backward needs of the forward leaves the forward graph after its
outputs; graph inputs are bound again instead, and those that the forward gives a new value are copied first.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import fx

from passes.node_facts import is_effectful
from protrain_compile import ops
from protrain_compile.compat import use_boxed_calls
from protrain_compile.liveness import kept_aliases
from protrain_compile.program import Parts, Ref, Segment, fake_value, results_of
from protrain_compile.roles import Role
from protrain_compile.schedule import BackwardInputs, Operation, Schedule


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """Names one saved value of one segment."""

    segment: int
    index: int


Key = fx.Node | SavedValue
"""What a schedule value stands for: a node of the captured graph, or a saved value."""


class ApplyPolicies:
    """Write the schedule's graphs."""

    name: ClassVar[str] = "apply_policies"
    requires: ClassVar[frozenset[str]] = frozenset({"parts"})
    provides: ClassVar[frozenset[str]] = frozenset({"graphs"})

    def run(self, schedule: Schedule) -> bool:
        """Set ``graphs`` and ``backward_inputs``."""
        policies = block_policies(schedule)
        kept: list[Key] = []
        written: fx.GraphModule | None = None
        if schedule.program.differentiable:
            backward = _Backward(schedule, policies)
            written = backward.build()
            kept = backward.kept
            schedule.backward_inputs = backward.inputs()
        name = "forward" if schedule.program.differentiable else "inference"
        schedule.graphs[name] = _Forward(schedule).build(kept)
        if written is not None:
            schedule.graphs["backward"] = written
        if schedule.program.differentiable:
            outputs, arguments = kept_aliases(schedule)
            inputs = schedule.backward_inputs
            schedule.backward_inputs = dataclasses.replace(inputs, kept_outputs=outputs, kept_arguments=arguments)
        return True


def block_policies(schedule: Schedule) -> tuple[str, ...]:
    """Return the policy of every segment: the Plan's for blocks, keep for the others."""
    assert schedule.plan.policies is not None
    remaining = iter(schedule.plan.policies)
    segments = schedule.program.segments
    return tuple(next(remaining) if segment.stage.kind == "block" else "keep" for segment in segments)


class _Writer:
    """Writes calls into one schedule graph and remembers which value each graph node stands for."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.program = schedule.program
        self.graph = fx.Graph()
        self.values: dict[Key, fx.Node] = {}
        self.attributes: dict[str, Any] = {}

    def parts(self, segment: int) -> Parts:
        return self.schedule.parts_of(segment)

    def call(self, segment: int, role: Role, arguments: Sequence[Key], results: Sequence[Key | None]) -> fx.Node:
        """Write pack, the artefact call, and one getitem per named result."""
        handle = self.schedule.artefacts.handle(self.schedule.template_of(segment), role)
        packed = self.graph.call_function(ops.pack, tuple(self.value(key) for key in arguments))
        made = self.graph.call_function(handle, (packed,), {"stream": "compute"})
        what = self.program.segments[segment].stage.name
        made.meta["operation"] = Operation(role, what, "compute", segment)
        made.meta["results"] = tuple(fake_value(node) for node in results_of(handle.graph))
        for index, key in enumerate(results):
            if key is not None and key not in self.values:
                item = self.graph.call_function(operator.getitem, (made, index))
                item.meta["val"] = made.meta["results"][index]
                self.values[key] = item
        return made

    def value(self, key: Key) -> fx.Node:
        """Return the graph node for ``key``."""
        if key not in self.values and isinstance(key, fx.Node) and key.op == "get_attr":
            self.attributes[str(key.target)] = getattr(self.program.graph, str(key.target))
            self.values[key] = self.graph.get_attr(str(key.target))
            self.values[key].meta["val"] = fake_value(key)
        return self.values[key]

    def finish(self, results: Sequence[Any]) -> fx.GraphModule:
        self.graph.output(
            tuple(self.value(each) if isinstance(each, fx.Node | SavedValue) else each for each in results)
        )
        return use_boxed_calls(fx.GraphModule(self.attributes, self.graph))


class _Forward(_Writer):
    def build(self, kept: Sequence[Key]) -> fx.GraphModule:
        """Write the forward; ``kept`` values are returned after the outputs."""
        primals = self.program.primals
        for node, source in zip(primals, self.program.inputs, strict=True):
            self.values[node] = self.graph.placeholder(node.name)
            self.values[node].meta.update(val=fake_value(node), input=source)
        snapshots: dict[Any, Key] = {key: self._snapshot(key) for key in kept if key in primals}
        returned = set(self.program.results[: self.program.num_outputs])
        wanted = _consumed(self.program.segments, self.parts) | returned | set(kept)
        for index, segment in enumerate(self.program.segments):
            self._segment(index, segment, wanted)
        outputs = self.program.results[: self.program.num_outputs]
        return self.finish([*outputs, *(snapshots.get(key, key) for key in kept)])

    def _segment(self, index: int, segment: Segment, wanted: set[Any]) -> None:
        parts = self.parts(index)
        saved = [SavedValue(index, j) for j in range(_num_saved(parts))]
        produced: list[Key] = [*segment.outputs, *saved]
        results = [key if key in wanted else None for key in produced]
        if not any(results) and not any(is_effectful(node) for node in parts.forward.graph.nodes):
            return
        self.call(index, "forward", [segment.inputs[i] for i in parts.forward_inputs], results)

    def _snapshot(self, key: Key) -> Key:
        assert isinstance(key, fx.Node)
        source = self.program.inputs[self.program.primals.index(key)]
        copied = self.graph.call_function(ops.snapshot, (self.values[key],), {"stream": "compute"})
        copied.meta["val"] = fake_value(key)
        copied.meta["operation"] = Operation("snapshot", source.name, "compute", -1)
        self.values[copied] = copied
        return copied


def _num_saved(parts: Parts) -> int:
    return len(results_of(parts.forward)) - parts.num_outputs


def _consumed(segments: Sequence[Segment], parts_of: Any) -> set[Any]:
    """Return the values that some segment's forward takes."""
    return {segment.inputs[i] for s, segment in enumerate(segments) for i in parts_of(s).forward_inputs}


class _Backward(_Writer):
    def __init__(self, schedule: Schedule, policies: tuple[str, ...]) -> None:
        super().__init__(schedule)
        self.policies = policies
        self.position: dict[Key, int] = {node: i for i, node in enumerate(self.program.primals)}
        self.tangent_position: dict[Key, int] = {node: i for i, node in enumerate(self.program.tangents)}
        self.mutated = {n for n, s in zip(self.program.primals, self.program.inputs, strict=True) if s.mutated}
        self.needed: dict[str, list[Key]] = {"primals": [], "kept": [], "tangents": []}

    @property
    def kept(self) -> list[Key]:
        """What the forward must return after its outputs."""
        return self.needed["kept"]

    def inputs(self) -> BackwardInputs:
        """Return how the placeholders are bound."""
        return BackwardInputs(
            primals=tuple(self.position[key] for key in self.needed["primals"]),
            num_kept=len(self.kept),
            tangents=tuple(self.tangent_position[key] for key in self.needed["tangents"]),
        )

    def build(self) -> fx.GraphModule:
        """Write the backward, last segment first; placeholders appear as they are needed."""
        gradients = self.program.results[self.program.num_outputs :]
        for index in reversed(range(len(self.program.segments))):
            if self.parts(index).backward is not None:
                self._segment(index)
        module = self.finish(gradients)
        self._order_placeholders()
        return use_boxed_calls(module)

    def _segment(self, index: int) -> None:
        segment, parts = self.program.segments[index], self.parts(index)

        def keys(refs: Sequence[Ref]) -> list[Key]:
            source = {"input": segment.inputs, "tangent": segment.tangents}
            return [SavedValue(index, r.index) if r.kind == "saved" else source[r.kind][r.index] for r in refs]

        role = parts.recompute_of.get(self.policies[index])
        if role is not None:
            again = parts.recomputes[role]
            self.call(index, role, keys(again.inputs), [SavedValue(index, j) for j in again.results])
        self.call(index, "backward", keys(parts.backward_inputs), segment.gradients)

    def value(self, key: Key) -> fx.Node:
        """Return the graph node for ``key``; a value of the forward or of autograd becomes a placeholder."""
        if key in self.values or (isinstance(key, fx.Node) and key.op == "get_attr"):
            return super().value(key)
        kind = "tangents" if key in self.tangent_position else "primals"
        if key not in self.tangent_position and (key not in self.position or key in self.mutated):
            kind = "kept"
        name = key.name if isinstance(key, fx.Node) else f"saved_{key.segment}_{key.index}"
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta.update(val=self._fake(key), kind=kind)
        if key in self.position:
            node.meta["input"] = self.program.inputs[self.position[key]]
        self.needed[kind].append(key)
        self.values[key] = node
        return node

    def _fake(self, key: Key) -> Any:
        if self.tangent_position.get(key) in self.program.absent_tangents:
            return None
        if isinstance(key, fx.Node):
            return fake_value(key)
        parts = self.parts(key.segment)
        return fake_value(results_of(parts.forward)[parts.num_outputs + key.index])

    def _order_placeholders(self) -> None:
        """Put the placeholders in the order in which the runtime binds them."""
        ordered = [self.values[key] for kind in ("primals", "kept", "tangents") for key in self.needed[kind]]
        for node in reversed(ordered):
            first = next(iter(self.graph.nodes))
            if node is not first:
                first.prepend(node)
