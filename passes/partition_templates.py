"""Pass partition_templates: split each template into forward, recomputes and backward.

``functorch``'s min-cut partitioner, run on one template's joint subgraph alone, chooses which values are saved. Then::

    forward    (inputs)                    -> outputs, saved values
    recompute  (inputs, kept saved)        -> the other saved values       (the forward, pruned)
    backward   (inputs, saved, tangents)   -> gradients

All policies share this one backward. Saved values that are parameters, or views and casts of parameters, are no saved
values at all: the backward makes them again from the parameter, so that nothing but the chunk keeps a parameter alive.
Of a view of all of a value that value is saved, and the backward views it: other saved values may be had from it.
Results of random draws, effects and routing decisions are *pinned*: saved under every policy. There is one recompute
for each policy that recomputes, unless two keep the same values: see ``cut_recompute``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import fx

from passes.cut_recompute import extract, finer_policies, kept_values, reached, unrepeatable_results, viewed_whole
from passes.node_facts import free_symbols, is_parameter_cast, is_view, never_recompute, reach
from protrain_compile import compat
from protrain_compile.program import Parts, Program, Recompute, Ref, Template, fake_value, is_symbol
from protrain_compile.roles import RecomputeRole
from protrain_compile.row_loop import loop_of, row_loops


class PartitionTemplates:
    """Set the parts of every template."""

    name: ClassVar[str] = "partition_templates"
    requires: ClassVar[frozenset[str]] = frozenset({"templates", "sliced"})
    provides: ClassVar[frozenset[str]] = frozenset({"parts"})

    def __init__(self, *, inductor: bool) -> None:
        """Take whether Inductor compiles the parts; its joint-graph passes then run first."""
        self.inductor = inductor

    def run(self, program: Program) -> bool:
        """Partition the templates; the captured graph stays as it is."""
        of_blocks = {
            program.templates[index]
            for segment, index in zip(program.segments, program.template_of, strict=True)
            if segment.stage.kind == "block"
        }
        held = _held_tangents(program)
        for index, template in enumerate(program.templates):
            parts = partition(template, inductor=self.inductor, finer=template in of_blocks)
            template.parts = dataclasses.replace(parts, held_tangents=frozenset(held[index]))
        return False


def _held_tangents(program: Program) -> list[set[int]]:
    """Return, for every template, which tangents of any of its segments autograd hands over."""
    given = set(program.tangents)
    held: list[set[int]] = [set() for _ in program.templates]
    for segment, index in zip(program.segments, program.template_of, strict=True):
        for template in {index, program.sliced.get(index, index)}:
            held[template] |= {i for i, node in enumerate(segment.tangents) if node in given}
    return held


def partition(template: Template, *, inductor: bool, finer: bool = True) -> Parts:
    """Return the parts of one template.

    Args:
        template: The template.
        inductor: Whether to run Inductor's joint-graph passes first.
        finer: Whether there are policies between keep and recompute.
    """
    fake_mode = compat.fake_mode_of(template.joint.graph)
    with compat.unset_fake_temporarily():
        joint = copy.deepcopy(template.joint)
    if inductor:
        compat.prepare_joint(joint, fake_mode)
        for loop in map(loop_of, row_loops(joint.graph)):
            for each in loop.graphs():
                compat.prepare_joint(each, fake_mode, keep_strides=False)
    results = joint.graph.output_node().args[0]
    if len(results) == template.num_outputs:  # type: ignore[arg-type]
        return _forward_only(joint, template.num_outputs)
    _save_what_runs_once(joint)
    static = [i for i, role in enumerate(template.input_roles) if role in ("parameter", "buffer")]
    halves = _independent_halves(joint, template.num_outputs)
    forward, backward = halves or compat.partition(joint, template.num_outputs, static)
    return _Split(template, forward, backward, finer=finer).parts()


def _independent_halves(joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Split a joint whose gradients depend on tangents alone, such as a sum of gradients: min-cut has nothing to cut.

    Returns None for any other joint.
    """
    results: tuple[fx.Node, ...] = joint.graph.output_node().args[0]  # type: ignore[assignment]
    sources = reach(results[num_outputs:], set())
    if any(never_recompute(node) or _is_primal(node) for node in sources):
        return None
    forward, backward = (
        extract(joint, list(results[:num_outputs]), []),
        extract(joint, list(results[num_outputs:]), []),
    )
    for node in forward.graph.find_nodes(op="placeholder"):
        if not _is_primal(node):
            forward.graph.erase_node(node)
    return forward, backward


