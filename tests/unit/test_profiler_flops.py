from __future__ import annotations

import pytest
import torch
from support.capture import Graph

from protrain_compile.profiler.flops import is_attention, node_flops

aten = torch.ops.aten


def test_products() -> None:
    g = Graph()
    a, b, bias = g.input("a", 3, 5), g.input("b", 5, 7), g.input("bias", 7)
    assert node_flops(g.call(aten.mm.default, a, b)) == 2 * 3 * 5 * 7
    assert node_flops(g.call(aten.addmm.default, bias, a, b)) == 2 * 3 * 5 * 7
    left, right = g.input("left", 2, 3, 5), g.input("right", 2, 5, 7)
    assert node_flops(g.call(aten.bmm.default, left, right)) == 2 * 2 * 3 * 5 * 7


def test_what_only_moves_memory_has_none() -> None:
    g = Graph()
    a = g.input("a", 3, 5)
    assert node_flops(a) == 0
    assert node_flops(g.call(aten.exp.default, a)) == 0
    assert node_flops(g.call(aten.sum.dim_IntList, a, [1])) == 0


def test_causal_attention_computes_half() -> None:
    g = Graph()
    q, k, v = (g.input(name, 2, 4, 16, 8) for name in "qkv")
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    whole, causal = g.call(attention, q, k, v), g.call(attention, q, k, v, 0.0, True)
    by_name = g.call(attention, q, k, v, is_causal=True)
    assert is_attention(whole)
    assert node_flops(whole) == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert node_flops(causal) == node_flops(by_name) == node_flops(whole) // 2


def test_attention_backward_is_two_and_a_half_times_the_forward() -> None:
    g = Graph()
    q, k, v = (g.input(name, 2, 4, 16, 8) for name in "qkv")
    forward = g.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    out, lse = g.input("out", 2, 4, 16, 8), g.input("lse", 2, 4, 16)
    backward = g.call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, out, q, k, v, out, lse, 0.0, False
    )
    assert node_flops(backward) == node_flops(forward) * 5 // 2


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "flash_attention_for_cpu"])
def test_heads_that_share_keys_compute_as_much_as_others(kernel: str) -> None:
    g = Graph()
    q, k, v = g.input("q", 2, 8, 16, 8), g.input("k", 2, 2, 16, 8), g.input("v", 2, 2, 16, 8)
    own, out, lse = g.input("own", 2, 8, 16, 8), g.input("out", 2, 8, 16, 8), g.input("lse", 2, 8, 16)
    forward = getattr(aten, f"_scaled_dot_product_{kernel}").default
    extra = (None, True) if kernel == "efficient_attention" else ()
    assert node_flops(g.call(forward, q, k, v, *extra)) == node_flops(g.call(forward, q, own, own, *extra))
    if kernel == "flash_attention_for_cpu":
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        shared = g.call(back, out, q, k, v, out, lse, 0.0, False)
        assert node_flops(shared) == node_flops(g.call(back, out, q, own, own, out, lse, 0.0, False))
