"""Everything that depends on the PyTorch version, in one place.

Checked on torch 2.11, 2.13 and 2.14. What is imported here is private to PyTorch; the tests of this module say so when
a new version moves or changes it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from protrain_compile.errors import ProtrainError, VersionError

log = logging.getLogger("protrain_compile.compat")

OLDEST = (2, 11)
NEWEST_TESTED = (2, 14)


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuse a torch that is too old; log a warning for one newer than tested.

    Raises:
        VersionError: If ``version`` is older than the oldest supported one.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else OLDEST
    if found < OLDEST:
        raise VersionError(
            f"protrain needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is torch {version}: "
            f"pip install --upgrade 'torch>={OLDEST[0]}.{OLDEST[1]}'"
        )
    if found > NEWEST_TESTED:
        log.warning(
            "torch %s is newer than the newest that protrain was tested with (%d.%d); "
            "if something fails inside PyTorch, try that version",
            version,
            *NEWEST_TESTED,
        )


check_torch_version()

import torch._functorch.config as functorch_config  # noqa: E402
import torch._functorch.partitioners as partitioners  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.exc import ShortenTraceback  # noqa: E402
from torch._guards import TracingContext, tracing  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # noqa: E402
from torch.fx.graph import CodeGen  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy  # noqa: E402

MUST_SAVE = CheckpointPolicy.MUST_SAVE


def run_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    forward_compiler: Callable[..., Any],
    backward_compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
) -> Callable[..., Any]:
    """Trace ``gm`` through AOTAutograd with the given partitioner and compilers.

    Donated buffers are off: the saved token must survive the backward call. Its tangents may be None. Mutations of
    inputs leave the graph as outputs and are copied back by AOTAutograd, also for inference, so that a graph may be
    run in pieces.
    """
    from torch._inductor.decomposition import select_decomp_table

    def compile_forward(*arguments: Any) -> Any:
        _donate_nothing()
        return forward_compiler(*arguments)

    with functorch_config.patch(donated_buffer=False, functionalize_rng_ops=False):
        compile_graph = aot_autograd(
            fw_compiler=compile_forward,
            bw_compiler=backward_compiler,
            inference_compiler=inference_compiler,
            partition_fn=partition,
            decompositions=select_decomp_table,
            keep_inference_input_mutations=False,
        )
        compiled: Callable[..., Any] = compile_graph(gm, example_inputs)

    def call(*arguments: Any) -> Any:
        begin = torch._C._autograd._get_sequence_nr()
        results = compiled(*arguments)
        _make_no_zeros(results, begin)
        return results

    return call


def _make_no_zeros(results: Any, begin: int) -> None:
    """Let the ``autograd.Function`` that made ``results`` take None for a tangent that autograd does not have.

    It is the one that was applied since the sequence number ``begin``: inputs that are returned have others.
    """
    for result in results if isinstance(results, list | tuple) else ():
        node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
        if hasattr(node, "set_materialize_grads") and node._sequence_nr() >= begin:
            node.set_materialize_grads(False)


class _Carrier(ShortenTraceback):
    """Brings an error through Dynamo, which wraps any other kind as ``BackendCompilerFailed`` and cuts its message up.

    Dynamo passes its own errors with long tracebacks on, and lastly raises what their ``remove_dynamo_frames`` returns.
    """

    def __init__(self, error: ProtrainError) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> ProtrainError:  # type: ignore[override]
        return self.error


@contextlib.contextmanager
def errors_as_themselves() -> Iterator[None]:
    """Let the user see a ProtrainError raised inside as it is, where Dynamo is the caller."""
    try:
        yield
    except ProtrainError as error:
        if TracingContext.try_get() is None:  # called by hand
            raise
        raise _Carrier(error) from error


def _donate_nothing() -> None:
    """Tell AOTAutograd that its backward may be called with ``retain_graph``.

    It reads a list that it did not make, as donated buffers were off while it compiled, for one that is not empty.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def input_position(placeholder: fx.Node) -> int | None:
    """Return which of the backend's example inputs a joint-graph placeholder is; None if AOTAutograd made it."""
    index = getattr(placeholder.meta.get("desc"), "idx", None)
    return index if isinstance(index, int) else None


