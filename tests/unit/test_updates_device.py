"""Device updates on a CPU device run the reference; the launch table is right (the kernel: tests/gpu)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from protrain_compile.updates.definition import AdamRule, Segment, SgdRule, reference_update
from protrain_compile.updates.device import DeviceUpdater, _by_scalars, table_rows
from protrain_compile.updates.formats import ChunkStates


def states() -> ChunkStates:
    return ChunkStates(torch.linspace(-1, 1, 50), None, torch.zeros(50), torch.zeros(50))


def test_cpu_devices_run_the_reference_with_the_multiplier():
    mine, theirs = states(), states()
    gradient = torch.randn(50)
    rule = AdamRule(lr=0.1, eps=0.1)
    DeviceUpdater(torch.device("cpu")).update(mine, gradient, [Segment(0, 40, rule.scalars(1))], torch.tensor([0.25]))
    reference_update(theirs, gradient, [Segment(0, 40, rule.scalars(1, 0.25))])
    assert torch.equal(mine.param, theirs.param)
    assert not torch.equal(mine.param[:40], states().param[:40])


def test_one_launch_for_all_segments_with_equal_scalars():
    decayed, plain = AdamRule(weight_decay=0.1).scalars(2), SgdRule().scalars(1)
    segments = [Segment(0, 5, decayed), Segment(5, 9, decayed), Segment(9, 9, plain), Segment(9, 12, plain)]
    segments += [Segment(20, 30, decayed)]
    assert _by_scalars(segments) == {decayed: ((0, 9), (20, 30)), plain: ((9, 12),)}


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=20, unique=True))
def test_blocks_cover_every_element_of_every_range_once(bounds):
    ordered = sorted(bounds)
    ranges = tuple(zip(ordered[::2], ordered[1::2], strict=False))
    rows, blocks = table_rows(ranges, block=128, alignment=64)
    assert len(rows) & (len(rows) - 1) == 0
    covered = []
    for block in range(blocks):
        first, begin, end = rows[sum(row[0] <= block for row in rows) - 1]  # as the kernel finds it
        start = begin // 64 * 64 + (block - first) * 128
        covered += [i for i in range(start, start + 128) if begin <= i < end]
    assert covered == [i for begin, end in ranges for i in range(begin, end)]
