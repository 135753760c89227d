"""The Schedule: the ordered nodes that carry a Plan out, as graphs that run as they are printed."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from protrain_compile.artefacts import ArtefactSet
from protrain_compile.chunks import ChunkBinding
from protrain_compile.plan import Plan
from protrain_compile.program import Parts, Program, Template
from protrain_compile.row_loop import loop_of, row_loops


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a schedule node does, for printing and checking; stored as ``node.meta["operation"]``.

    Attributes:
        op: Name of the operation: forward, recompute, backward, snapshot, one on a chunk, or one on swapped values
            (see ``ops``).
        what: What it works on, such as ``block 3`` or ``chunk 10``.
        stream: The stream it runs on.
        segment: Index of the segment it belongs to.
        moved_bytes: Bytes that it moves over the link.
        chunk: The chunk that it works on, or -1.
    """

    op: str
    what: str
    stream: str
    segment: int
    moved_bytes: int = 0
    chunk: int = -1


@dataclasses.dataclass(frozen=True)
class BackwardInputs:
    """What the backward graph's placeholders are, in order: primals, kept values, tangents.

    Attributes:
        primals: Positions among the forward's arguments; bound again from the context, never saved by value.
        num_kept: How many values of the forward follow; the forward graph returns them after its outputs.
        kept_outputs: For each kept value, the position of the forward's output that shares its memory, or None.
        kept_arguments: For each kept value, the position of the forward's argument that shares its memory, or None.
        tangents: Positions among the tangents that autograd hands over.
    """

    primals: tuple[int, ...] = ()
    num_kept: int = 0
    kept_outputs: tuple[int | None, ...] = ()
    kept_arguments: tuple[int | None, ...] = ()
    tangents: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False)
class Schedule:
    """Graphs of artefact calls and named operations, each with its stream in the keyword arguments.

    Attributes:
        program: What is scheduled.
        plan: One policy for each block of the program.
        artefacts: The compiled parts that the graphs call.
        graphs: ``forward`` and ``backward``, or ``inference``; boxed calls (one list in, emptied).
        backward_inputs: How the backward's placeholders are bound.
        chunks: How the parameters lie in chunks, for a prepared model; its graphs take the residency first.
        swapped_bytes: Host bytes of every segment that is swapped, in order; if there are any, the graphs take the
            swap space before the model's own arguments.
        divided: Whether the collectives of shared chunks have been written.
    """

    program: Program
    plan: Plan
    artefacts: ArtefactSet
    graphs: dict[str, fx.GraphModule] = dataclasses.field(default_factory=dict)
    backward_inputs: BackwardInputs = BackwardInputs()
    chunks: ChunkBinding | None = None
    swapped_bytes: tuple[int, ...] = ()
    divided: bool = False

    def graph_modules(self) -> dict[str, fx.GraphModule]:
        """Return the graphs that passes rewrite, by name."""
        return self.graphs

    def template_of(self, segment: int) -> Template:
        """Return the template that a segment runs, by number: for a sliced loss, the template's sliced form."""
        return self.program.templates[self.program.template_index(segment, self.plan.loss)]

    def parts_of(self, segment: int) -> Parts:
        """Return the parts of the template that a segment runs."""
        parts = self.template_of(segment).parts
        assert parts is not None
        return parts

    @property
    def loss_slices(self) -> int:
        """In how many slices of tokens the loss is computed; 1 for all at once."""
        joints = (self.template_of(segment).joint for segment in range(len(self.program.segments)))
        return max((loop_of(node).slices for joint in joints for node in row_loops(joint.graph)), default=1)

    @property
    def entry(self) -> fx.GraphModule:
        """The graph that a call of the compiled model runs."""
        return self.graphs["forward" if self.program.differentiable else "inference"]


def operation_of(node: fx.Node) -> Operation | None:
    """Return what a schedule node does, or None for plumbing (pack, getitem, placeholders)."""
    operation: Any = node.meta.get("operation")
    return operation if isinstance(operation, Operation) else None