def mutated_positions(output: fx.Node) -> set[int]:
    """Return which of the backend's example inputs the graph gives a new value, from its output descriptors."""
    found = set()
    for description in output.meta.get("desc") or ():
        index = getattr(getattr(description, "mutated_input", None), "idx", None)
        if isinstance(index, int):
            found.add(index)
    return found


def traced_example(placeholder: fx.Node) -> tuple[Any, str]:
    """Return the real value and the source expression that Dynamo recorded for a placeholder of its graph."""
    grapharg = placeholder.meta.get("grapharg")
    if grapharg is None:
        return None, placeholder.name
    source = getattr(grapharg, "source", None)
    name = getattr(source, "name", placeholder.name)
    return grapharg.example, str(name() if callable(name) else name)


def graph_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return ``(reason, place)`` of the graph break that ended Dynamo's graph, or None if it ended by itself."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    place = ""
    if reason.user_stack:
        frame = reason.user_stack[-1]
        place = f"{frame.filename}:{frame.lineno}"
    return str(reason.reason).strip().splitlines()[0], place


def traced_module_name() -> str | None:
    """Return the class name of the module whose call Dynamo is tracing, while the backend runs; None for a function."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame_locals = InstructionTranslator.current_tx().f_locals
    except AttributeError:  # the backend was called by hand
        return None
    arguments = frame_locals.get("args")  # of a decorator's ``wrapper(*args, **kwargs)``
    first = arguments[:1] if isinstance(arguments, tuple) else ()
    for value in (frame_locals.get("self"), *first):
        if isinstance(value, torch.nn.Module):
            return type(value).__name__
    return None


def keeps_graph() -> bool:
    """Whether the backward that is running was called with ``retain_graph`` (or ``create_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the fake mode that the values of ``graph`` belong to."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, list | tuple) else (value,):
            mode = getattr(each, "fake_mode", None)
            if mode is not None:
                return mode  # type: ignore[no-any-return]
    return None


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a tensor without data, as tracing uses."""
    return isinstance(value, FakeTensor)


def propagate_fakes(module: fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode) -> None:
    """Set the fake value of every node of ``module`` from those of its placeholders."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(module, fake_mode).propagate_dont_convert_inputs(*inputs)


@contextlib.contextmanager
def fresh_tracing(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Enter a tracing context of its own: Inductor reports output strides to the current one, once per graph."""
    from torch._inductor.virtualized import V

    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        yield


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run operations for real and unseen, whatever modes in Python are active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def random_falls_back() -> bool:
    """Whether the user asked Inductor to draw random numbers as eager does."""
    return bool(inductor_config.fallback_random)


def prepare_joint(module: fx.GraphModule, fake_mode: FakeTensorMode | None, *, keep_strides: bool = True) -> None:
    """Run Inductor's joint-graph passes (attention patterns, no-op removal, padding) on ``module`` in place.

    A product that was padded is a slice of a larger one: the passes leave the fake values after it with the strides of
    before, by which a saved value would be compiled differently on either side. Results keep their traced strides if
    ``keep_strides``.
    """
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    before = set(module.graph.nodes)
    traced = [_strides(result) for result in _results(module)]
    with fresh_tracing(fake_mode), unset_fake_temporarily():
        joint_graph_passes(module)
    pads = (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.cat.default)
    padded = any(node.target in pads for node in set(module.graph.nodes) - before)
    if not padded or fake_mode is None:
        return
    propagate_fakes(module, [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")], fake_mode)
    for result, strides in zip(_results(module), traced, strict=True):
        if keep_strides and strides is not None and strides != _strides(result):
            _restride(result, strides)
    module.recompile()


def _results(module: fx.GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _strides(result: Any) -> tuple[Any, ...] | None:
    value = result.meta.get("val") if isinstance(result, fx.Node) else None
    return value.stride() if isinstance(value, torch.Tensor) else None


def _restride(result: fx.Node, strides: tuple[Any, ...]) -> None:
    """Return a copy with other strides from the graph in place of ``result``."""
    value, graph = result.meta["val"], result.graph
    aten = torch.ops.aten
    options = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(graph.output_node()):
        empty = graph.call_function(aten.empty_strided.default, (list(value.shape), list(strides)), options)
        copied = graph.call_function(aten.copy.default, (empty, result))
    with value.fake_mode:
        empty.meta["val"] = torch.empty_strided(value.shape, strides, **options)
        copied.meta["val"] = torch.empty_strided(value.shape, strides, **options)
    output = graph.output_node()
    output.args = (fx.node.map_arg(output.args[0], lambda node: copied if node is result else node),)


def partition(
    module: fx.GraphModule, num_outputs: int, static_inputs: list[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint subgraph by functorch's min-cut; ``static_inputs`` live anyway and cost nothing to save.

    Random draws must be marked to be saved. The partitioner goes by an operation's tag, which attention kernels carry
    whatever their dropout, and would wrap those of a user's checkpoint region in generator-state bookkeeping.
    """
    with mock.patch.object(partitioners, "has_recomputable_rng_ops", return_value=False):
        return partitioners.min_cut_rematerialization_partition(
            module, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static_inputs
        )


def compile_with_inductor(
    module: fx.GraphModule, fake_mode: FakeTensorMode | None
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile ``module`` with Inductor; the result takes its inputs in a list, which it empties.

    The graph is compiled as if it were no backward: Inductor would otherwise take the donated inputs of the whole
    captured graph for this one's and overwrite them. All outputs keep their traced strides.
    """
    import copy

    from torch._inductor.compile_fx import compile_fx_inner

    with unset_fake_temporarily():
        module = copy.deepcopy(module)
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fresh_tracing(fake_mode):
        compiled = compile_fx_inner(module, inputs, static_input_idxs=(), is_backward=False)
    assert callable(compiled)
    return compiled


class BoxedCodeGen(CodeGen):
    """Generates a ``forward`` that takes its inputs in one list and empties it, so that each dies at its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """Return the first lines of the function: unpack the list, then empty it."""
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
        lines = [f"def {self._func_name}(self, boxed){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = boxed")
        lines.append("    boxed.clear()")
        return "\n".join(lines)


def use_boxed_calls(module: fx.GraphModule) -> fx.GraphModule:
    """Make ``module.forward`` take one list, which it empties; return ``module``."""
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    return module


def inductor_settings() -> str:
    """Return a text that differs when any setting of Inductor that its code depends on does."""
    return inductor_config.get_hash().hex()


def arithmetic_settings() -> list[str | bool]:
    """Return the settings of PyTorch that the speed of kernels depends on, however the user set them."""
    products = torch.backends.cuda.matmul
    return [
        products.fp32_precision,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    ]


def use_expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Let PyTorch's CUDA allocator grow its segments, which leaves fewer gaps; return whether it was told to.

    A setting of the user's own (``PYTORCH_ALLOC_CONF=expandable_segments:False``) stays, and so does what else is set.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = next((environment[name] for name in names if environment.get(name)), "")
    if "expandable_segments" in given or "backend" in given:
        return False
    settings = ",".join(filter(None, (given, "expandable_segments:True")))
    torch._C._accelerator_setAllocatorSettings(settings)
    return True


def cuda_driver_version() -> int:
    """Return the version of the CUDA driver, such as 13000; 0 where there is none."""
    version: Any = getattr(torch._C, "_cuda_getDriverVersion", int)
    return int(version()) if torch.cuda.is_available() else 0


def all_gather_into(whole: torch.Tensor, shard: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """Fill ``whole`` from every rank's ``shard``; torch 2.13 has another name for it."""
    distributed: Any = torch.distributed
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(whole, shard, group=group)


def reduce_scatter_into(shard: torch.Tensor, whole: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """Sum every rank's ``whole``; write this rank's part to ``shard``. torch 2.13 has another name for it."""
    distributed: Any = torch.distributed
    reduce = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    reduce(shard, whole, group=group)


def group_timeout(group: torch.distributed.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """Return how long a rank waits in a collective of ``group``; None if the group does not say."""
    options: Any = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, datetime.timedelta) else None
