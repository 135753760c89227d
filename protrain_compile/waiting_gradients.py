"""WaitingGradients: the gradients that wait for ``step()``, as ``p.grad`` gives and takes them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from protrain_compile.chunks import ParameterSpec
from protrain_compile.errors import DoorError
from protrain_compile.residency import ChunkResidency
from protrain_compile.update_guard import UpdateGuard


class WaitingGradients:
    """Hands out the gradients that wait in a residency, and keeps what was handed out from being overwritten.

    Args:
        specs: The model's parameters.
        residency: Where gradients wait.
        guard: Is told of every read: from then on updates wait for ``step()``.
    """

    def __init__(self, specs: Sequence[ParameterSpec], residency: ChunkResidency, guard: UpdateGuard) -> None:
        self._specs = specs
        self._residency = residency
        self._guard = guard
        self._handed_out: list[weakref.ref[torch.Tensor]] = []

    def get(self, index: int) -> torch.Tensor | None:
        """Return a view of a parameter's waiting gradient, or None.

        Raises:
            DoorError: If it was used up in the backward.
        """
        spec, store = self._specs[index], self._residency.store
        if not spec.trainable:
            return None
        if self._guard.ahead:
            self._guard.gradient_read(spec.name)
        chunk, slot = store.spec.layout.place_of[index]
        if slot not in self._residency.pending.get(chunk, ()):
            return None
        self._guard.gradient_read(spec.name)
        if store.spec.layout.chunks[chunk].dtype != spec.dtype:
            self._residency.widen(chunk)
        _, where = store.slot_range(index)
        view = self._residency.waiting_gradient(chunk)[where].view(spec.shape)
        self._handed_out.append(weakref.ref(view))
        return view

    def set(self, index: int, value: torch.Tensor | None) -> None:
        """Replace or drop a parameter's waiting gradient.

        Raises:
            DoorError: If none waits, or the value does not fit.
        """
        current, name = self.get(index), self._specs[index].name
        if value is None:
            if current is not None:
                self._residency.forget(*self._residency.store.spec.layout.place_of[index])
        elif current is None:
            raise no_gradient_waits(name)
        elif value.shape != current.shape:
            raise DoorError(
                f"{name}.grad has the shape {tuple(current.shape)}; a value of shape {tuple(value.shape)} does not fit"
            )
        else:
            current.copy_(value)

    def drop(self) -> None:
        """Forget what waits, as ``zero_grad()`` does."""
        if self._residency.pending:
            self.leave_to_holders()
            self._residency.drop_pending()

    def leave_to_holders(self) -> None:
        """Give gradients that the user still holds a memory of their own, before theirs is used anew."""
        for ref in self._handed_out:
            view = ref()
            if view is not None:
                view.data = view.clone()
        self._handed_out.clear()


def no_gradient_waits(name: str) -> DoorError:
    """Return the error for a gradient that is set where none waits."""
    return DoorError(f"{name}.grad can only be replaced between backward() and step()")
