"""The managed optimizer: the user's own optimizer object, whose step, zero_grad and state dict go to the ManagedModel.

``prepare`` changes the class of the optimizer in place, so that schedulers made before keep working and
``isinstance(optimizer, torch.optim.AdamW)`` stays true. ``param_groups`` is the user's list and may be edited.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from protrain_compile.errors import OptionError
from protrain_compile.managed import ManagedModel

AMP_SCALING = "_step_supports_amp_scaling"
"""By which a fused optimizer tells GradScaler that it unscales gradients itself."""


class ManagedOptimizer(Optimizer):
    """Mixed into the user's optimizer class by ``manage_optimizer``."""

    _managed: ManagedModel
    _parameter_index: dict[int, int]
    _scales_itself: bool | None
    _loading = False

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """The state by parameter, read-only: fresh tensors at every access; ``load_state_dict`` changes it."""
        return {} if self._loading else _States(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the updates that wait, or confirm those that ran during the backward.

        Raises:
            DoorError: If a hyper-parameter was changed after the backward that used it.
            HostUpdateError: If an update on the host failed.
            OptionError: If ``closure`` is given.
        """
        if closure is not None:
            raise OptionError(
                "step: closure is not supported by a prepared optimizer; call the closure yourself, then step()"
            )
        self._opt_called = True
        with torch.no_grad():
            self._managed.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that wait: ``p.grad`` is None afterwards, or zeros with ``set_to_none=False``.

        Such zeros count in ``step()`` as in eager (decay and momentum), also where no backward added to them.

        Raises:
            DoorError: If they were used to update the weights and ``step()`` was not called yet.
        """
        self._managed.zero_grad(to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as the original class does: full tensors of the parameters' shapes, on the host.

        16-bit parameters have one more entry, ``protrain_master``: the fp32 master, for an exact resume.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` of this or of the original class returned.

        Raises:
            ValueError: If groups or their sizes differ, as the original class does.
        """
        self._loading = True
        try:
            super().load_state_dict({**state_dict, "state": {}})
        finally:
            self._loading = False
        store, book, indices = self._managed.settled_store(), self._managed.book, self._indices()
        for index in indices:
            book.reset(index, store)
        for number, state in state_dict["state"].items():
            book.give(indices[int(number)], state, store)
        self._managed.values_changed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what ``prepare`` took over is laid out once.

        Raises:
            OptionError: Always.
        """
        raise OptionError(
            "add_param_group: a prepared optimizer's parameters are laid out once; add the group before calling "
            "prepare (a group with lr=0 can be switched on later)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the states belong to one model.

        Raises:
            OptionError: Always.
        """
        raise OptionError("a prepared optimizer cannot be copied or pickled; save its state_dict()")

    def _indices(self) -> list[int]:
        return [self._parameter_index[id(p)] for group in self.param_groups for p in group["params"]]


def manage_optimizer(optimizer: Optimizer, managed: ManagedModel, parameter_index: dict[int, int]) -> None:
    """Make ``optimizer`` a managed one in place."""
    del optimizer.state
    optimizer._managed = managed  # type: ignore[attr-defined]
    optimizer._parameter_index = parameter_index  # type: ignore[attr-defined]
    # Fused optimizers make GradScaler leave unscaling to them; here it unscales the gradients that wait.
    optimizer._scales_itself = optimizer.__dict__.get(AMP_SCALING)  # type: ignore[attr-defined]
    setattr(optimizer, AMP_SCALING, False)
    scheduled = "step" in optimizer.__dict__
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = _managed_class(type(optimizer))  # type: ignore[arg-type]
    optimizer._patch_step_function()  # step hooks, and the profiler's label
    if scheduled:
        _keep_scheduler_content(optimizer)


def release_optimizer(managed: ManagedModel) -> None:
    """Give the optimizer of a model that has not run its class and its states back; the inverse of the above."""
    optimizer = managed.book.optimizer
    if not isinstance(optimizer, ManagedOptimizer):
        return
    states: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        index = optimizer._parameter_index[id(parameter)]
        device = managed.source_device(index)
        for name, value in managed.book.given(index).items():
            moves = isinstance(value, torch.Tensor) and name != "step"  # torch.optim counts on the host
            states[parameter][name] = value.to(device) if moves else value
    scheduled, scales_itself = "step" in optimizer.__dict__, optimizer._scales_itself
    for name in ("_managed", "_parameter_index", "_scales_itself", AMP_SCALING, "step"):
        optimizer.__dict__.pop(name, None)
    optimizer.__class__ = type(optimizer).__mro__[2]
    optimizer.__dict__["state"] = states
    if scales_itself is not None:
        setattr(optimizer, AMP_SCALING, scales_itself)
    optimizer._patch_step_function()
    if scheduled:
        _keep_scheduler_content(optimizer)


class _States(Mapping[Any, Any]):
    """What ``optimizer.state`` gives: every parameter's state, fetched when asked for."""

    def __init__(self, optimizer: ManagedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        managed = self._optimizer._managed
        index = self._optimizer._parameter_index.get(id(parameter))
        return {} if index is None else managed.book.take(index, managed.settled_store())

    def __iter__(self) -> Iterator[Any]:
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if optimizer._managed.book.has_state(optimizer._parameter_index[id(parameter)]):
                    yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.cache
def _managed_class(base: type[Optimizer]) -> type[Optimizer]:
    return type(f"Managed{base.__name__}", (ManagedOptimizer, base), {"__module__": __name__})


def _keep_scheduler_content(optimizer: Optimizer) -> None:
    """Put back the mark that a scheduler made before ``prepare`` left on ``step``; it warns if the mark is gone."""
    reference = weakref.ref(optimizer)

    def marked(*args: Any, **kwargs: Any) -> Any:
        held = reference()
        assert held is not None
        return type(held).step(held, *args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]
