"""The backend that ``torch.compile(model, backend="protrain")`` finds through its entry point.

One call per graph that Dynamo captures::

    protrain(gm, example_inputs)
      describe_inputs            names and kinds, while the real inputs are at hand
      AOTAutograd                traces the joint graph, then calls
        partition                  capture -> structure passes -> schedule passes -> artefacts = CompiledGraph;
                                   returns two stub graphs that tell AOTAutograd about one token and the tangents
        forward/backward compiler  return the CompiledGraph's methods
        inference_compiler         the same road for a graph without a backward
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes import structure_pipeline
from protrain_compile import compat
from protrain_compile.capture import capture_program, describe_inputs, model_name
from protrain_compile.errors import ProtrainError
from protrain_compile.options import Options
from protrain_compile.report.emit import announce
from protrain_compile.report.registry import live_graphs
from protrain_compile.runtime.compiled_graph import CompiledGraph, Origin
from protrain_compile.schedule import Schedule

log = logging.getLogger("protrain_compile.backend")


def protrain(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph; see ``Options`` for what ``options`` takes.

    Raises:
        OptionError: If an option is unknown or has a bad value, or ``mode`` is given.
        PlanError: If the plan is malformed or does not fit the graph's blocks.
    """
    with compat.errors_as_themselves():
        build = _Build(gm, Options.parse(options, mode))
        return compat.run_aot(
            gm,
            example_inputs,
            partition=build.partition,
            forward_compiler=build.compile_forward,
            backward_compiler=build.compile_backward,
            inference_compiler=build.compile_inference,
        )


class _Build:
    """The callbacks of one AOTAutograd run; they share the CompiledGraph that the first of them makes."""

    def __init__(self, gm: fx.GraphModule, options: Options) -> None:
        self.start = time.perf_counter()
        self.options = options
        self.name = model_name(gm)
        self.described = describe_inputs(gm)
        found = compat.graph_break(gm)
        self.origin = Origin(*found) if found is not None else Origin()
        self.graph: CompiledGraph | None = None

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Build the CompiledGraph of a joint graph; return what AOTAutograd needs to know of the two halves."""
        num_primals = len(joint_inputs[0])
        graph = self._build(joint, num_primals, num_fwd_outputs, differentiable=True)
        return forward_stub(graph), backward_stub(graph)

    def compile_forward(self, stub: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        assert self.graph is not None
        return _boxed(self.graph.forward)

    def compile_backward(self, stub: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        assert self.graph is not None
        return _boxed(self.graph.backward)

    def compile_inference(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        results: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
        graph = self._build(forward, len(inputs), len(results), differentiable=False)
        return _boxed(graph.inference)

    def _build(
        self, module: fx.GraphModule, num_primals: int, num_outputs: int, *, differentiable: bool
    ) -> CompiledGraph:
        program = capture_program(self.name, module, self.described, num_primals, num_outputs, differentiable)
        inductor = self.options.compile == "inductor"
        pipeline = structure_pipeline(
            inductor=inductor,
            inductor_draws=inductor and not compat.random_falls_back(),
            print_after=self.options.print_after,
        )
        records = pipeline.run(program)
        self.graph = CompiledGraph(program, self.options, self.origin, records, self._announce)
        self.graph.build_s = time.perf_counter() - self.start
        live_graphs.add(self.graph)
        if not self.graph.plans_when_called:
            self._announce(self.graph, self.graph.default)
        return self.graph

    def _announce(self, graph: CompiledGraph, schedule: Schedule) -> None:
        """Show a schedule; one that is planned is known when the model is first called."""
        announce(graph, schedule, self.options.schedule)


def _boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def call(arguments: list[Any]) -> Any:
        return function(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def traced_by_another_compiler(*_: Any) -> Any:
    """Stand for the schedule in the graphs that AOTAutograd sees; those graphs are never run.

    Raises:
        ProtrainError: If something runs them all the same, as compiled autograd would.
    """
    raise ProtrainError(
        "the protrain backward cannot be traced by another compiler: turn compiled autograd off "
        "(torch._dynamo.config.compiled_autograd = False)"
    )


def forward_stub(graph: CompiledGraph) -> fx.GraphModule:
    """Return a graph that tells AOTAutograd what the forward takes and returns: its outputs and one token."""
    program = graph.program
    outputs = program.results[: program.num_outputs]
    return _stub(program.primals, outputs, _token_value(program.graph))


def backward_stub(graph: CompiledGraph) -> fx.GraphModule:
    """Return a graph that tells AOTAutograd what the backward takes (token, tangents) and returns (gradients)."""
    program = graph.program
    stub = fx.Graph()
    token = stub.placeholder("protrain_token")
    token.meta["val"] = _token_value(program.graph)
    sources = [token, *(_placeholder(stub, node) for node in program.tangents)]
    made = stub.call_function(traced_by_another_compiler, tuple(sources))
    gradients = program.results[program.num_outputs :]
    stub.output(tuple(_item(stub, made, i, each) for i, each in enumerate(gradients)))
    return fx.GraphModule({}, stub)


def _stub(primals: Sequence[fx.Node], outputs: Sequence[Any], token: Any) -> fx.GraphModule:
    stub = fx.Graph()
    made = stub.call_function(traced_by_another_compiler, tuple(_placeholder(stub, node) for node in primals))
    results = [_item(stub, made, i, each) for i, each in enumerate(outputs)]
    last = stub.call_function(_get, (made, len(outputs)))
    last.meta["val"] = token
    stub.output((*results, last))
    return fx.GraphModule({}, stub)


def _placeholder(stub: fx.Graph, source: fx.Node) -> fx.Node:
    node = stub.placeholder(source.name)
    node.meta = dict(source.meta)
    return node


def _item(stub: fx.Graph, made: fx.Node, index: int, like: Any) -> Any:
    if not isinstance(like, fx.Node):
        return like
    node = stub.call_function(_get, (made, index))
    node.meta["val"] = like.meta.get("val")
    return node


def _get(results: Sequence[Any], index: int) -> Any:
    return results[index]


def _token_value(module: fx.GraphModule) -> torch.Tensor:
    fake_mode = compat.fake_mode_of(module.graph)
    if fake_mode is None:
        return torch.empty((), dtype=torch.int64)
    with fake_mode:
        return torch.empty((), dtype=torch.int64, device="cpu")
