"""What protrain leans on inside PyTorch. Each test fails if a new version moves or changes it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support.capture import Graph, capture
from support.models import WIDTH, GPTBlock
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import make_boxed_func

from protrain_compile import VersionError, compat

aten = torch.ops.aten


class Scale(nn.Module):
    """One parameter, one buffer that counts calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return (x * self.weight).sum()


def dynamo_graphs(model: Any, *inputs: Any, look: Any = lambda gm: None) -> list[Any]:
    """Run ``model`` with a backend that records ``look(gm)`` while it runs, and then runs the graph as it is."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        found.append(look(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*inputs)
    return found


# --- versions


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", "2.14.0a0+gitabc", "2.11"])
def test_tested_versions(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "protrain_compile"):
        compat.check_torch_version(version)
    assert caplog.text == ""


@pytest.mark.parametrize("version", ["2.10.1", "1.13.1", "2.9"])
def test_older_versions_are_refused(version: str) -> None:
    with pytest.raises(VersionError, match=r"needs torch 2\.11 or newer, and this is torch .*pip install --upgrade"):
        compat.check_torch_version(version)


@pytest.mark.parametrize("version", ["2.15.0", "2.100.0", "3.0.0"])
def test_newer_versions_are_warned_about(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "protrain_compile"):
        compat.check_torch_version(version)
    assert f"torch {version} is newer than the newest that protrain was tested with (2.14)" in caplog.text


def test_a_version_that_is_no_number_passes() -> None:
    compat.check_torch_version("nightly")


# --- what Dynamo records


def test_dynamo_records_the_real_inputs_and_their_sources() -> None:
    model, x = Scale(), torch.ones(4)

    def look(gm: fx.GraphModule) -> dict[str, Any]:
        found = [compat.traced_example(node) for node in gm.graph.find_nodes(op="placeholder")]
        return {source: example for example, source in found}

    (found,) = dynamo_graphs(model, x, look=look)
    by_kind = {"weight" in s: e for s, e in found.items() if "calls" not in s}
    assert by_kind[True] is model.weight
    assert by_kind[False] is x
    assert any(example is model.calls for example in found.values())


def test_a_placeholder_without_a_record() -> None:
    node = fx.Graph().placeholder("x")
    assert compat.traced_example(node) == (None, "x")


def test_a_graph_break_is_recorded() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    found = dynamo_graphs(function, torch.ones(3), look=compat.graph_break)
    assert len(found) == 2
    reason, place = found[0]
    assert "graph_break" in reason
    assert "\n" not in reason
    assert place.partition(":")[0].endswith("test_compat.py")
    assert found[1] is None


def test_modules_are_recorded_with_their_call_paths() -> None:
    program = capture(nn.Sequential(GPTBlock(), GPTBlock()), torch.randn(2, 3, WIDTH, requires_grad=True))
    stacks = [node.meta["nn_module_stack"] for node in program.calls() if "nn_module_stack" in node.meta]
    assert stacks
    path, kind = next(iter(stacks[0].values()))
    assert isinstance(path, str)
    assert isinstance(kind, type | str)
    backward = [node for node in program.calls() if "fwd_nn_module_stack" in node.meta]
    assert backward
    tags = {node.meta.get("partitioner_tag") for node in program.calls()}
    assert {"is_forward", "is_backward"} <= tags
    assert all("seq_nr" in node.meta for node in backward)


# --- AOTAutograd


def test_inputs_are_traced_back_by_descriptor() -> None:
    found: list[Any] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        placeholders = joint.graph.find_nodes(op="placeholder")
        found.append([compat.input_position(node) for node in placeholders[: len(joint_inputs[0])]])
        found.append(compat.mutated_positions(joint.graph.output_node()))
        return compat.partition(joint, num_fwd_outputs, [])

    names: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        names.extend(compat.traced_example(node)[1] for node in gm.graph.find_nodes(op="placeholder"))
        plain = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        return compat.run_aot(
            gm,
            inputs,
            partition=partition,
            forward_compiler=plain,
            backward_compiler=plain,
            inference_compiler=plain,
        )

    torch._dynamo.reset()
    model = Scale()
    torch.compile(model, backend=backend)(torch.ones(4)).backward()
    positions, mutated = found
    assert sorted(positions) == list(range(len(names)))
    assert ["calls" in names[i] for i in mutated] == [True]
    assert float(model.calls) == 1
    torch.testing.assert_close(model.weight.grad, torch.ones(4))


def test_nodes_without_descriptors() -> None:
    graph = Graph()
    module = graph.module(graph.input("x", 2))
    assert compat.input_position(next(iter(module.graph.nodes))) is None
    assert compat.mutated_positions(module.graph.output_node()) == set()


def test_new_values_of_mutated_inputs_come_first_and_leave_the_graph() -> None:
    for program in (capture(Scale(), torch.ones(4)), capture_inference(Scale(), torch.ones(4))):
        assert program.num_outputs == 2
        (position,) = [i for i, source in enumerate(program.inputs) if source.mutated]
        assert program.inputs[position].name == "calls"
        assert not any(node.target is aten.copy_.default for node in program.calls())
        assert program.results[0].meta["val"].shape == ()


def capture_inference(model: nn.Module, *inputs: Any) -> Any:
    with torch.no_grad():
        return capture(model, *inputs)


def test_the_fake_mode_of_a_graph() -> None:
    graph = Graph()
    module = graph.module(graph.input("x", 2))
    assert compat.fake_mode_of(module.graph) is graph.mode
    assert compat.fake_mode_of(fx.Graph()) is None


@pytest.mark.parametrize("keep", [False, True])
def test_whether_a_backward_keeps_its_graph(keep: bool) -> None:
    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> Tensor:
            seen.append(compat.keeps_graph())
            return tangents[0]

    x = torch.ones(2, requires_grad=True)
    Look.apply(x).sum().backward(retain_graph=keep)
    assert seen == [keep]


# --- the partitioner


def joint() -> fx.GraphModule:
    """Return ``y = sin(x @ w)`` with gradients for both."""
    graph = Graph()
    x, w, tangent = graph.input("primals_1", 3, 4), graph.input("primals_2", 4, 5), graph.input("tangents_1", 3, 5)
    product = graph.call(aten.mm.default, x, w)
    y = graph.call(aten.sin.default, product)
    inner = graph.call(aten.mul.Tensor, tangent, graph.call(aten.cos.default, product))
    grad_x = graph.call(aten.mm.default, inner, graph.call(aten.permute.default, w, [1, 0]))
    grad_w = graph.call(aten.mm.default, graph.call(aten.permute.default, x, [1, 0]), inner)
    return graph.module(y, grad_x, grad_w)


def test_a_joint_subgraph_is_split_by_placeholder_names() -> None:
    module = joint()
    x, w, tangent = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    expected = module(x, w, tangent)
    forward, backward = compat.partition(module, 1, [1])
    results = forward(x, w)
    saved = dict(zip((n.name for n in forward.graph.output_node().args[0][1:]), results[1:], strict=True))
    saved["tangents_1"] = tangent
    arguments = [saved[str(node.target)] for node in backward.graph.find_nodes(op="placeholder")]
    torch.testing.assert_close(results[0], expected[0])
    torch.testing.assert_close(list(backward(*arguments)), list(expected[1:]))


def test_the_forward_part_keeps_its_placeholders_in_order() -> None:
    forward, _ = compat.partition(joint(), 1, [])
    assert [str(n.target) for n in forward.graph.find_nodes(op="placeholder")] == ["primals_1", "primals_2"]


def test_values_marked_to_be_saved_are_saved() -> None:
    module = joint()
    for node in module.graph.find_nodes(op="call_function", target=aten.mm.default)[:1]:
        node.meta["recompute"] = compat.MUST_SAVE
        node.meta["ac_graph_id"] = 0
        name = node.name
    forward, _ = compat.partition(module, 1, [])
    assert name in [node.name for node in forward.graph.output_node().args[0]]


# --- Inductor


def compiled_joint() -> tuple[Any, fx.GraphModule]:
    module = joint()
    compat.prepare_joint(module, compat.fake_mode_of(module.graph))
    return compat.compile_with_inductor(module, compat.fake_mode_of(module.graph)), module


def test_inductor_compiles_a_subgraph_to_a_boxed_call() -> None:
    run, module = compiled_joint()
    arguments = [torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)]
    expected = joint()(*arguments)
    references = [weakref.ref(each) for each in arguments]
    copies = [each.clone() for each in arguments]
    results = run(arguments)
    torch.testing.assert_close(list(results), list(expected), rtol=1e-5, atol=1e-5)
    assert arguments == []
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    torch.testing.assert_close(list(run(copies)), list(expected), rtol=1e-5, atol=1e-5)
    module.graph.lint()


def test_inductor_leaves_its_inputs_as_they_are() -> None:
    """Compiled as if it were a backward, it would overwrite what the whole graph donates."""
    run, _ = compiled_joint()
    arguments = [torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)]
    held, copies = list(arguments), [each.clone() for each in arguments]
    run(arguments)
    torch.testing.assert_close(held, copies, rtol=0, atol=0)


def test_inductor_keeps_the_traced_strides() -> None:
    graph = Graph()
    x = graph.input("primals_1", 4, 6)
    y = graph.call(aten.mul.Tensor, graph.call(aten.permute.default, x, [1, 0]), 2)
    module = graph.module(y, x)
    run = compat.compile_with_inductor(module, graph.mode)
    real = torch.randn(4, 6)
    result, same = run([real])
    assert result.stride() == y.meta["val"].stride()
    assert same is real or same.data_ptr() == real.data_ptr()


def test_two_subgraphs_compile_inside_one_trace() -> None:
    """Each reports output strides to the tracing context, which takes them once."""
    from torch._guards import TracingContext, tracing

    module = joint()
    mode = compat.fake_mode_of(module.graph)
    with tracing(TracingContext(mode)):
        compat.compile_with_inductor(module, mode)
        compat.compile_with_inductor(module, mode)


def test_inductor_has_seeded_draws() -> None:
    from torch._inductor import inductor_prims

    seeds = inductor_prims.seeds(2, torch.device("cpu"))
    first = inductor_prims.lookup_seed(seeds, 0)
    assert first.shape == ()
    for draw in (inductor_prims.random, inductor_prims.randint):
        assert torch.Tag.nondeterministic_seeded not in draw.tags


def test_whether_the_user_wants_eager_draws() -> None:
    assert compat.random_falls_back() is False
    with torch._inductor.config.patch(fallback_random=True):
        assert compat.random_falls_back() is True


# --- generated code


def test_boxed_calls_empty_their_list_and_free_at_the_last_use() -> None:
    graph = Graph()
    x, y = graph.input("x", 2), graph.input("y", 2)
    first = graph.call(aten.sin.default, x)
    alive: list[bool] = []

    def look(value: Tensor) -> Tensor:
        gc.collect()
        alive.append(reference() is not None)
        return value + 1

    node = graph.graph.call_function(look, (first,))
    module = compat.use_boxed_calls(graph.module(graph.graph.call_function(look, (node,)), y))
    boxed = [torch.ones(2), torch.ones(2)]
    reference = weakref.ref(boxed[0])
    result, same = module.forward(boxed)
    assert boxed == []
    assert alive == [False, False]
    torch.testing.assert_close(result, torch.ones(2).sin() + 2)
    torch.testing.assert_close(same, torch.ones(2))


def test_a_boxed_call_without_inputs() -> None:
    graph = fx.Graph()
    graph.output((3,))
    module = compat.use_boxed_calls(fx.GraphModule({}, graph))
    assert tuple(module.forward([])) == (3,)


def test_boxed_inputs_may_have_any_name() -> None:
    graph = Graph()
    names = ["self_1", "boxed_1", "x"]
    inputs = [graph.input(name, 2) for name in names]
    module = compat.use_boxed_calls(graph.module(*inputs))
    values = [torch.full((2,), float(i)) for i in range(3)]
    for found, value in zip(module.forward(list(values)), values, strict=True):
        assert found is value


# --- the token


def test_a_saved_tensor_dies_with_its_graph() -> None:
    """Contexts are freed when autograd lets go of the token that it saved."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            token = torch.tensor(7)
            tokens.append(weakref.ref(token))
            ctx.save_for_backward(token)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> Tensor:
            assert int(ctx.saved_tensors[0]) == 7
            return tangents[0]

    tokens: list[weakref.ref[Tensor]] = []
    x = torch.ones(2, requires_grad=True)
    loss = Save.apply(x).sum()
    assert tokens[0]() is not None
    loss.backward()
    del loss
    assert tokens[0]() is None
    abandoned = Save.apply(x).sum()
    assert tokens[1]() is not None
    del abandoned
    assert tokens[1]() is None


