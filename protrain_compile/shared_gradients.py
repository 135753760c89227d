"""SharedGradients: the waiting gradients of a model that ranks share, as ``p.grad`` gives and takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protrain_compile.chunks import ParameterSpec
from protrain_compile.errors import DoorError
from protrain_compile.sharded_residency import ShardedResidency
from protrain_compile.update_guard import UpdateGuard
from protrain_compile.waiting_gradients import Parameters, WaitingGradients


class SharedGradients(WaitingGradients):
    """Hands out whole gradients, means over ranks: a read is a collective call, and gives a copy.

    A copy is kept until ``take_back`` writes this rank's part of it to the shard that waits, so that clipping and
    unscaling in place work; all ranks are to write the same.
    """

    _residency: ShardedResidency

    def __init__(
        self, specs: Sequence[ParameterSpec], parameters: Parameters, residency: ShardedResidency, guard: UpdateGuard
    ) -> None:
        super().__init__(specs, parameters, residency, guard)
        self._copies: dict[int, torch.Tensor] = {}

    def replace(self, index: int, value: torch.Tensor | None) -> None:
        """See :meth:`WaitingGradients.replace`."""
        super().replace(index, value)
        if value is None:
            self._copies.pop(index, None)

    def take_back(self) -> None:
        """See :meth:`WaitingGradients.take_back`."""
        for index, copy in self._copies.items():
            self._memory(index).copy_(self._residency.store.part_here(index, copy))
        self._copies.clear()

    def complete(self) -> None:
        """See :meth:`WaitingGradients.complete`; also reduces the gradients that were kept whole."""
        self.take_back()
        super().complete()
        self._residency.complete()

    def drop(self, *, to_none: bool) -> None:
        """See :meth:`WaitingGradients.drop`."""
        self._copies.clear()
        super().drop(to_none=to_none)

    def _hand_out(self, index: int) -> torch.Tensor:
        if index not in self._copies:
            self._copies[index] = self._residency.store.whole(index, self._memory(index))
        return self._copies[index]

    def _memory(self, index: int) -> torch.Tensor:
        """Return, flat, what of a waiting gradient lies on this rank."""
        store = self._residency.store
        chunk, where = store.slot_range(index)
        if store.spec.layout.chunks[chunk].dtype != self._specs[index].dtype:
            self._residency.widen(chunk)
        return self._residency.waiting_gradient(chunk)[where]

    def _add(self, index: int, given: torch.Tensor) -> None:
        raise DoorError(
            f"{self._specs[index].name} has a gradient from outside of the compiled model (an autograd.Function of the "
            "parameter), which is not averaged over ranks: compute it inside, or train on one rank"
        )
