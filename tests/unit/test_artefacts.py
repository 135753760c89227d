"""Artefacts: named, compiled once, boxed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.capture import Graph
from torch import Tensor

from protrain_compile.artefacts import Artefact, ArtefactSet
from protrain_compile.program import Parts, Template

aten = torch.ops.aten


def template() -> Template:
    """Return a template of ``y = sin(x) * w`` that saves ``sin(x)``."""
    forward = Graph()
    x, w = forward.input("primals_1", 4), forward.input("primals_2", 4)
    sine = forward.call(aten.sin.default, x)
    parts = Parts(forward.module(forward.call(aten.mul.Tensor, sine, w), sine), (0, 1), 1)
    return Template("t7", parts.forward, ("value", "parameter"), 1, parts)


@pytest.fixture(params=["eager", "inductor"])
def artefacts(request: pytest.FixtureRequest) -> ArtefactSet:
    return ArtefactSet(request.param)


def test_names() -> None:
    handle = ArtefactSet("eager").handle(template(), "forward")
    assert repr(handle) == handle.__name__ == "t7_forward"
    assert handle.__module__ == "artefact"
    assert handle.role == "forward"


def test_a_handle_is_made_once() -> None:
    artefacts, first, second = ArtefactSet("eager"), template(), template()
    assert artefacts.handle(first, "forward") is artefacts.handle(first, "forward")
    assert artefacts.handle(first, "forward") is not artefacts.handle(second, "forward")


def test_a_part_that_does_not_exist() -> None:
    with pytest.raises(AssertionError, match="t7 has no backward"):
        ArtefactSet("eager").handle(template(), "backward")


def test_a_call_before_compilation() -> None:
    handle = ArtefactSet("eager").handle(template(), "forward")
    assert not handle.compiled
    with pytest.raises(AssertionError, match="t7_forward was scheduled before it was compiled"):
        handle([torch.ones(4)] * 2, stream="compute")


def test_results(artefacts: ArtefactSet) -> None:
    handle = artefacts.handle(template(), "forward")
    artefacts.compile()
    x, w = torch.randn(4), torch.randn(4)
    y, sine = handle([x, w], stream="compute")
    torch.testing.assert_close(y, x.sin() * w)
    torch.testing.assert_close(sine, x.sin())


def test_each_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = Artefact.compile

    def spy(artefact: Artefact, *arguments: Any) -> None:
        compiled.append(artefact.__name__)
        original(artefact, *arguments)

    monkeypatch.setattr(Artefact, "compile", spy)
    artefacts, first = ArtefactSet("eager"), template()
    artefacts.handle(first, "forward")
    assert artefacts.compiled_count == 0
    artefacts.compile()
    artefacts.handle(first, "forward")
    artefacts.compile()
    assert compiled == ["t7_forward"]
    assert artefacts.compiled_count == 1


def test_inputs_die_inside_the_call(artefacts: ArtefactSet) -> None:
    """The list is emptied, and nothing else holds its tensors."""
    handle = artefacts.handle(template(), "forward")
    artefacts.compile()
    boxed: list[Tensor] = [torch.randn(4), torch.randn(4)]
    references = [weakref.ref(each) for each in boxed]
    results = handle(boxed, stream="compute")
    gc.collect()
    assert boxed == []
    assert [reference() for reference in references] == [None, None]
    assert len(results) == 2


def test_a_graph_without_calls_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    parts = Parts(graph.module(graph.input("primals_1", 4)), (0,), 1)
    artefacts = ArtefactSet("inductor")
    handle = artefacts.handle(Template("t0", parts.forward, ("value",), 1, parts), "forward")
    monkeypatch.setattr("protrain_compile.compat.compile_with_inductor", None)
    artefacts.compile()
    x = torch.ones(4)
    assert handle([x], stream="compute")[0] is x
