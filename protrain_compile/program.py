"""The Program: one captured graph, its inputs, and the segments and templates found in it.

Structure passes fill it in step by step::

    capture            graph, inputs, tangents
    tag_blocks         stages, stage_of      every node belongs to one stretch of the model
    hoist_casts        (graph), travels      parameters used as 16 bits travel as 16 bits
    seed_randomness    (graph)               random draws become functions of seeds made in the prologue
    outline_blocks     segments              one joint subgraph per stage
    dedupe_templates   templates             what structurally identical segments share
    slice_loss         sliced                a second template for the loss, in slices of tokens
    partition_templates  template.parts      forward, recomputes and backward of each template
    omit_tangents      absent_tangents       backwards for tangents that autograd does not have
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from protrain_compile.roles import RecomputeRole, Role


class InputKind(enum.Enum):
    """What a graph input is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    SYMBOL = "symbol"


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One input of the captured graph.

    Attributes:
        name: Where it comes from, such as ``blocks.0.attn.qkv.weight``.
        kind: Parameter, buffer, user input, or a symbolic size.
        trainable: Whether the graph computes a gradient for it.
        mutated: Whether the forward gives it a new value (BatchNorm statistics, counters).
        managed: Whether it is a parameter that ``prepare`` took over.
        frozen: Whether it is a parameter that required no gradient when the graph was captured.
        hoistable: Whether it may travel in another type than its own, because its home keeps the exact value.
        travels: The 16-bit type in which its chunk holds it (set by hoist_casts); None for its own type.
    """

    name: str
    kind: InputKind
    trainable: bool = False
    mutated: bool = False
    managed: bool = False
    frozen: bool = False
    hoistable: bool = False
    travels: torch.dtype | None = None

    @property
    def held_by_model(self) -> bool:
        """Whether the model, not the caller, owns it."""
        return self.kind in (InputKind.PARAMETER, InputKind.BUFFER)


StageKind = Literal["prologue", "block", "between", "epilogue"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of the model that runs as one piece.

    Attributes:
        kind: ``prologue`` (before the first block), ``block``, ``between`` (other modules between two blocks) or
            ``epilogue``.
        name: What messages call it, such as ``block 3``.
        path: Module path of a block, such as ``model.layers.3``; empty for the others.
    """

    kind: StageKind
    name: str
    path: str = ""


RefKind = Literal["input", "saved", "tangent"]


@dataclasses.dataclass(frozen=True)
class Ref:
    """An argument of an artefact: a segment input, a saved value, or a tangent, by position."""

    kind: RefKind
    index: int


