"""What a pass is, and the pipeline that runs passes in a checked order.

A pass declares what it needs and what it brings about; the pipeline refuses an order in which a need is not
met when it is built, before anything runs. After each pass it lints the graphs, calls the verifier, checks that
what a pass says of having changed a graph is true, and keeps a record.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import fx

from protrain_compile.errors import PipelineError

log = logging.getLogger("protrain_compile.passes")


class HasGraphs(Protocol):
    """What passes work on: something that can show its graphs."""

    def graph_modules(self) -> dict[str, fx.GraphModule]:
        """Return the graphs by name."""
        ...


State = TypeVar("State", bound=HasGraphs)
State_contra = TypeVar("State_contra", contravariant=True)


class Pass(Protocol[State_contra]):
    """One rewrite. ``name`` is a verb phrase; ``requires`` and ``provides`` are properties of the state."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]]
    provides: ClassVar[frozenset[str]]

    def run(self, state: State_contra, /) -> bool:
        """Rewrite ``state`` in place; return whether a graph changed."""
        ...


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """What one pass did: its time in ms, whether it changed a graph, and how op counts differ."""

    name: str
    ms: float
    changed: bool
    op_counts: dict[str, int]


class Pipeline(Generic[State]):
    """Passes over one kind of state, in an order checked when the pipeline is built.

    Args:
        passes: The passes, in order.
        given: Properties that hold before the first pass.
        verify: Called with the state and the pass's name after each pass; raises on a broken invariant.
        print_after: Name of a pass after which the graphs are printed.

    Raises:
        PipelineError: If a pass requires what no earlier pass provides, or two provide the same.
    """

    def __init__(
        self,
        passes: Sequence[Pass[State]],
        *,
        given: Iterable[str] = (),
        verify: Callable[[State, str], None] | None = None,
        print_after: str | None = None,
    ) -> None:
        self.passes = tuple(passes)
        self.verify = verify
        self.print_after = print_after
        have = set(given)
        for each in self.passes:
            missing = sorted(each.requires - have)
            if missing:
                raise PipelineError(f"pass {each.name} requires {', '.join(missing)}, which no earlier pass provides")
            again = sorted(each.provides & have)
            if again:
                raise PipelineError(
                    f"pass {each.name} provides {', '.join(again)}, which an earlier pass provides already"
                )
            have |= each.provides

    def run(self, state: State) -> tuple[PassRecord, ...]:
        """Run every pass on ``state`` and return their records.

        Raises:
            PipelineError: If a pass leaves a malformed graph, or is wrong about having changed one.
        """
        return tuple(self._run_one(each, state) for each in self.passes)

    def _run_one(self, each: Pass[State], state: State) -> PassRecord:
        before = _signatures(state)
        start = time.perf_counter()
        changed = each.run(state)
        ms = (time.perf_counter() - start) * 1e3
        after = _signatures(state)
        if changed != (before != after):
            raise PipelineError(
                f"pass {each.name} says that it changed a graph, but none differs"
                if changed
                else f"pass {each.name} says that it changed nothing, but the graphs differ"
            )
        for name, module in state.graph_modules().items():
            try:
                module.graph.lint()
            except RuntimeError as error:
                raise PipelineError(f"pass {each.name} left the {name} graph malformed: {error}") from error
        if self.verify is not None:
            self.verify(state, each.name)
        record = PassRecord(each.name, ms, changed, _difference(before, after))
        log.debug("pass %s: %.1f ms, changed=%s, ops %s", record.name, record.ms, record.changed, record.op_counts)
        if self.print_after == each.name:
            _print_graphs(state, each.name)
        return record


Signature = dict[str, list[tuple[Any, ...]]]


def _signatures(state: HasGraphs) -> Signature:
    return {
        name: [(node, node.target, node.args, node.kwargs) for node in module.graph.nodes]
        for name, module in state.graph_modules().items()
    }


def _difference(before: Signature, after: Signature) -> dict[str, int]:
    counts = collections.Counter(str(row[1]) for rows in after.values() for row in rows)
    counts.subtract(str(row[1]) for rows in before.values() for row in rows)
    return {target: count for target, count in sorted(counts.items()) if count}


def _print_graphs(state: HasGraphs, name: str) -> None:
    for title, module in state.graph_modules().items():
        sys.stdout.write(f"# after {name}: {title}\n{module.graph}\n")
