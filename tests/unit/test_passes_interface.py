"""The pipeline: order checked when built, contracts checked after each pass, records, printing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.capture import Graph
from torch import fx

from passes import pass_names, schedule_pipeline, structure_pipeline
from passes.interface import Pipeline
from passes.verify import VerifierError
from protrain_compile import PipelineError

aten = torch.ops.aten


@dataclasses.dataclass
class State:
    module: fx.GraphModule

    def graph_modules(self) -> dict[str, fx.GraphModule]:
        return {"only": self.module}


@pytest.fixture
def state() -> State:
    graph = Graph()
    x = graph.input("x", 2, 3)
    return State(graph.module(graph.call(aten.relu.default, x)))


def make_pass(
    name: str, run: Callable[[Any], bool] = lambda _: False, requires: set[str] | None = None, provides: str = ""
) -> Any:
    class Made:
        pass

    made: Any = Made()
    made.name, made.run = name, run
    made.requires, made.provides = frozenset(requires or ()), frozenset({provides} - {""})
    return made


def add_sigmoid(state: State) -> bool:
    graph = state.module.graph
    relu = next(iter(graph.find_nodes(op="call_function", target=aten.relu.default)))
    with graph.inserting_after(relu):
        made = graph.call_function(aten.sigmoid.default, (relu,))
    relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return True


def test_an_unmet_need_is_refused_when_built() -> None:
    with pytest.raises(PipelineError, match="pass second requires a, b, which no earlier pass provides"):
        Pipeline([make_pass("second", requires={"a", "b", "c"})], given={"c"})


def test_the_order_counts() -> None:
    first, second = make_pass("first", provides="a"), make_pass("second", requires={"a"})
    Pipeline([first, second])
    with pytest.raises(PipelineError, match="pass second requires a"):
        Pipeline([second, first])


def test_a_pass_does_not_meet_its_own_need() -> None:
    with pytest.raises(PipelineError, match="pass loop requires a"):
        Pipeline([make_pass("loop", requires={"a"}, provides="a")])


def test_two_providers_are_refused() -> None:
    with pytest.raises(PipelineError, match="pass again provides a, which an earlier pass provides already"):
        Pipeline([make_pass("first", provides="a"), make_pass("again", provides="a")])
    with pytest.raises(PipelineError, match="pass again provides a"):
        Pipeline([make_pass("again", provides="a")], given={"a"})


def test_the_shipped_passes_are_named_in_order() -> None:
    pipelines = (structure_pipeline(inductor=False, inductor_draws=False), schedule_pipeline())
    assert pass_names() == tuple(each.name for pipeline in pipelines for each in pipeline.passes)
    assert len(set(pass_names())) == len(pass_names())


def test_no_shipped_structure_pass_can_be_left_out_or_come_last() -> None:
    passes = list(structure_pipeline(inductor=False, inductor_draws=False).passes)
    for i, each in enumerate(passes[:-1]):
        others = passes[:i] + passes[i + 1 :]
        for order in (others, [*others, each]):
            with pytest.raises(PipelineError, match=r"requires .*which no earlier pass provides"):
                Pipeline(order, given={"captured"})


def test_records(state: State) -> None:
    passes = [make_pass("look"), make_pass("add_sigmoid", add_sigmoid)]
    look, add = Pipeline(passes).run(state)
    assert (look.name, look.changed, look.op_counts) == ("look", False, {})
    assert (add.name, add.changed, add.op_counts) == ("add_sigmoid", True, {"aten.sigmoid.default": 1})
    assert look.ms >= 0
    assert add.ms > 0


def test_records_count_what_went(state: State) -> None:
    def replace(state: State) -> bool:
        for node in state.module.graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = aten.sigmoid.default
        return True

    (record,) = Pipeline([make_pass("replace", replace)]).run(state)
    assert record.op_counts == {"aten.relu.default": -1, "aten.sigmoid.default": 1}


def test_a_false_unchanged_is_refused(state: State) -> None:
    def lie(state: State) -> bool:
        add_sigmoid(state)
        return False

    with pytest.raises(PipelineError, match="pass lie says that it changed nothing, but the graphs differ"):
        Pipeline([make_pass("lie", lie)]).run(state)


def test_a_false_unchanged_is_seen_in_arguments_too(state: State) -> None:
    def lie(state: State) -> bool:
        relu = next(iter(state.module.graph.find_nodes(op="call_function", target=aten.relu.default)))
        relu.kwargs = {"extra": 1}
        return False

    with pytest.raises(PipelineError, match="pass lie says"):
        Pipeline([make_pass("lie", lie)]).run(state)


def test_a_false_changed_is_refused(state: State) -> None:
    with pytest.raises(PipelineError, match="pass boast says that it changed a graph, but none differs"):
        Pipeline([make_pass("boast", lambda _: True)]).run(state)


def test_a_new_graph_is_a_change(state: State) -> None:
    graphs: dict[str, fx.GraphModule] = {}

    @dataclasses.dataclass
    class Several:
        def graph_modules(self) -> dict[str, fx.GraphModule]:
            return graphs

    def write(_: Any) -> bool:
        graphs["new"] = state.module
        return True

    (record,) = Pipeline([make_pass("write", write)]).run(Several())
    assert record.changed
    assert record.op_counts["aten.relu.default"] == 1


def test_a_malformed_graph_names_the_pass_and_the_graph(state: State) -> None:
    def tear(state: State) -> bool:
        add_sigmoid(state)
        sigmoid = next(iter(state.module.graph.find_nodes(op="call_function", target=aten.sigmoid.default)))
        next(iter(state.module.graph.nodes)).prepend(sigmoid)
        return True

    with pytest.raises(PipelineError, match=r"pass tear left the only graph malformed: .*before it has been defined"):
        Pipeline([make_pass("tear", tear)]).run(state)


def test_an_exception_in_a_pass_is_passed_on(state: State) -> None:
    def fail(_: State) -> bool:
        raise ZeroDivisionError("as it was")

    with pytest.raises(ZeroDivisionError, match="as it was"):
        Pipeline([make_pass("fail", fail)]).run(state)


def test_the_verifier_runs_after_every_pass_and_stops_the_rest(state: State) -> None:
    seen: list[str] = []

    def verify(_: State, name: str) -> None:
        seen.append(name)
        if name == "two":
            raise VerifierError(f"after {name}: broken")

    with pytest.raises(VerifierError, match="after two: broken"):
        Pipeline([make_pass(name) for name in ("one", "two", "three")], verify=verify).run(state)
    assert seen == ["one", "two"]


def test_print_after(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    passes = [make_pass("look"), make_pass("add_sigmoid", add_sigmoid), make_pass("later")]
    Pipeline(passes, print_after="add_sigmoid").run(state)
    printed = capsys.readouterr().out
    assert printed.startswith("# after add_sigmoid: only\n")
    assert printed.count("# after") == 1
    assert "torch.ops.aten.sigmoid.default" in printed


def test_nothing_is_printed_by_default(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    Pipeline([make_pass("look")]).run(state)
    assert capsys.readouterr().out == ""
