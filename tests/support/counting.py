"""A CPU meter that counts memory, as a device's allocator would."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protrain_compile.profiler.meter import CpuMeter


class CountingMeter(CpuMeter, TorchDispatchMode):
    """Counts the storages of all tensors that operations returned while it was entered, and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen += [weakref.ref(each) for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.most_bytes = max(self.most_bytes, self.allocated_bytes())
        return result

    def allocated_bytes(self) -> int:
        alive = [(ref, each) for ref in self.seen if (each := ref()) is not None]
        self.seen = [ref for ref, _ in alive]
        storages = (each.untyped_storage() for _, each in alive)
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def peak_bytes(self, call: Any) -> tuple[Any, int]:
        before = self.most_bytes = self.allocated_bytes()
        with torch.no_grad():
            result = call()
        return result, self.most_bytes - before
