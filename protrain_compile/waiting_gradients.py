"""WaitingGradients: the gradients that wait for ``step()``, as ``p.grad`` gives and takes them.

Three kinds of them have no memory of their own until somebody asks:

=============  ======================================================================================================
from outside   autograd brought it from outside of the compiled model (an ``autograd.Function`` of a parameter): it
               lies in the Parameter's own ``grad`` and is added to the chunk's when read, or in ``step()``
zeros          ``zero_grad(set_to_none=False)`` left them; a backward adds to them, and ``step()`` updates with them
held           the user still refers to what ``p.grad`` gave, or to a view of it: it keeps its values
=============  ======================================================================================================
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from protrain_compile.chunks import ParameterSpec
from protrain_compile.errors import DoorError
from protrain_compile.residency import ChunkResidency
from protrain_compile.update_guard import UpdateGuard

Parameters = Sequence[weakref.ref[torch.nn.Parameter]]

_OWN: Any = torch.Tensor.grad
"""The ``grad`` of a Tensor itself, which a ManagedParameter's property hides."""


class WaitingGradients:
    """Hands out the gradients that wait in a residency, and keeps what was handed out from being overwritten.

    Args:
        specs: The model's parameters.
        parameters: The Parameters themselves.
        residency: Where gradients wait.
        guard: Is told of every read: from then on updates wait for ``step()``.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], parameters: Parameters, residency: ChunkResidency, guard: UpdateGuard
    ) -> None:
        self._specs = specs
        self._parameters = parameters
        self._residency = residency
        self._guard = guard
        self._zeros: set[int] = set()
        self._used: set[int] = set()
        self._handed_out: list[tuple[int, weakref.ref[torch.Tensor], torch.UntypedStorage]] = []

    def get(self, index: int) -> torch.Tensor | None:
        """Return a parameter's waiting gradient, in its memory, or None.

        Raises:
            DoorError: If it was used up in the backward.
        """
        spec, store = self._specs[index], self._residency.store
        if not spec.trainable:
            return None
        if self._guard.ahead:
            self._guard.gradient_read(spec.name)
        self._take_in(index)
        chunk, slot = store.spec.layout.place_of[index]
        if not self._waits(index) and index in self._zeros:
            self._residency.wait_from_zero(chunk, slot)
        if not self._waits(index):
            return None
        self._guard.gradient_read(spec.name)
        return self._hand_out(index)

    def _hand_out(self, index: int) -> torch.Tensor:
        chunk, _ = self._residency.store.spec.layout.place_of[index]
        # A storage of its own over the same memory: whoever refers to it can be counted.
        memory = self._memory(index)
        with torch.cuda.device_of(memory):  # type: ignore[no-untyped-call]  # else another GPU's is not exported
            view = torch.from_dlpack(memory)  # type: ignore[attr-defined]
        assert isinstance(view, torch.Tensor)
        self._handed_out.append((chunk, weakref.ref(view), view.untyped_storage()))
        return view

    def replace(self, index: int, value: torch.Tensor | None) -> None:
        """Replace or drop a parameter's waiting gradient.

        Raises:
            DoorError: If none waits, or the value does not fit.
        """
        current, name = self.get(index), self._specs[index].name
        if value is None:
            self._zeros.discard(index)
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

    def take_back(self) -> None:
        """Take over what was written to gradients that were handed out: nothing to do, they are views."""

    def drop(self, *, to_none: bool) -> None:
        """Forget what waits, as ``zero_grad()`` does; unless ``to_none``, zeros wait where eager has a gradient."""
        self._used |= self._indices(self._residency.pending)
        self._zeros = set() if to_none else self._zeros | self._used
        self._used = set(self._zeros)
        if self._residency.pending:
            with self.leaving_to_holders():
                self._residency.drop_pending()

    def complete(self) -> None:
        """Let everything wait that ``step()`` has to use: gradients from outside, and zeros that nothing was added to.

        Raises:
            DoorError: If a gradient came from outside after its parameter was updated in the backward.
        """
        for index in range(len(self._specs)):
            self._take_in(index)
        waiting, updated = self._indices(self._residency.pending), self._indices(self._residency.updated)
        for index in sorted(self._zeros - waiting - updated):
            self._residency.wait_from_zero(*self._residency.store.spec.layout.place_of[index])
        self._used |= waiting | updated

    @contextlib.contextmanager
    def leaving_to_holders(self) -> Iterator[None]:
        """Let gradients be used or dropped inside; what the user still holds of them keeps its values."""
        for _, ref, _ in self._handed_out:
            view = ref()
            if view is not None:
                view.data = view.clone()
                del view
        yield
        held = {chunk for chunk, _, storage in self._handed_out if torch._C._storage_Use_Count(storage._cdata) > 1}
        self._handed_out.clear()
        for chunk in sorted(held):
            self._residency.leave_gradient(chunk)

    def _waits(self, index: int) -> bool:
        chunk, slot = self._residency.store.spec.layout.place_of[index]
        return slot in self._residency.pending.get(chunk, ())

    def _memory(self, index: int) -> torch.Tensor:
        """Return a view of a waiting gradient in the parameter's data type."""
        store, spec = self._residency.store, self._specs[index]
        chunk, where = store.slot_range(index)
        if store.spec.layout.chunks[chunk].dtype != spec.dtype:
            self._residency.widen(chunk)
        return self._residency.waiting_gradient(chunk)[where].view(spec.shape)

    def _take_in(self, index: int) -> None:
        """Add a gradient that came from outside of the compiled model to what waits."""
        parameter = self._parameters[index]()
        given = None if parameter is None else _own_gradient(parameter)
        if parameter is None or given is None:
            return
        name = self._specs[index].name
        if self._guard.ahead:
            raise DoorError(
                f"{name} was updated in the backward, and a gradient from outside of the compiled model (an "
                "autograd.Function of the parameter) reached it too: pass max_grad_norm to prepare (math.inf for no "
                "clipping), so that updates wait for step()"
            )
        self._guard.gradient_read(name)
        if not self._waits(index):
            self._residency.wait_from_zero(*self._residency.store.spec.layout.place_of[index])
        self._add(index, given)
        _forget_own_gradient(parameter)

    def _add(self, index: int, given: torch.Tensor) -> None:
        self._memory(index).add_(given)

    def _indices(self, slots: dict[int, set[int]]) -> set[int]:
        """Return the parameters of some slots, by chunk."""
        chunks = self._residency.store.spec.layout.chunks
        return {chunks[chunk].slots[slot].parameter for chunk, members in slots.items() for slot in members}


def no_gradient_waits(name: str) -> DoorError:
    """Return the error for a gradient that is set where none waits."""
    return DoorError(f"{name}.grad can only be replaced between backward() and step()")


def refuse_outside_gradients(specs: Sequence[ParameterSpec], parameters: Parameters) -> None:
    """Refuse gradients of a model whose chunks are not packed yet.

    Raises:
        DoorError: If there are any.
    """
    for spec, ref in zip(specs, parameters, strict=True):
        parameter = ref()
        if parameter is not None and _own_gradient(parameter) is not None:
            raise DoorError(
                f"{spec.name} has a gradient from outside of the compiled model before the compiled model was called: "
                "call the compiled model first"
            )


def forget_outside_gradients(parameters: Parameters) -> None:
    """Drop every gradient that came from outside of the compiled model."""
    for ref in parameters:
        parameter = ref()
        if parameter is not None:
            _forget_own_gradient(parameter)


def _own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return what autograd itself accumulated; compiled backwards give it nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        found: torch.Tensor | None = _OWN.__get__(parameter)
    return found


def _forget_own_gradient(parameter: torch.nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _OWN.__set__(parameter, None)
