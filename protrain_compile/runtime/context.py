"""Contexts: what one forward keeps for its backward.

Through AOTAutograd goes one token per forward, a small CPU tensor, as the only saved value. The context is keyed by it
and freed when autograd lets go of the token: after the backward, after an abandoned forward, after an exception. So any
number of forwards can be alive, each under the schedule that it ran with.

A value that the caller can reach, an argument or an output, may be modified in place before the backward; as in eager,
such a backward is refused. That goes for kept values that share memory with one, too: ``watched`` are those tensors.

While a backward runs it takes the kept values out of the context, so that each dies at its last use; under
``retain_graph`` they stay for the next backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from protrain_compile.errors import ContextError
from protrain_compile.managed import ManagedModel
from protrain_compile.runtime.swap import SwapSpace
from protrain_compile.schedule import Schedule


class Context:
    """What one forward keeps: its schedule, its symbolic sizes, the graph inputs to bind again, and the kept values."""

    def __init__(
        self,
        schedule: Schedule,
        primals: list[Any],
        kept: list[Any],
        watched: Iterable[Any] = (),
        managed: ManagedModel | None = None,
        swap: SwapSpace | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.schedule = schedule
        self.sizes = sizes
        self.managed = managed
        self.swap = swap
        self._chunk_versions = () if managed is None else tuple(managed.versions)
        if managed is not None:
            managed.opened(self)
        self._primals = primals
        self._kept = kept
        self._watched = [*primals, *(value for value in watched if value is not None)]
        self._versions = [_version(value) for value in self._watched]
        self.consumed = False

    def arguments(self, *, keep: bool) -> list[Any]:
        """Return the primals and kept values for one backward, in order; give them up unless ``keep``.

        Raises:
            ContextError: If an earlier backward took them, or one was modified in place since the forward.
        """
        if self.consumed:
            raise ContextError(
                "trying to run backward through the compiled graph a second time: its saved values are freed; "
                "pass retain_graph=True to the first backward"
            )
        self._check_chunks()
        for value, version in zip(self._watched, self._versions, strict=True):
            if _version(value) != version:
                raise ContextError(self._modified(value, version))
        values = self._primals + self._kept
        if not keep:
            self.consumed = True
            self._primals, self._kept, self._watched, self._versions = [], [], [], []
        return values

    def _check_chunks(self) -> None:
        """Refuse a backward through weights that were updated since the forward, as eager does for saved tensors."""
        if self.managed is None or self.schedule.chunks is None:
            return
        for chunk in {place[0] for place in self.schedule.chunks.place_of.values()}:
            if self.managed.versions[chunk] != self._chunk_versions[chunk]:
                slot = self.managed.packed.store.spec.layout.chunks[chunk].slots[0]
                raise ContextError(
                    f"{self.managed.name_of(slot.parameter)} is needed for the backward and has been updated since "
                    "the forward; run this backward before optimizer.step() (and before a backward that updates the "
                    "weights)"
                )

    def _modified(self, value: torch.Tensor, version: int) -> str:
        position = next((i for i, primal in enumerate(self._primals) if primal is value), None)
        what = "an output of the compiled graph, or an argument"
        if position is not None:
            what = self.schedule.program.inputs[self.schedule.backward_inputs.primals[position]].name
        return (
            f"{what} (shape {tuple(value.shape)}) is needed for the backward and has been modified by an inplace "
            f"operation since the forward: it is at version {_version(value)}, expected version {version}"
        )


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


class ContextTable:
    """The contexts of one compiled graph, by token."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """How many forwards are alive."""
        return len(self._contexts)

    def open(self, context: Context) -> torch.Tensor:
        """Store ``context`` and return the token that keeps it alive."""
        number = next(self._numbers)
        token = torch.tensor(number, dtype=torch.int64, device="cpu")
        self._contexts[number] = context
        weakref.finalize(token, self._contexts.pop, number, None).atexit = False
        return token

    def find(self, token: torch.Tensor) -> Context:
        """Return the context of ``token``.

        Raises:
            ContextError: If the token was copied and the original freed (saved-tensor hooks that copy do so).
        """
        context = self._contexts.get(int(token))
        if context is None:
            raise ContextError(
                "the forward's context is gone: its token was copied and the original freed, as saved-tensor hooks "
                "that copy tensors do; leave such hooks off around a protrain model (its plan decides what is kept)"
            )
        return context
