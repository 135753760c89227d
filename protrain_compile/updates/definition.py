"""What one optimizer update is: rules, per-step scalars, and the reference in plain torch operations.

With ``grad``, ``param``, ``moment1``, ``moment2``, ``moment2_max`` fp32 and the scalars of :class:`StepScalars`::

    g = grad * gradient_factor                                  # unscale, clip, average, maximize
    Adam, AdamW                                                 SGD
    param  *= decay                       (AdamW)
    g      += l2 * param                  (Adam)                g      += l2 * param
    moment1 = moment1 * moment1_keep + g * moment1_rate         moment1 = moment1 * moment1_keep + g * moment1_rate
    moment2 = moment2 * moment2_keep + g * g * moment2_rate     g       = g + moment1_keep * moment1   (nesterov)
    moment2_max = max(moment2_max, moment2)   (amsgrad)                 = moment1              (momentum)
    denominator = sqrt(moment2 or moment2_max) * moment2_correction + eps
    param  -= step_size * moment1 / denominator                 param  -= step_size * g

This is the arithmetic of ``torch.optim.Adam``, ``AdamW`` and ``SGD``; everything that depends on the step alone
(bias corrections, the first step of SGD's momentum) is computed here once, in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protrain_compile.errors import OptionError
from protrain_compile.updates.formats import ChunkStates


class UpdateKind(IntEnum):
    """Which of the formulas above an update follows; the numbers are shared with ``kernel.c``."""

    ADAM = 0
    ADAM_AMSGRAD = 1
    SGD = 2
    SGD_MOMENTUM = 3
    SGD_NESTEROV = 4

    @property
    def has_moment1(self) -> bool:
        """Whether the update keeps ``exp_avg`` or ``momentum_buffer``."""
        return self is not UpdateKind.SGD

    @property
    def has_moment2(self) -> bool:
        """Whether the update keeps ``exp_avg_sq``."""
        return self in (UpdateKind.ADAM, UpdateKind.ADAM_AMSGRAD)

    @property
    def has_moment2_max(self) -> bool:
        """Whether the update keeps ``max_exp_avg_sq``."""
        return self is UpdateKind.ADAM_AMSGRAD


class StepScalars(NamedTuple):
    """The numbers that one step's update needs; see the module docstring for what each does.

    The field order after ``kind`` is the order in ``kernel.c`` and in the device table.
    """

    kind: UpdateKind
    gradient_factor: float
    decay: float
    l2: float
    moment1_keep: float
    moment1_rate: float
    moment2_keep: float
    moment2_rate: float
    moment2_correction: float
    eps: float
    step_size: float


@dataclass(frozen=True)
class AdamRule:
    """Hyper-parameters of Adam, or of AdamW when ``decoupled``; names as in ``torch.optim``."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False

    @property
    def kind(self) -> UpdateKind:
        """The formulas this rule follows."""
        return UpdateKind.ADAM_AMSGRAD if self.amsgrad else UpdateKind.ADAM

    def scalars(self, step: int, gradient_multiplier: float = 1.0) -> StepScalars:
        """Return the scalars of step ``step`` (1 is the first); ``gradient_multiplier`` scales the gradient."""
        _check_step(step)
        return StepScalars(
            kind=self.kind,
            gradient_factor=_signed(gradient_multiplier, self.maximize),
            decay=1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=0.0 if self.decoupled else self.weight_decay,
            moment1_keep=self.beta1,
            moment1_rate=1.0 - self.beta1,
            moment2_keep=self.beta2,
            moment2_rate=1.0 - self.beta2,
            moment2_correction=1.0 / math.sqrt(1.0 - self.beta2**step),
            eps=self.eps,
            step_size=self.lr / (1.0 - self.beta1**step),
        )


@dataclass(frozen=True)
class SgdRule:
    """Hyper-parameters of SGD; names as in ``torch.optim.SGD``."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def kind(self) -> UpdateKind:
        """The formulas this rule follows."""
        if self.momentum == 0.0:
            return UpdateKind.SGD
        return UpdateKind.SGD_NESTEROV if self.nesterov else UpdateKind.SGD_MOMENTUM

    def scalars(self, step: int, gradient_multiplier: float = 1.0) -> StepScalars:
        """Return the scalars of step ``step``; dampening starts at the second step, as in ``torch.optim.SGD``."""
        _check_step(step)
        return StepScalars(
            kind=self.kind,
            gradient_factor=_signed(gradient_multiplier, self.maximize),
            decay=1.0,
            l2=self.weight_decay,
            moment1_keep=self.momentum,
            moment1_rate=1.0 if step == 1 else 1.0 - self.dampening,
            moment2_keep=0.0,
            moment2_rate=0.0,
            moment2_correction=0.0,
            eps=0.0,
            step_size=self.lr,
        )


UpdateRule = AdamRule | SgdRule


class Segment(NamedTuple):
    """Elements ``[begin, end)`` of a chunk and the scalars they are updated with."""

    begin: int
    end: int
    scalars: StepScalars


def rule_of_group(optimizer_type: type, group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of one param group of a ``torch.optim`` Adam, AdamW or SGD.

    Args:
        optimizer_type: The optimizer's exact type; a subclass may change the arithmetic, so it is refused.
        group: An entry of ``optimizer.param_groups``; tensor learning rates and betas are read.

    Raises:
        OptionError: For another optimizer or an option that has no equivalent here; the message names it.
    """
    if group.get("differentiable"):
        raise OptionError("optimizer: differentiable=True is not supported by protrain_compile.prepare; leave it out")
    if optimizer_type in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = optimizer_type is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))
        return AdamRule(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=decoupled,
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
        )
    if optimizer_type is torch.optim.SGD:
        return SgdRule(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )
    raise OptionError(
        f"optimizer: {optimizer_type.__module__}.{optimizer_type.__qualname__} is not supported by "
        "protrain_compile.prepare; pass torch.optim.Adam, torch.optim.AdamW or torch.optim.SGD, or train without "
        "prepare"
    )


