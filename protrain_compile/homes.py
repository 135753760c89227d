"""Homes: who keeps the values of managed tensors; a parameter's is its model, a view's is what it is a view of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from protrain_compile.errors import DoorError


class Home(Protocol):
    """Who keeps the values of managed tensors."""

    def name_of(self, index: int) -> str:
        """Return the name of a tensor's parameter."""
        ...

    def may_travel(self, index: int) -> bool:
        """Whether a chunk may hold a parameter in a 16-bit type, because its exact value is kept beside it."""
        ...

    def read(self, index: int) -> torch.Tensor:
        """Return a fresh tensor with the value."""
        ...

    def write(self, index: int, value: torch.Tensor) -> None:
        """Set the value."""
        ...

    def gradient(self, index: int) -> torch.Tensor | None:
        """Return a view of the waiting gradient, or None."""
        ...

    def set_gradient(self, index: int, value: torch.Tensor | None) -> None:
        """Replace or drop the waiting gradient."""
        ...

    def check_trainable(self, index: int, trainable: bool) -> None:
        """Refuse to freeze or unfreeze a parameter."""
        ...

    @property
    def snapshots(self) -> bool:
        """Whether detached values are asked for to be saved: plain tensors instead of aliases."""
        ...


class HasHome(Protocol):
    """A tensor whose value lies elsewhere: its home, and its number there."""

    _home: Home
    _index: int


def read(tensor: HasHome) -> torch.Tensor:
    """Return a fresh tensor with the value of ``tensor``."""
    # Outside of inference mode, so that the copy counts its versions.
    with torch.inference_mode(False), torch.no_grad():
        return tensor._home.read(tensor._index)


@dataclasses.dataclass(frozen=True)
class ViewHome:
    """The home of a view: replays it on a fresh value of what it is a view of."""

    source: HasHome
    replay: Callable[[torch.Tensor], torch.Tensor]

    def name_of(self, index: int) -> str:
        """See :meth:`Home.name_of`."""
        return self.source._home.name_of(self.source._index)

    def may_travel(self, index: int) -> bool:
        """See :meth:`Home.may_travel`."""
        return False

    def read(self, index: int) -> torch.Tensor:
        """See :meth:`Home.read`."""
        return self.replay(read(self.source))

    def write(self, index: int, value: torch.Tensor) -> None:
        """See :meth:`Home.write`."""
        base = read(self.source)
        with torch.no_grad():
            self.replay(base).copy_(value)
        self.source._home.write(self.source._index, base)

    def gradient(self, index: int) -> torch.Tensor | None:
        """See :meth:`Home.gradient`; a detached view has none."""
        return None

    def set_gradient(self, index: int, value: torch.Tensor | None) -> None:
        """See :meth:`Home.set_gradient`."""
        raise DoorError(f"a view of {self.name_of(index)} takes no gradient; set the parameter's own between steps")

    def check_trainable(self, index: int, trainable: bool) -> None:
        """See :meth:`Home.check_trainable`."""
        if trainable:
            raise DoorError(f"a view of {self.name_of(index)} cannot require a gradient; clone it first")

    @property
    def snapshots(self) -> bool:
        """See :attr:`Home.snapshots`."""
        return self.source._home.snapshots
