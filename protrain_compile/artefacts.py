"""Artefacts: the compiled parts of a template, and the handles that stand for them in a schedule."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from protrain_compile import compat
from protrain_compile.options import CompileMode
from protrain_compile.program import Template
from protrain_compile.roles import Role
from protrain_compile.row_loop import Boxed, compile_around_loop, row_loops

log = logging.getLogger("protrain_compile.artefacts")


class Artefact:
    """One part of a template, called from schedule graphs.

    The call is boxed: it takes its inputs in a list, empties the list, and lets each input die at its last use.
    """

    def __init__(self, template: Template, role: Role, graph: fx.GraphModule) -> None:
        self.__name__ = f"{template.name}_{role}"
        self.__qualname__ = self.__name__
        self.__module__ = "artefact"
        self.role = role
        self.graph = graph
        self._run: Boxed | None = None

    def __call__(self, boxed: list[Any], *, stream: str) -> Sequence[Any]:
        """Run on ``stream`` (the current one is ``compute``); return the results in order."""
        assert self._run is not None, f"{self.__name__} was scheduled before it was compiled"
        return self._run(boxed)

    def __repr__(self) -> str:
        """Return the name that printed graphs show."""
        return self.__name__

    @property
    def compiled(self) -> bool:
        """Whether the artefact can be called."""
        return self._run is not None

    def compile(self, mode: CompileMode, fake_mode: compat.FakeTensorMode | None) -> None:
        """Compile with Inductor, or prepare to run the ATen operations one by one."""
        start = time.perf_counter()
        self._run = _compiled(self.graph, mode, fake_mode)
        log.debug("compiled %s (%s) in %.2f s", self.__name__, mode, time.perf_counter() - start)


class BackwardArtefact(Artefact):
    """A backward that is planned without some tangents: None comes in their place.

    Where they come all the same the complete backward runs, which is compiled when that first happens.
    """

    def __init__(self, template: Template) -> None:
        """Take a template whose parts have a complete backward."""
        parts = template.parts
        assert parts is not None
        assert parts.backward is not None
        super().__init__(template, "backward", parts.backward)
        refs = enumerate(parts.backward_inputs)
        self._absent = [i for i, ref in refs if ref.kind == "tangent" and ref.index in parts.absent_tangents]
        self._complete_graph = parts.complete_backward
        self._compile: Callable[[fx.GraphModule], Boxed] | None = None
        self._complete: Boxed | None = None

    def __call__(self, boxed: list[Any], *, stream: str) -> Sequence[Any]:
        """Run; of the tangents that it is planned without, all or none are there."""
        if boxed[self._absent[0]] is None:
            for position in reversed(self._absent):
                del boxed[position]
            return super().__call__(boxed, stream=stream)
        if self._complete is None:
            assert self._compile is not None
            assert self._complete_graph is not None
            self._complete = self._compile(self._complete_graph)
        return self._complete(boxed)

    def compile(self, mode: CompileMode, fake_mode: compat.FakeTensorMode | None) -> None:
        """Compile the backward without the absent tangents."""
        self._compile = functools.partial(_compiled, mode=mode, fake_mode=fake_mode)
        with compat.unset_fake_temporarily():
            graph = copy.deepcopy(self.graph)
        placeholders = list(graph.graph.find_nodes(op="placeholder"))
        for position in self._absent:
            graph.graph.erase_node(placeholders[position])
        self._run = self._compile(graph)


def _compiled(graph: fx.GraphModule, mode: CompileMode, fake_mode: compat.FakeTensorMode | None) -> Boxed:
    if mode == "inductor" and not _is_trivial(graph):
        return _compile_with_inductor(graph, fake_mode)
    boxed: Boxed = compat.use_boxed_calls(graph).forward
    return boxed


def _compile_with_inductor(graph: fx.GraphModule, fake_mode: compat.FakeTensorMode | None) -> Boxed:
    if row_loops(graph.graph):
        return compile_around_loop(graph, lambda piece: _compile_with_inductor(piece, fake_mode))
    return compat.compile_with_inductor(graph, fake_mode)


def _is_trivial(graph: fx.GraphModule) -> bool:
    return not any(node.op == "call_function" for node in graph.graph.nodes)


class ArtefactSet:
    """All artefacts of a program; each is compiled when a schedule first needs it."""

    def __init__(self, mode: CompileMode) -> None:
        self.mode = mode
        self._handles: dict[tuple[Template, Role], Artefact] = {}

    def handle(self, template: Template, role: Role) -> Artefact:
        """Return the handle of one part of a template."""
        key = (template, role)
        if key not in self._handles:
            assert template.parts is not None
            graph = template.parts.graphs().get(role)
            assert graph is not None, f"{template.name} has no {role}"
            does_without = role == "backward" and template.parts.complete_backward is not None
            self._handles[key] = BackwardArtefact(template) if does_without else Artefact(template, role, graph)
        return self._handles[key]

    def compile(self) -> None:
        """Compile the handles that are not compiled yet."""
        for (template, _), artefact in self._handles.items():
            if not artefact.compiled:
                artefact.compile(self.mode, compat.fake_mode_of(template.joint.graph))

    @property
    def compiled_count(self) -> int:
        """How many artefacts were compiled; constant in the depth of the model."""
        return sum(artefact.compiled for artefact in self._handles.values())
