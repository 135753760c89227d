"""Bytes of fake values."""

from __future__ import annotations

import torch
from support.capture import Graph, capture

from protrain_compile.program import fake_value, is_symbol
from protrain_compile.sizes import hint, size_bytes, sizes_at, storage_bytes, storage_key


def test_distinct_storages_add_up() -> None:
    graph = Graph()
    a, b = graph.tensor(4, 4), graph.tensor(3, dtype=torch.bfloat16)
    assert size_bytes([a, b]) == 64 + 6
    assert size_bytes([]) == 0


def test_views_count_once() -> None:
    graph = Graph()
    a = graph.tensor(4, 4)
    with graph.mode:
        views = [a, a.t(), a[1:], a.view(16)]
    assert size_bytes(views) == 64
    assert {storage_key(each) for each in views} == {storage_key(a)}
    assert storage_key(a) != storage_key(graph.tensor(4, 4))


def test_a_view_keeps_its_whole_storage() -> None:
    graph = Graph()
    with graph.mode:
        view = torch.empty(100, 4)[0]
    assert storage_bytes(view) == 1600
    assert size_bytes([view]) == 1600


def test_what_is_no_tensor_takes_nothing() -> None:
    assert size_bytes([None, 3, 2.5, "x"]) == 0


def test_real_tensors_count_as_fake_ones_do() -> None:
    real = torch.zeros(5, 7)
    assert size_bytes([real, real.t()]) == 140
    assert size_bytes([torch.empty(0)]) == 0


def test_symbols_count_as_what_they_were_traced_with() -> None:
    program = capture(lambda x: x.sin().sum(), torch.ones(3, 11, requires_grad=True), dynamic=True)
    values = [fake_value(node) for node in program.primals]
    symbols = [value for node, value in zip(program.primals, values, strict=True) if is_symbol(node)]
    assert sorted(hint(each) for each in symbols) == [3, 11]
    (tensor,) = (each for each in values if isinstance(each, torch.Tensor))
    assert storage_bytes(tensor) == 3 * 11 * 4
    assert size_bytes(symbols) == 0
    assert hint(5) == 5


def test_sizes_at_other_values_of_their_symbols() -> None:
    program = capture(lambda x: x.sin().sum(), torch.ones(3, 11, requires_grad=True), dynamic=True)
    values = [fake_value(node) for node in program.primals]
    symbols = [value for node, value in zip(program.primals, values, strict=True) if is_symbol(node)]
    (tensor,) = (each for each in values if isinstance(each, torch.Tensor))
    with sizes_at({each.node.expr: 2 * hint(each) for each in symbols}):
        assert sorted(hint(each) for each in symbols) == [6, 22]
        assert storage_bytes(tensor) == 4 * 3 * 11 * 4
    assert storage_bytes(tensor) == 3 * 11 * 4