def test_padded_products_are_traced_with_the_strides_that_they_have() -> None:
    """Rows of 21 values become slices of rows of 24: what is saved says so, and what is returned is as traced."""
    from torch._inductor.fx_passes import pad_mm

    g = Graph()
    a, b = g.input("a", 16, 8, dtype=torch.bfloat16), g.input("b", 8, 21, dtype=torch.bfloat16)
    product = g.call(aten.mm.default, a, b)
    rows = g.call(aten.view.default, product, [2, 8, 21])
    module = g.module(product, rows, g.call(aten.exp.default, rows))
    inputs = [torch.randn(16, 8).bfloat16(), torch.randn(8, 21).bfloat16()]
    expected = module(*inputs)
    with (
        mock.patch.object(pad_mm, "should_pad", return_value=True),
        mock.patch.object(pad_mm, "check_device", return_value=True),
    ):
        compat.prepare_joint(module, g.mode)
    module.graph.lint()
    strides = {node: node.meta["val"].stride() for node in module.graph.nodes if node.op == "call_function"}
    view = next(node for node in strides if node.target in (aten.view.default, aten.reshape.default))
    assert strides[view] == (8 * 24, 24, 1)
    found = fx.Interpreter(module).run(*inputs)
    results = module.graph.output_node().args[0]
    assert [each.meta["val"].stride() for each in results] == [each.stride() for each in expected]  # type: ignore[union-attr]
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    torch.testing.assert_close(list(found), list(expected))


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(environment: dict[str, str], settings: str | None) -> None:
    with mock.patch.object(torch._C, "_accelerator_setAllocatorSettings") as told:
        assert compat.use_expandable_segments(environment) == (settings is not None)
    assert [call.args for call in told.call_args_list] == ([(settings,)] if settings else [])


def test_only_a_function_applied_since_takes_none_for_zeros() -> None:
    """An input that a compiled graph returns may be the result of a Function that counts on tensors."""
    given: list[Any] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Tensor:
            given.append(tangents[1])
            return 2 * tangents[0]

    x = torch.ones(3, requires_grad=True)
    before = Twice.apply(x)
    begin = torch._C._autograd._get_sequence_nr()
    results = Twice.apply(x)
    compat._make_no_zeros([before[0], torch.ones(3), *results], begin)
    before[0].sum().backward()
    results[0].sum().backward()
    torch.testing.assert_close(given[0], torch.zeros(3))
    assert given[1] is None
