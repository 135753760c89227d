"""Guards: every door through which a user meets parameters, gradients and the moment of the update.

``ManagedParameter`` is what ``prepare`` makes of a Parameter. Its own storage is empty; eager reads gather the value,
eager writes go to its home, reads that would silently lose a gradient raise. While Dynamo traces it is an ordinary
Parameter.

``UpdateGuard`` decides, for each backward, whether chunks may be updated as their gradients complete (``in_backward``)
and checks at every door that this was right. The window is the time between two ``step()`` calls::

    forward    refused after an update that step() has not confirmed: eager would still use the old weights
    backward   in_backward only if: no clipping declared; not the first step; no gradient was ever read before step();
               no fp16; no other forward waits for its backward; graph not retained; the last declared micro-batch
    step       in_backward: the hyper-parameters must be those that were used; at_step: runs the updates
    zero_grad  refused after such an update: eager would forget gradients that have been used
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._guards import TracingContext

from protrain_compile.errors import ProtrainError
from protrain_compile.residency import UpdateMode

log = logging.getLogger("protrain_compile.guards")


class DoorError(ProtrainError, RuntimeError):
    """Something was read, written or called at a moment when eager and the schedule would differ."""


class Home(Protocol):
    """Who keeps the values of managed parameters."""

    def name_of(self, index: int) -> str:
        """Return a parameter's name."""
        ...

    def read(self, index: int) -> torch.Tensor:
        """Return a fresh tensor with a parameter's value."""
        ...

    def write(self, index: int, value: torch.Tensor) -> None:
        """Set a parameter's value."""
        ...

    def gradient(self, index: int) -> torch.Tensor | None:
        """Return a view of a parameter's waiting gradient, or None."""
        ...

    def set_gradient(self, index: int, value: torch.Tensor | None) -> None:
        """Replace or drop a parameter's waiting gradient."""
        ...

    @property
    def snapshots(self) -> bool:
        """Whether detached values are asked for to be saved: plain tensors instead of aliases."""
        ...


VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties that read values; the others (but ``data``, handled apart) read metadata."""

PLAIN_METHODS = frozenset(
    [
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "storage_offset",
        "get_device",
        "is_inference",
        "_is_view",
        "__hash__",
        "ndimension",
        "is_same_size",
        "has_names",
    ]
)
"""Methods that read metadata only."""


class ManagedParameter(nn.Parameter):
    """A Parameter whose value lies in a chunk; see the module docstring."""

    _home: Home
    _index: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let tracing through; serve eager access from the parameter's home."""
        if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return _eager_access(func, args, dict(kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that waits for ``step()``, or None.

        Raises:
            DoorError: If it was used up in the backward already; the message names the argument to pass.
        """
        if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
            return None
        return self._home.gradient(self._index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._home.set_gradient(self._index, value)

    @grad.deleter
    def grad(self) -> None:
        self._home.set_gradient(self._index, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary Parameter with the value."""
        copied = nn.Parameter(self._home.read(self._index), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary Parameter with the value."""
        plain = nn.Parameter(self._home.read(self._index), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return name, shape and type, without fetching the value."""
        return f"ManagedParameter({self._home.name_of(self._index)}, shape={tuple(self.shape)}, dtype={self.dtype})"


def manage(parameter: nn.Parameter, home: Home, index: int) -> None:
    """Turn ``parameter`` into a ManagedParameter in place; the caller has emptied its storage."""
    parameter.__class__ = ManagedParameter
    assert isinstance(parameter, ManagedParameter)
    parameter._home = home
    parameter._index = index


def _eager_access(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _property_access(func, name, args)
    if name in PLAIN_METHODS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in ("detach", "detach_") and isinstance(args[0], ManagedParameter):
        return _detached(args[0])
    targets = [each for each in (args[0] if args else None, kwargs.get("out")) if isinstance(each, ManagedParameter)]
    writes = "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    _check_gradient_flow(name, [args, kwargs])
    values: dict[int, torch.Tensor] = {}
    args, kwargs = _gathered(args, values), _gathered(kwargs, values)
    result = func(*args, **kwargs)
    if writes:
        for target in targets:
            target._home.write(target._index, values[target._index])
            if result is values[target._index]:
                result = target
    return result


def _property_access(func: Any, kind: str, args: Sequence[Any]) -> Any:
    name = getattr(func.__self__, "__name__", "")
    parameter: ManagedParameter = args[0]
    if name == "data":
        if kind == "__set__":
            return parameter._home.write(parameter._index, args[1])
        return _detached(parameter)
    if kind != "__get__" or name not in VALUE_PROPERTIES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    _check_gradient_flow(name, args)
    return func(parameter._home.read(parameter._index), *args[1:])


def _detached(parameter: ManagedParameter) -> torch.Tensor:
    """Return an alias without a gradient, as ``detach`` does in eager; a plain copy while a state dict is made."""
    if parameter._home.snapshots:
        return parameter._home.read(parameter._index)
    with torch._C.DisableTorchFunctionSubclass():
        alias = torch.Tensor._make_subclass(ManagedParameter, torch.Tensor.detach(parameter), False)
    alias._home, alias._index = parameter._home, parameter._index
    return alias


def _gathered(value: Any, values: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, ManagedParameter):
        if value._index not in values:
            values[value._index] = value._home.read(value._index)
        return values[value._index]
    if isinstance(value, list | tuple):
        return type(value)(_gathered(each, values) for each in value)
    if isinstance(value, dict):
        return {key: _gathered(each, values) for key, each in value.items()}
    return value


def _check_gradient_flow(name: str, value: Any) -> None:
    """Refuse an eager read through which eager would record a gradient."""
    if not torch.is_grad_enabled():
        return
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, ManagedParameter):
            if each.requires_grad:
                raise DoorError(
                    f"{name} reads {each._home.name_of(each._index)} outside of the compiled model while gradients "
                    "are recorded, and its gradient would be lost: call the model that torch.compile(model, "
                    "backend='protrain') returned, or read it under torch.no_grad()"
                )
        elif isinstance(each, list | tuple):
            stack.extend(each)
        elif isinstance(each, dict):
            stack.extend(each.values())


class UpdateGuard:
    """Decides when updates run, and refuses what eager would do differently (see the module docstring).

    Args:
        clips: Whether clipping was declared (``max_grad_norm``).
        micro_batches: The declared ``gradient_accumulation_steps``.
        half: Whether fp16 parameters are trained: a loss scale may skip the step.
    """

    def __init__(self, *, clips: bool, micro_batches: int, half: bool) -> None:
        self._waits = clips or half
        self._micro_batches = micro_batches
        self._steps = 0
        self._window = 0
        self._reads_gradients = False
        self._used_rules: Any = None
        self._broken_off: float | None = None

    @property
    def ahead(self) -> bool:
        """Whether chunks were updated since the last ``step()``."""
        return self._used_rules is not None

    @property
    def gradients_were_read(self) -> bool:
        """Whether a waiting gradient was read (and perhaps changed) by the user."""
        return self._reads_gradients

    def before_forward(self) -> None:
        """Check that a forward may run.

        Raises:
            DoorError: If the weights are newer than eager's would be.
        """
        if self._broken_off is not None:
            warnings.warn(
                f"the last backward raised after {self._broken_off:.0%} of the trainable chunks had been updated; "
                "training goes on from these weights (load a checkpoint if that matters)",
                RuntimeWarning,
                stacklevel=2,
            )
            self._broken_off = None
            self._finish()
        if self.ahead:
            raise DoorError(
                "a forward between a backward that updated the weights and optimizer.step(): call step() first, or "
                "pass gradient_accumulation_steps (the most backwards before a step) or max_grad_norm (math.inf for "
                "no clipping) to prepare, so that updates wait for step()"
            )

    def mode_of_backward(self, *, alone: bool, waiting: bool, rules: Any) -> UpdateMode:
        """Return when the chunks of the backward that begins now are updated.

        Args:
            alone: Whether no other forward waits for its backward and the graph is not retained.
            waiting: Whether gradients of an earlier backward wait for ``step()``.
            rules: The update rules as of now; ``step()`` must find them unchanged.

        Raises:
            DoorError: If this backward follows one that updated the weights.
        """
        if self.ahead:
            raise DoorError(
                "a second backward before optimizer.step(), after one that updated the weights: pass "
                "gradient_accumulation_steps to prepare, or run all forwards before the first backward"
            )
        self._window += alone
        last = alone and self._window == self._micro_batches and (self._micro_batches > 1 or not waiting)
        if self._waits or self._reads_gradients or self._steps == 0 or not last:
            return "at_step"
        self._used_rules = rules
        return "in_backward"

    def broke_off(self, fraction: float) -> None:
        """Note that a backward raised after ``fraction`` of the trainable chunks were updated."""
        if self.ahead:
            self._broken_off = fraction

    def gradient_read(self, name: str) -> None:
        """Note that a waiting gradient is read before ``step()``; from then on updates wait for it.

        Raises:
            DoorError: If the gradient was used up in the backward.
        """
        if self.ahead:
            raise DoorError(
                f"{name}.grad was read after a backward that used the gradients up to update the weights: pass "
                "max_grad_norm to prepare (math.inf to read or change gradients without clipping), so that updates "
                "wait for step()"
            )
        self._reads_gradients = True

    def before_step(self, rules: Any) -> None:
        """Note that ``step()`` is called; it runs the updates that wait.

        Raises:
            DoorError: If hyper-parameters were changed since the backward that used them.
        """
        if self.ahead and rules != self._used_rules:
            raise DoorError(
                "a hyper-parameter of the optimizer (lr, betas, weight_decay, ...) was changed between the backward "
                "that updated the weights with the old one and step(): change it before the backward or after "
                "step(), or pass max_grad_norm (math.inf for no clipping) to prepare, so that updates wait for "
                "step()"
            )
        self._finish()

    def before_zero_grad(self) -> None:
        """Check that gradients may be dropped.

        Raises:
            DoorError: If they have been used to update the weights and ``step()`` was not called.
        """
        if self.ahead and self._broken_off is None:
            raise DoorError(
                "zero_grad() between a backward that updated the weights and step(): eager would skip this step; "
                "call step() first, or pass max_grad_norm (math.inf for no clipping) to prepare, so that updates "
                "wait for step()"
            )
        self._window = 0

    def _finish(self) -> None:
        self._steps += 1
        self._window = 0
        self._used_rules = None
