"""Tracing a model without memory: its joint graph with templates, as the backend would have it.

Parameters are emptied (``prepare`` does the same with those that it takes over), so a model of any size is traced on
any machine: shapes are all that tracing reads. The graph is that of the CPU, which keeps the same values for the
backward as a GPU does: its attention is fused, too. Where a GPU has no fused attention (a mask, and heads whose size is
no multiple of 16 bytes), the model is traced again with an unfused one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from passes import structure_pipeline
from protrain_compile import compat
from protrain_compile.capture import capture_program, describe_inputs, model_name
from protrain_compile.chunks import ParameterSpec
from protrain_compile.errors import TraceError
from protrain_compile.guards import ManagedParameter
from protrain_compile.managed import ManagedModel
from protrain_compile.packing import Preparation
from protrain_compile.program import Program, fake_value
from protrain_compile.update_book import UpdateBook

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a model is called with, on the CPU."""

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Return the Inputs that a tensor, a sequence (positional) or a mapping (by name) stands for."""
        if isinstance(value, Mapping):
            return cls(named={name: _on_cpu(each) for name, each in value.items()})
        values = value if isinstance(value, list | tuple) else (value,)
        return cls(tuple(_on_cpu(each) for each in values))

    def to(self, device: torch.device) -> Inputs:
        """Return them on ``device``."""
        positional = [each.to(device) if isinstance(each, torch.Tensor) else each for each in self.positional]
        named = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in self.named.items()}
        return Inputs(tuple(positional), named)


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A traced model that AdamW would train.

    Attributes:
        program: Its joint graph, segments and templates.
        specs: Its parameters, in module order.
        book: Their updates.
        places: Index of the parameter that each position among the graph's primals is.
        unfused: Whether it was traced with unfused attention.
    """

    program: Program
    specs: tuple[ParameterSpec, ...]
    book: UpdateBook
    places: Mapping[int, int]
    unfused: bool = False

    @property
    def first_uses(self) -> list[list[int]]:
        """Parameters (by index) that each segment uses, in execution order."""
        position_of = {node: i for i, node in enumerate(self.program.primals)}
        used = [[position_of[n] for n in s.inputs if n in position_of] for s in self.program.segments]
        return [[self.places[i] for i in positions if i in self.places] for positions in used]

    @property
    def read_as(self) -> dict[int, torch.dtype]:
        """Data type in which the graph reads each parameter."""
        inputs, primals = self.program.inputs, self.program.primals
        return {index: inputs[i].travels or fake_value(primals[i]).dtype for i, index in self.places.items()}


def trace_model(
    model: nn.Module, inputs: Inputs, preparation: Preparation, device: torch.device = CPU, *, unfused: bool = False
) -> TracedModel:
    """Return the traced ``model``, whose values are gone afterwards.

    Args:
        model: The model.
        inputs: What it is called with.
        preparation: What ``prepare`` would be told.
        device: Where the values of the graph lie: the CPU for planning alone, or where its parts shall run.
        unfused: Whether it is known already that devices have no fused kernel for its attention.

    Raises:
        TraceError: If the forward breaks into several graphs, fails, or gives nothing to differentiate.
    """
    empty_values(model, device)
    named = list(model.named_parameters())
    book = adamw_book(model)
    managed = ManagedModel(named, book, preparation)
    inputs = inputs.to(device)
    program, places = _capture_unfused(model, inputs) if unfused else _capture(model, inputs)
    if device.type == "cpu" and not unfused and has_unfused_attention(program):
        torch._dynamo.reset()
        unfused = True
        program, places = _capture_unfused(model, inputs)
    structure_pipeline(inductor=True, inductor_draws=True).run(program)
    return TracedModel(program, managed.specs, book, places, unfused)


def has_unfused_attention(program: Program) -> bool:
    """Whether an attention of a CPU's graph is one that CUDA devices have no fused kernel for.

    With a mask they have one for heads of a multiple of 16 bytes only; without one, heads are padded.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    found = program.graph.graph.find_nodes(op="call_function", target=attention)
    queries = [fake_value(node.args[0]) for node in found if node.kwargs.get("attn_mask") is not None]
    return any(query.shape[-1] * query.dtype.itemsize % 16 for query in queries)


def adamw_book(model: nn.Module) -> UpdateBook:
    """Return the updates of a model that AdamW trains; its values are not read.

    Raises:
        TraceError: If there is nothing to train.
    """
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise TraceError("MODEL has no trainable parameter, so there is no training to plan")
    groups = [0 if parameter.requires_grad else None for parameter in parameters]
    return UpdateBook(torch.optim.AdamW(trainable), groups, [parameter.dtype for parameter in parameters])


def empty_values(model: nn.Module, device: torch.device = CPU) -> None:
    """Move a model from ``meta`` to ``device``: parameters without memory, buffers as zeros; ties stay."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(_hollow(parameter, device), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made.setdefault(id(buffer), torch.zeros_like(buffer, device=device))


def _hollow(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    like = torch.empty(0, dtype=parameter.dtype, device=device)
    like.set_(like.untyped_storage(), 0, parameter.shape, parameter.stride())
    like.untyped_storage().resize_(0)
    return like


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros_like(value, device="cpu") if value.is_meta else value.cpu()


class _CapturedError(Exception):
    """Ends a compilation as soon as its program was captured: nothing is compiled or run."""


Places = dict[int, int]
"""Index of the parameter that each position among the graph's primals is."""


def _capture_unfused(model: nn.Module, inputs: Inputs) -> tuple[Program, Places]:
    with sdpa_kernel(SDPBackend.MATH):
        return _capture(model, inputs)


def _capture(model: nn.Module, inputs: Inputs) -> tuple[Program, Places]:
    found: list[tuple[Program, Places]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        described, name, indices = describe_inputs(gm), model_name(gm), _parameter_indices(gm)

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            program = capture_program(name, joint, described, len(joint_inputs[0]), num_fwd_outputs, True)
            positions = map(compat.input_position, program.primals)
            found.append((program, {i: indices[p] for i, p in enumerate(positions) if p is not None and p in indices}))
            raise _CapturedError

        def no_backward(*_: Any) -> Any:
            raise TraceError("MODEL gives nothing to differentiate: its forward must return the loss")

        return compat.run_aot(
            gm,
            example_inputs,
            partition=partition,
            forward_compiler=no_backward,
            backward_compiler=no_backward,
            inference_compiler=no_backward,
        )

    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs.positional, **inputs.named)
    except Exception as error:
        if not found:
            cause = _innermost(error)
            if isinstance(cause, TraceError):
                raise cause from None
            raise TraceError(f"MODEL cannot be traced: {_reason(cause)}") from error
    return found[0]


def _parameter_indices(gm: fx.GraphModule) -> Places:
    """Return the index of the managed parameter that each input of Dynamo's graph is."""
    examples = (compat.traced_example(node)[0] for node in gm.graph.find_nodes(op="placeholder"))
    return {i: each._index for i, each in enumerate(examples) if isinstance(each, ManagedParameter)}


def _innermost(error: BaseException) -> BaseException:
    """Return the first cause, which is what the user's code did; Dynamo keeps a backend's error apart."""
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = cause
    return error


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of Dynamo's about an operation on its inputs, also what that one said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines[1:] if "got RuntimeError" in line or "got TypeError" in line), "")
    return ": ".join(filter(None, (type(error).__name__, *lines[:1], said)))
