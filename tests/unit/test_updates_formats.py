"""The split master: exact for every fp32 value, nearest in bf16, NaN and infinity where they belong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_compile.updates.formats import ChunkStates, StateFormat, merge_master, split_master

SPECIAL_BITS = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF),
    *(0x3F7FFFFF, 0x3F808000, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),
]
NAN_BITS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF]


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def assert_round_trip(master: torch.Tensor) -> None:
    high, remainder = split_master(master)
    assert (high.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(merge_master(high, remainder).view(torch.int32), master.view(torch.int32))


def test_special_values_round_trip_bit_for_bit():
    assert_round_trip(from_bits(SPECIAL_BITS))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bits_round_trip(bits):
    master = from_bits(bits)
    assert_round_trip(master[~master.isnan()])


@pytest.mark.parametrize("size", [1, 7, 4097])
def test_random_masters_round_trip(size):
    assert_round_trip(torch.randn(size, generator=torch.Generator().manual_seed(size)) * 10.0 ** (size % 30 - 15))


def test_nan_of_any_payload_is_nan_in_both():
    high, remainder = split_master(from_bits(NAN_BITS))
    assert high.isnan().all()
    assert merge_master(high, remainder).isnan().all()
    assert torch.equal(torch.signbit(high), torch.tensor([False] * 3 + [True] * 3))


def test_high_is_nearest_and_differs_from_torch_only_in_ties():
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    master = torch.cat([bits.to(torch.int32).view(torch.float32), from_bits(SPECIAL_BITS)])
    master = master[~master.isnan()]
    high, _ = split_master(master)
    different = high.view(torch.int16) != master.to(torch.bfloat16).view(torch.int16)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert different.any(), "no tie among the values: the test says nothing"
    assert not (different & ~ties).any()
    assert (high.float().abs() > master.abs())[ties].all()


def test_a_bf16_model_starts_with_remainder_zero():
    params = torch.randn(1000).to(torch.bfloat16)
    high, remainder = split_master(params.float())
    assert torch.equal(high, params)
    assert not remainder.any()


def test_format_is_told_by_dtype():
    assert StateFormat.of(torch.bfloat16) is StateFormat.SPLIT
    with pytest.raises(ValueError, match="float64"):
        StateFormat.of(torch.float64)


@pytest.mark.parametrize(
    "parts",
    [
        {"param": torch.zeros(4, dtype=torch.bfloat16)},
        {"param": torch.zeros(4), "companion": torch.zeros(4)},
        {"param": torch.zeros(4), "moment1": torch.zeros(3)},
        {"param": torch.zeros(4), "moment2": torch.zeros(4, dtype=torch.bfloat16)},
        {"param": torch.zeros(2, 2)},
        {"param": torch.zeros(8)[::2]},
    ],
)
def test_states_that_do_not_fit_are_refused(parts):
    with pytest.raises(ValueError, match=r"must be"):
        ChunkStates(**parts)
