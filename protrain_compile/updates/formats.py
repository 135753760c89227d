"""How a chunk's parameters and optimizer states are stored, and the split master.

===========  =========  ====================  ==========  ==============================================
format       ``param``  ``companion``         bytes/elem  the fp32 master is
===========  =========  ====================  ==========  ==============================================
``SPLIT``    bf16       int16 remainder       4 + states  ``(param bits << 16) + remainder``, bit-exact
``FP32``     fp32       none                  4 + states  ``param`` itself
``FP16``     fp16       fp32 master           6 + states  ``companion``; ``param`` is its 16-bit copy
===========  =========  ====================  ==========  ==============================================

**Split master.** A master's bits are rounded to their upper 16 (a bf16 value, carrying into the exponent where
needed) and the signed difference is kept: ``high = (bits + 0x8000) >> 16``, ``remainder = low 16 bits as int16``.
Rounding is to nearest; an exact tie goes away from zero, not to even. It has to: with ties to even, both neighbours'
ties would round to one even bf16, which would then stand for 65,537 masters, one more than 16 bits can tell apart.
Ties are one value in 65,536, and both candidates are equally near. A NaN becomes the quiet NaN of its sign with
remainder 0, since a payload that rounds up would leave the bf16 copy at -0.0 or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class StateFormat(IntEnum):
    """Storage of a chunk's parameters (see the table above); the numbers are shared with ``kernel.c``."""

    SPLIT = 0
    FP32 = 1
    FP16 = 2

    @property
    def param_dtype(self) -> torch.dtype:
        """Data type of the parameter values that cross the link."""
        return {
            StateFormat.SPLIT: torch.bfloat16,
            StateFormat.FP32: torch.float32,
            StateFormat.FP16: torch.float16,
        }[self]

    @property
    def companion_dtype(self) -> torch.dtype | None:
        """Data type of what completes the parameter to an fp32 master; None where nothing does."""
        return {
            StateFormat.SPLIT: torch.int16,
            StateFormat.FP32: None,
            StateFormat.FP16: torch.float32,
        }[self]

    @classmethod
    def of(cls, dtype: torch.dtype) -> StateFormat:
        """Return the format in which parameters of ``dtype`` are trained.

        Raises:
            ValueError: If there is none.
        """
        for member in cls:
            if member.param_dtype == dtype:
                return member
        raise ValueError(f"parameters of {dtype} cannot be updated; use bfloat16, float16 or float32")


@dataclass(frozen=True)
class ChunkStates:
    """Flat, contiguous tensors of one length on one device: a chunk's parameters and optimizer states.

    Attributes:
        param: The parameter values in the format's data type.
        companion: int16 remainder (SPLIT), fp32 master (FP16) or None (FP32).
        moment1: fp32; ``exp_avg`` of Adam, ``momentum_buffer`` of SGD; None where the rule keeps none.
        moment2: fp32; ``exp_avg_sq`` of Adam.
        moment2_max: fp32; ``max_exp_avg_sq`` of Adam with amsgrad.

    Raises:
        ValueError: If a tensor's data type, shape or device does not fit ``param``.
    """

    param: Tensor
    companion: Tensor | None = None
    moment1: Tensor | None = None
    moment2: Tensor | None = None
    moment2_max: Tensor | None = None

    def __post_init__(self) -> None:
        self._check("param", self.param, self.format.param_dtype)
        companion_dtype = self.format.companion_dtype
        if (companion_dtype is None) != (self.companion is None):
            raise ValueError(f"{self.format.name}: companion must be {companion_dtype or None}")
        if companion_dtype is not None:
            self._check("companion", self.companion, companion_dtype)
        for name in ("moment1", "moment2", "moment2_max"):
            self._check(name, getattr(self, name), torch.float32)

    @property
    def format(self) -> StateFormat:
        """The storage format, told by the parameter's data type."""
        return StateFormat.of(self.param.dtype)

    def narrow(self, begin: int, end: int) -> ChunkStates:
        """Return views of elements ``[begin, end)``."""
        parts = (self.param, self.companion, self.moment1, self.moment2, self.moment2_max)
        return ChunkStates(*(None if part is None else part[begin:end] for part in parts))  # type: ignore[arg-type]

    def load_master(self) -> Tensor:
        """Return the fp32 master: a new tensor for SPLIT, the stored one otherwise."""
        if self.format is StateFormat.SPLIT:
            assert self.companion is not None
            return merge_master(self.param, self.companion)
        return self.param if self.companion is None else self.companion

    def store_master(self, master: Tensor) -> None:
        """Write fp32 values as parameters and companion; inverse of :meth:`load_master`."""
        if self.format is StateFormat.SPLIT:
            assert self.companion is not None
            high, remainder = split_master(master)
            self.param.copy_(high)
            self.companion.copy_(remainder)
            return
        self.param.copy_(master)
        if self.companion is not None:
            self.companion.copy_(master)

    def _check(self, name: str, tensor: Tensor | None, dtype: torch.dtype) -> None:
        if tensor is None:
            return
        if tensor.dtype != dtype or tensor.shape != self.param.shape or tensor.device != self.param.device:
            raise ValueError(
                f"{self.format.name}: {name} must be {dtype}, shape {tuple(self.param.shape)} on {self.param.device}, "
                f"got {tensor.dtype}, {tuple(tensor.shape)} on {tensor.device}"
            )
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be flat and contiguous")


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 values and int16 remainders that stand for the fp32 ``master`` (see the module docstring)."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), (bits & _SIGN) | _QUIET_NAN, bits)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def merge_master(high: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master that :func:`split_master` split into ``high`` (bf16) and ``remainder`` (int16)."""
    upper = high.view(torch.int16).to(torch.int32) << 16
    return (upper + remainder.to(torch.int32)).view(torch.float32)


_SIGN = -0x8000_0000
_QUIET_NAN = 0x7FC0_0000