def check_segments(states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]) -> None:
    """Raise ValueError unless ``gradient`` and ``segments`` fit ``states``; segments are ascending and disjoint."""
    if gradient.shape != states.param.shape or not gradient.is_contiguous():
        raise ValueError(f"gradient must be flat with {states.param.numel()} elements, got {tuple(gradient.shape)}")
    if gradient.device != states.param.device:
        raise ValueError(f"gradient is on {gradient.device}, states are on {states.param.device}")
    reached = 0
    for begin, end, scalars in segments:
        if begin < reached or end < begin or end > states.param.numel():
            raise ValueError(f"segment [{begin}, {end}) overlaps its predecessor or leaves the chunk")
        reached = end
        for name in ("moment1", "moment2", "moment2_max"):
            if getattr(scalars.kind, f"has_{name}") and getattr(states, name) is None:
                raise ValueError(f"{scalars.kind.name} needs {name}, which the states do not have")


REFERENCE_SLICE = 1 << 18
"""Elements that the reference updates at once: 1 MiB of fp32, so that its temporaries stay in a core's cache."""


def reference_update(states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]) -> None:
    """Update ``states`` in place with plain torch operations, on whatever device they are.

    Args:
        states: A chunk's states (see :class:`ChunkStates`).
        gradient: Flat gradient of the same length, bf16, fp16 or fp32, on the same device.
        segments: Ascending, disjoint ranges with their scalars; elements outside of them stay as they are.
    """
    check_segments(states, gradient, segments)
    for begin, end, scalars in _sliced(segments):
        part = states.narrow(begin, end)
        master = part.load_master()
        scaled = gradient[begin:end].float() * scalars.gradient_factor
        if scalars.kind.has_moment2:
            _adam(master, scaled, part, scalars)
        else:
            _sgd(master, scaled, part, scalars)
        part.store_master(master)


def _sliced(segments: Sequence[Segment]) -> Iterator[Segment]:
    for begin, end, scalars in segments:
        for start in range(begin, end, REFERENCE_SLICE):
            yield Segment(start, min(start + REFERENCE_SLICE, end), scalars)


def _adam(master: Tensor, gradient: Tensor, part: ChunkStates, scalars: StepScalars) -> None:
    assert part.moment1 is not None
    assert part.moment2 is not None
    master.mul_(scalars.decay)
    _add_l2(gradient, master, scalars)
    part.moment1.mul_(scalars.moment1_keep).add_(gradient, alpha=scalars.moment1_rate)
    part.moment2.mul_(scalars.moment2_keep).addcmul_(gradient, gradient, value=scalars.moment2_rate)
    second = part.moment2
    if scalars.kind.has_moment2_max:
        assert part.moment2_max is not None
        second = torch.maximum(part.moment2_max, part.moment2, out=part.moment2_max)
    denominator = second.sqrt().mul_(scalars.moment2_correction).add_(scalars.eps)
    master.addcdiv_(part.moment1, denominator, value=-scalars.step_size)


def _sgd(master: Tensor, gradient: Tensor, part: ChunkStates, scalars: StepScalars) -> None:
    _add_l2(gradient, master, scalars)
    direction = gradient
    if scalars.kind.has_moment1:
        assert part.moment1 is not None
        part.moment1.mul_(scalars.moment1_keep).add_(gradient, alpha=scalars.moment1_rate)
        nesterov = scalars.kind is UpdateKind.SGD_NESTEROV
        direction = gradient.add(part.moment1, alpha=scalars.moment1_keep) if nesterov else part.moment1
    master.sub_(direction, alpha=scalars.step_size)


def _add_l2(gradient: Tensor, master: Tensor, scalars: StepScalars) -> None:
    if scalars.l2 != 0.0:
        gradient.add_(master, alpha=scalars.l2)


def _signed(multiplier: float, maximize: bool) -> float:
    return -multiplier if maximize else multiplier


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