@dataclasses.dataclass(frozen=True)
class Recompute:
    """A graph that makes saved values again.

    Attributes:
        graph: ``(inputs) -> saved values listed in results``.
        inputs: What it takes: segment inputs, and saved values that were kept.
        results: Saved values that it returns, by position.
    """

    graph: fx.GraphModule
    inputs: tuple[Ref, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A template's graphs and how a segment's values feed them.

    Attributes:
        forward: ``(inputs) -> (outputs..., saved...)``.
        forward_inputs: Segment inputs that ``forward`` takes, by position.
        num_outputs: How many of the forward's results are outputs; the rest are saved values.
        pinned: Saved values that are never recomputed (random draws, routing decisions), by position.
        recomputes: The recomputes, each other than the others; none if nothing can be recomputed.
        recompute_of: By which of them each policy is carried out; a policy that keeps all that it could has none.
        backward: ``(backward_inputs) -> gradients``; None for a segment without one.
        backward_inputs: What it takes: segment inputs, saved values, tangents.
        held_tangents: Tangents, by position, that autograd hands over: it holds them until the whole backward returns.
        absent_tangents: Tangents, by position, for which ``backward`` takes None; a placeholder without a value.
        complete_backward: The backward for all tangents, with the same inputs; None where ``backward`` is that one.
    """

    forward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    num_outputs: int
    pinned: frozenset[int] = frozenset()
    recomputes: Mapping[RecomputeRole, Recompute] = dataclasses.field(default_factory=dict)
    recompute_of: Mapping[str, RecomputeRole] = dataclasses.field(default_factory=dict)
    backward: fx.GraphModule | None = None
    backward_inputs: tuple[Ref, ...] = ()
    held_tangents: frozenset[int] = frozenset()
    absent_tangents: frozenset[int] = frozenset()
    complete_backward: fx.GraphModule | None = None

    def graphs(self) -> dict[Role, fx.GraphModule]:
        """Return the graph of every part that is planned for, in the order of ``roles.ROLES``."""
        found: dict[Role, fx.GraphModule] = {"forward": self.forward}
        found.update((role, again.graph) for role, again in self.recomputes.items())
        return found if self.backward is None else {**found, "backward": self.backward}


@dataclasses.dataclass(frozen=True)
class Segment:
    """One stage's part of the captured graph, as a joint subgraph.

    The subgraph's placeholders are ``primals_*`` (bound to ``inputs``) then ``tangents_*``; its outputs are
    the forward outputs then the gradients. All four tuples hold nodes of the captured graph.
    """

    stage: Stage
    joint: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    input_roles: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class Template:
    """What structurally identical segments share; partitioned, compiled and profiled once.

    Attributes:
        name: Short name, such as ``t1``.
        joint: The joint subgraph of the first segment of this structure.
        input_roles: Per input: ``parameter``, ``buffer``, ``mutated`` or ``value``.
        num_outputs: How many of the subgraph's results are forward outputs.
        parts: Set by partition_templates.
    """

    name: str
    joint: fx.GraphModule
    input_roles: tuple[str, ...]
    num_outputs: int
    parts: Parts | None = None


@dataclasses.dataclass(eq=False)
class Program:
    """One captured graph and what the structure passes found in it.

    Attributes:
        name: The model's class name.
        graph: The joint graph (placeholders: primals, then tangents), or the inference graph.
        inputs: What each primal is, in placeholder order.
        num_outputs: How many of the graph's results are forward outputs.
        differentiable: Whether the graph has a backward.
        stages: The stretches, in execution order.
        stage_of: The stage (by index) of every node but placeholders and the output.
        backward_nodes: The nodes that run in the backward.
        segments: One per non-empty stage, in execution order.
        templates: The distinct structures, and ``template_of`` each segment.
        sliced: For a template that ends in a loss, the template that computes the same in slices of tokens.
        absent_tangents: Tangents, by position, that the backward is planned without: they come where something was
            computed from an output that is no loss.
        notes: Things worth telling the user about this graph.
    """

    name: str
    graph: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    num_outputs: int
    differentiable: bool
    stages: tuple[Stage, ...] = ()
    stage_of: dict[fx.Node, int] = dataclasses.field(default_factory=dict)
    backward_nodes: set[fx.Node] = dataclasses.field(default_factory=set)
    segments: tuple[Segment, ...] = ()
    templates: tuple[Template, ...] = ()
    template_of: tuple[int, ...] = ()
    sliced: dict[int, int] = dataclasses.field(default_factory=dict)
    absent_tangents: frozenset[int] = frozenset()
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def placeholders(self) -> list[fx.Node]:
        """All placeholders: primals, then tangents."""
        return list(self.graph.graph.find_nodes(op="placeholder"))

    @property
    def primals(self) -> list[fx.Node]:
        """The placeholders that the forward receives, in order."""
        return self.placeholders[: len(self.inputs)]

    @property
    def tangents(self) -> list[fx.Node]:
        """The placeholders that the backward receives from autograd, in order."""
        return self.placeholders[len(self.inputs) :]

    @property
    def results(self) -> tuple[Any, ...]:
        """What the graph returns: forward outputs, then gradients (nodes, or None)."""
        return results_of(self.graph)

    @property
    def device(self) -> torch.device:
        """The device that the graph computes on: that of its first input that is not on the CPU."""
        values = [fake_value(node) for node in self.placeholders]
        devices = [value.device for value in values if isinstance(value, torch.Tensor)]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    @property
    def block_names(self) -> tuple[str, ...]:
        """Module paths of the blocks that have a segment, in execution order."""
        return tuple(segment.stage.path for segment in self.segments if segment.stage.kind == "block")

    @property
    def structures(self) -> int:
        """How many different templates the segments have; the sliced form of one counts as that one."""
        return len(set(self.template_of))

    def symbol_values(self, sizes: Sequence[int]) -> dict[Any, int]:
        """Return the number for each symbol of symbolic sizes, from those of a call's inputs of kind SYMBOL."""
        kinds = zip(self.primals, self.inputs, strict=True)
        symbols = [fake_value(node) for node, source in kinds if source.kind is InputKind.SYMBOL]
        pairs = zip(symbols, sizes, strict=False)
        return {symbol.node.expr: size for symbol, size in pairs if isinstance(symbol, torch.SymInt)}

    def template_index(self, segment: int, loss: str | None) -> int:
        """Return which template a segment runs: its own, or for a loss of ``sliced`` the sliced form of that."""
        index = self.template_of[segment]
        return self.sliced.get(index, index) if loss == "sliced" else index

    def graph_modules(self) -> dict[str, fx.GraphModule]:
        """Return the graph that passes rewrite, by name."""
        return {"joint" if self.differentiable else "inference": self.graph}

    def calls(self) -> Iterator[fx.Node]:
        """Yield the nodes that do something: all but placeholders and the output."""
        return (node for node in self.graph.graph.nodes if node.op not in ("placeholder", "output"))


def results_of(module: fx.GraphModule) -> tuple[Any, ...]:
    """Return what ``module`` returns: nodes, numbers or None."""
    results: Any = module.graph.output_node().args[0]
    return tuple(results)


def fake_value(node: fx.Node) -> Any:
    """Return the fake value that tracing recorded for ``node`` (a tensor, a symbol, or a tuple of them)."""
    return node.meta.get("val")


def is_symbol(node: fx.Node) -> bool:
    """Whether ``node`` stands for a symbolic number rather than a tensor."""
    return isinstance(fake_value(node), torch.SymInt | torch.SymFloat | torch.SymBool)
