"""Programs and schedules for unit tests: captured from small models, or built by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.light import GPT
from support.models import tokens
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import protrain_compile
from passes import schedule_pipeline
from protrain_compile import ModelSchedule, Plan, compat
from protrain_compile.artefacts import ArtefactSet
from protrain_compile.capture import capture_program, describe_inputs, model_name
from protrain_compile.plan import POLICIES
from protrain_compile.program import Program
from protrain_compile.schedule import Schedule


class _CapturedError(Exception):
    """Ends a compilation whose program was captured."""


def capture(model: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **keywords: Any) -> Program:
    """Return the Program of ``model``'s first graph as the passes receive it; no pass has run."""
    found: list[Program] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        described = describe_inputs(gm)

        def finish(graph: fx.GraphModule, num_primals: int, num_outputs: int, differentiable: bool) -> Any:
            found.append(capture_program(model_name(gm), graph, described, num_primals, num_outputs, differentiable))
            raise _CapturedError

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            return finish(joint, len(joint_inputs[0]), num_fwd_outputs, True)

        def inference(graph: fx.GraphModule, example: Sequence[Any]) -> Any:
            return finish(graph, len(example), len(graph.graph.output_node().args[0]), False)

        return compat.run_aot(
            gm,
            example_inputs,
            partition=partition,
            forward_compiler=inference,
            backward_compiler=inference,
            inference_compiler=inference,
        )

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, dynamic=dynamic)(*inputs, **keywords)
    except Exception:
        if not found:
            raise
    return found[0]


def compiled(
    model: nn.Module, *inputs: Any, plan: Plan | str = "keep", dynamic: bool | None = None, **options: Any
) -> tuple[nn.Module, ModelSchedule]:
    """Compile ``model`` (ATen operations one by one, nothing printed), run one forward, and return its schedule too."""
    torch._dynamo.reset()
    plan = Plan.uniform(plan) if isinstance(plan, str) and plan in POLICIES else plan
    options = {"compile": "eager", "schedule": "off", "plan": plan, **options}
    function: Any = torch.compile(model, backend="protrain", dynamic=dynamic, options=options)
    function(*inputs)
    return function, protrain_compile.schedule(function)


def schedule_of(model: nn.Module, *inputs: Any, plan: Plan | str = "keep", **options: Any) -> Schedule:
    """Return the Schedule of ``model``'s first graph."""
    return compiled(model, *inputs, plan=plan, **options)[1].parts[0].schedule


@functools.cache
def gpt_program(blocks: int = 3, *, tied: bool = True) -> Program:
    """Return the Program of a small decoder with its templates; shared, so tests must not change it."""
    return schedule_of(GPT(blocks, tied=tied), tokens()).program


def write_schedule(program: Program, plan: Plan | str) -> Schedule:
    """Return new graphs for ``plan``, ready to run."""
    plan = Plan.uniform(plan) if isinstance(plan, str) else plan
    schedule = Schedule(program, plan.fit(program.block_names), ArtefactSet("eager"))
    schedule_pipeline().run(schedule)
    schedule.artefacts.compile()
    return schedule


def mixed(*letters: str) -> Plan:
    """Return the Plan that ``"krspwx"`` stands for: the first letters, or as below."""
    names: dict[str, Any] = {"k": "keep", "r": "recompute", "s": "swap"}
    names |= {"p": "recompute_products", "w": "recompute_pointwise", "x": "swap_products"}
    return Plan(policies=tuple(names[letter] for letter in "".join(letters)))


class Graph:
    """Builds an fx graph by hand; every node gets a fake value.

    >>> g = Graph(); x = g.input("x", 2, 3); g.call(aten.relu.default, x); g.module(x)
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.tensor(*shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, meta: dict[str, Any] | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        real = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self.mode:
            node.meta["val"] = target(*real[0], **real[1])
        node.meta.update(meta or {})
        return node

    def module(self, *results: Any) -> fx.GraphModule:
        self.graph.output(tuple(results))
        return fx.GraphModule({}, self.graph)
