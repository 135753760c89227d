# mypy: ignore-errors
"""The device's update kernel, in Triton: one pass over a chunk's memory, arithmetic of ``definition.py``.

Importing this module needs triton; ``device.py`` does so only for states on CUDA devices. The module is written in
Triton's language, which type checkers do not know.
"""

import triton
import triton.language as tl

from protrain_compile.updates.definition import UpdateKind
from protrain_compile.updates.formats import StateFormat

BLOCK = 1024
"""Elements per program: with 4 warps, 8 a thread, which is 16 bytes of a 16-bit type."""

ALIGNMENT = 64
"""Blocks start at multiples of this many elements, so that whole blocks load and store 16 bytes at once."""

TABLE_COLUMNS = 3
"""A table row is (blocks before the segment, begin, end)."""

_ADAM_AMSGRAD = tl.constexpr(int(UpdateKind.ADAM_AMSGRAD))
_SGD = tl.constexpr(int(UpdateKind.SGD))
_SGD_MOMENTUM = tl.constexpr(int(UpdateKind.SGD_MOMENTUM))
_SGD_NESTEROV = tl.constexpr(int(UpdateKind.SGD_NESTEROV))
_SPLIT = tl.constexpr(int(StateFormat.SPLIT))
_FP16 = tl.constexpr(int(StateFormat.FP16))
_COLUMNS = tl.constexpr(TABLE_COLUMNS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)


@triton.jit
def _load_master(param, companion, offsets, mask, state_format: tl.constexpr):
    if state_format == _SPLIT:  # param holds bf16 as int16
        high = tl.load(param + offsets, mask=mask).to(tl.int32) << 16
        master = (high + tl.load(companion + offsets, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)
    elif state_format == _FP16:
        master = tl.load(companion + offsets, mask=mask)
    else:
        master = tl.load(param + offsets, mask=mask)
    return master


@triton.jit
def _store_master(param, companion, master, offsets, mask, state_format: tl.constexpr):
    if state_format == _SPLIT:
        bits = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
        tl.store(param + offsets, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(companion + offsets, bits.to(tl.int16), mask=mask)
    elif state_format == _FP16:
        tl.store(companion + offsets, master, mask=mask)
        tl.store(param + offsets, master.to(tl.float16), mask=mask)
    else:
        tl.store(param + offsets, master, mask=mask)


@triton.jit
def _update(
    param, companion, moment1, moment2, moment2_max, gradient, offsets, mask, multiplier,
    factor, decay, l2, keep1, rate1, keep2, rate2, correction, eps, step_size,
    kind: tl.constexpr, state_format: tl.constexpr,
):  # fmt: skip
    p = _load_master(param, companion, offsets, mask, state_format)
    g = tl.load(gradient + offsets, mask=mask).to(tl.float32) * factor
    if multiplier is not None:
        g *= tl.load(multiplier)
    if l2 != 0.0:  # 0 * infinity would be NaN
        g += l2 * p
    if kind != _SGD:
        first = tl.load(moment1 + offsets, mask=mask) * keep1 + g * rate1
        tl.store(moment1 + offsets, first, mask=mask)
    if kind == _SGD:
        p -= step_size * g
    elif kind == _SGD_MOMENTUM:
        p -= step_size * first
    elif kind == _SGD_NESTEROV:
        p -= step_size * (g + keep1 * first)
    else:
        second = tl.load(moment2 + offsets, mask=mask) * keep2 + (rate2 * g) * g
        tl.store(moment2 + offsets, second, mask=mask)
        if kind == _ADAM_AMSGRAD:
            before = tl.load(moment2_max + offsets, mask=mask)
            second = tl.maximum(before, second, propagate_nan=tl.PropagateNan.ALL)
            tl.store(moment2_max + offsets, second, mask=mask)
        p = p * decay - tl.div_rn(step_size * first, tl.sqrt_rn(second) * correction + eps)
    _store_master(param, companion, p, offsets, mask, state_format)


@triton.jit
def update_kernel(
    param, companion, moment1, moment2, moment2_max, gradient, table, multiplier,
    factor, decay, l2, keep1, rate1, keep2, rate2, correction, eps, step_size,
    kind: tl.constexpr, state_format: tl.constexpr, rows: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Update one block of block_size elements of the segment that the program's number falls into.

    ``table`` has rows rows (a power of two; unused ones start beyond the last block), ``multiplier`` is None or points
    to one fp32. Whole blocks run without masks, since a mask of unknown alignment would forbid wide loads.
    """
    block = tl.program_id(0)
    first_blocks = tl.load(table + tl.arange(0, rows) * _COLUMNS)
    row = table + (tl.sum((first_blocks <= block).to(tl.int32)) - 1) * _COLUMNS
    begin = tl.load(row + 1)
    end = tl.load(row + 2)
    start = begin // _ALIGNMENT * _ALIGNMENT + (block - tl.load(row)) * block_size
    start = tl.multiple_of(start, _ALIGNMENT)
    offsets = start + tl.arange(0, block_size)
    if (start >= begin) & (start + block_size <= end):
        _update(
            param=param, companion=companion, moment1=moment1, moment2=moment2, moment2_max=moment2_max,
            gradient=gradient, offsets=offsets, mask=None, multiplier=multiplier, factor=factor, decay=decay, l2=l2,
            keep1=keep1, rate1=rate1, keep2=keep2, rate2=rate2, correction=correction, eps=eps, step_size=step_size,
            kind=kind, state_format=state_format,
        )  # fmt: skip
    else:
        _update(
            param=param, companion=companion, moment1=moment1, moment2=moment2, moment2_max=moment2_max,
            gradient=gradient, offsets=offsets, mask=(offsets >= begin) & (offsets < end), multiplier=multiplier,
            factor=factor, decay=decay, l2=l2, keep1=keep1, rate1=rate1, keep2=keep2, rate2=rate2,
            correction=correction, eps=eps, step_size=step_size, kind=kind, state_format=state_format,
        )  # fmt: skip