def _save_what_runs_once(joint: fx.GraphModule) -> None:
    """Keep the partitioner from computing again in the backward what must run once.

    It would do so with some decisions, which it holds for pointwise operations, and with draws inside the user's own
    checkpoint regions, which it would wrap in generator-state bookkeeping.
    """
    once = filter(never_recompute, joint.graph.nodes)
    for node in (*once, *unrepeatable_results(joint.graph)):
        node.meta["recompute"] = compat.MUST_SAVE


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("primals")


def _forward_only(joint: fx.GraphModule, num_outputs: int) -> Parts:
    placeholders = list(joint.graph.find_nodes(op="placeholder"))
    _drop_unused_placeholders(joint, _symbol_placeholders(joint))
    left = set(joint.graph.nodes)
    used = tuple(i for i, node in enumerate(placeholders) if node in left)
    return Parts(forward=joint, forward_inputs=used, num_outputs=num_outputs)


class _Split:
    """Turns the partitioner's two graphs into the parts."""

    def __init__(self, template: Template, forward: fx.GraphModule, backward: fx.GraphModule, *, finer: bool) -> None:
        self.template = template
        self.forward, self.backward = forward, backward
        self.symbols = _symbol_placeholders(forward)
        self.inputs = {node.name: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
        results: tuple[fx.Node, ...] = forward.graph.output_node().args[0]  # type: ignore[assignment]
        self.outputs, kept = results[: template.num_outputs], results[template.num_outputs :]
        from_parameters = self._computed_from_parameters()
        _rebuild_in_backward(backward, [n for n in kept if n.op != "placeholder" and n in from_parameters])
        saved = [node for node in kept if node.op != "placeholder" and node not in from_parameters]
        viewed = {node: viewed_whole(node) for node in saved}
        self.saved = list(dict.fromkeys(viewed.values()))
        _rebuild_in_backward(backward, [n for n, source in viewed.items() if n is not source], self.saved)
        self.finer = finer_policies(from_parameters) if finer else {}

    def parts(self) -> Parts:
        """Return the finished parts."""
        graphs = self._recompute_graphs()
        saved = self.saved
        positions = {node.name: Ref("saved", j) for j, node in enumerate(saved)}
        recomputes = {
            role: Recompute(graph, self._refs(graph, positions), tuple(saved.index(node) for node in wanted))
            for role, (graph, wanted) in graphs.items()
        }
        backward_inputs = self._refs(self.backward, positions)
        _set_results(self.forward, (*self.outputs, *saved))
        forward_inputs = tuple(ref.index for ref in self._refs(self.forward, {}))
        return Parts(
            forward=self.forward,
            forward_inputs=forward_inputs,
            num_outputs=self.template.num_outputs,
            pinned=frozenset(j for j, node in enumerate(saved) if node in self.pinned),
            recomputes=recomputes,
            recompute_of=self.recompute_of,
            backward=self.backward,
            backward_inputs=backward_inputs,
        )

    def _computed_from_parameters(self) -> set[fx.Node]:
        """Return the parameters and the nodes that are views or casts of them (and of nothing else)."""
        found: set[fx.Node] = {
            node
            for node, role in zip(
                self.forward.graph.find_nodes(op="placeholder"), self.template.input_roles, strict=True
            )
            if role == "parameter"
        }
        for node in self.forward.graph.nodes:
            sources = node.all_input_nodes
            if sources and found.issuperset(sources) and (is_view(node) or is_parameter_cast(node)):
                found.add(node)
        return found

    def _recompute_graphs(self) -> dict[RecomputeRole, tuple[fx.GraphModule, list[fx.Node]]]:
        """Build the forward pruned to the saved values that a policy drops, cut at those that it keeps.

        Sets ``pinned`` and ``recompute_of``, and appends to ``saved`` the cut values that the partitioner did not save.
        """
        cut = unrepeatable_results(self.forward.graph)
        wanted = [node for node in self.saved if node not in cut and not is_symbol(node)]
        self.pinned = {node for node in self.saved if node in cut or is_symbol(node)}
        self.recompute_of: dict[str, RecomputeRole] = {}
        if not wanted:
            return {}
        given = reached(wanted, cut)
        self.saved += [node for node in given if node not in self.saved]
        self.pinned |= set(given)
        found: dict[RecomputeRole, tuple[fx.GraphModule, list[fx.Node]]] = {}
        for policy, again in self._dropped(wanted, cut).items():
            same = next((role for role, (_, others) in found.items() if others == again), None)
            if same is None:
                found[policy] = extract(self.forward, again, reached(again, cut | (set(wanted) - set(again)))), again
            self.recompute_of[policy] = same or policy
        if "recompute_pointwise" in self.recompute_of:
            self.recompute_of["swap_products"] = self.recompute_of["recompute_pointwise"]
        return found

    def _dropped(self, wanted: list[fx.Node], cut: set[fx.Node]) -> dict[RecomputeRole, list[fx.Node]]:
        """Return what each policy drops of ``wanted``; policies that drop nothing are left out."""
        found: dict[RecomputeRole, list[fx.Node]] = {"recompute": wanted}
        for policy, expensive in self.finer.items():
            kept = kept_values(self.forward.graph, self.saved, cut, expensive)
            found[policy] = [node for node in wanted if node not in kept]
        return {policy: dropped for policy, dropped in found.items() if dropped}

    def _refs(self, module: fx.GraphModule, saved: Mapping[str, Ref]) -> tuple[Ref, ...]:
        """Drop unused placeholders and say what the others are bound to."""
        _drop_unused_placeholders(module, self.symbols)
        refs = []
        for node in module.graph.find_nodes(op="placeholder"):
            name = str(node.target)
            if name in saved:
                refs.append(saved[name])
            elif name in self.inputs:
                refs.append(Ref("input", self.inputs[name]))
            else:
                refs.append(Ref("tangent", int(name.removeprefix("tangents_")) - 1))
        return tuple(refs)


def _rebuild_in_backward(backward: fx.GraphModule, kept: list[fx.Node], given: Sequence[fx.Node] = ()) -> None:
    """Replace each kept value by the same computation on inputs (its views and casts of parameters) or ``given``."""
    placeholders = {str(node.target): node for node in backward.graph.find_nodes(op="placeholder")}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    copies: dict[fx.Node, fx.Node] = {}

    def build(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        is_given = node.op == "placeholder" or node in given
        if is_given and node.name in placeholders:
            copies[node] = placeholders[node.name]
        elif is_given:
            with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
                copies[node] = backward.graph.placeholder(node.name)
            copies[node].meta = copy.copy(node.meta)
        else:
            sources = {source: build(source) for source in node.all_input_nodes}
            with backward.graph.inserting_before(first):
                copies[node] = backward.graph.node_copy(node, lambda each: sources[each])
        return copies[node]

    for node in kept:
        made = build(node)
        placeholders[node.name].replace_all_uses_with(made)


def _drop_unused_placeholders(module: fx.GraphModule, symbols: Mapping[Any, fx.Node]) -> None:
    """Drop the placeholders that nothing uses; keep, or add, those of the ``symbols`` that sizes mention.

    Inductor must be able to tell every symbol in its inputs' sizes, also where a size is an expression of it.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    placeholders = list(graph.find_nodes(op="placeholder"))
    kept = [node for node in graph.nodes if node.op != "placeholder" or node.users]
    mentioned: set[Any] = set().union(*(free_symbols(fake_value(node)) for node in kept))
    wanted = {source.name: source for symbol, source in symbols.items() if symbol in mentioned}
    for node in placeholders:
        if wanted.pop(node.name, None) is None and not node.users:
            graph.erase_node(node)
    for name, source in wanted.items():
        with graph.inserting_before(next(iter(graph.nodes))):
            graph.placeholder(name).meta = copy.copy(source.meta)
    module.recompile()


def _symbol_placeholders(module: fx.GraphModule) -> dict[Any, fx.Node]:
    """Return the placeholder that stands for each plain symbol."""
    found: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        if is_symbol(node) and fake_value(node).node.expr.is_Symbol:
            found[fake_value(node).node.expr] = node
    return found


def _set_results(module: fx.GraphModule, results: tuple[fx.Node, ...]) -> None:
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        module.graph.output(results)
    module.graph.erase_node(output)
