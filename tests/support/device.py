"""Lets prepared models on the CPU run on a ``ThreadedDevice``, their computation included.

The launching thread runs ahead of the compute stream as on a GPU: while a schedule's graph or ``step()`` is being
launched, whole artefacts and operations that write into given memory are queued for the compute stream. Anything else
waits for that stream first, which is always right. An artefact's results are tensors full of NaN until it has run.
"""

from __future__ import annotations

import os
import tempfile
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda, build
from support.threaded import ThreadedDevice, poison
from support.threaded_runtime import ScheduledWorker, ThreadedStreams
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from protrain_compile import managed
from protrain_compile.artefacts import Artefact
from protrain_compile.managed import ManagedModel
from protrain_compile.residency import Buffer, ChunkResidency
from protrain_compile.runtime.chunk_store import ChunkStore
from protrain_compile.runtime.compiled_graph import CompiledGraph
from protrain_compile.runtime.streams import make_streams
from protrain_compile.runtime.swap import HostPlace, SwapSpace
from protrain_compile.updates.device import DeviceUpdater
from protrain_compile.updates.host import NativeUpdater, make_host_updater
from protrain_compile.updates.native import find_compilers

aten = torch.ops.aten
DEFERRED = frozenset(
    (
        aten.zero_.default,
        aten.copy_.default,
        aten._foreach_copy_.default,
        aten._foreach_add_.List,
        aten.linalg_vector_norm.out,
    )
)
"""Operations that only write into memory that is given: they need not have run for the launching thread to go on."""
UNREAD = frozenset((aten.set_.source_Storage_storage_offset,))
"""Operations that read no elements."""
OPERATIONS = {
    ChunkResidency: ("bind", "gather", "prefetch", "wait", "release", "collect", "offload", "update", "apply"),
    SwapSpace: ("swap_out", "release", "reload", "wait_reload"),
}
"""The methods that carry out the operations of a schedule and of ``step()``."""


class Lagging(TorchDispatchMode):
    """Queues operations of the launching thread for the compute stream."""

    def __init__(self, device: ThreadedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DEFERRED:
            self._device.submit(self._device.compute, lambda: func(*args, **kwargs), str(func))
            return kwargs.get("out", None if "_foreach_" in str(func) else args[0])
        if func not in UNREAD and not _makes_views(func) and _has_tensor((*args, *kwargs.values())):
            self._device.drain(self._device.compute)
        return func(*args, **kwargs)


def _makes_views(func: Any) -> bool:
    returns = func._schema.returns
    return not func._schema.is_mutable and bool(returns) and all(each.alias_info is not None for each in returns)


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(_has_tensor(value) if isinstance(value, list | tuple) else isinstance(value, Tensor) for value in values)


def install(device: ThreadedDevice, patch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
    """Make every model that is prepared on the CPU from now on run on ``device``.

    Args:
        device: The device.
        patch: Undoes it.
        folder: For the library that stands in for a driver; default: one that is deleted at once.
    """
    cuda = _stand_in(folder)

    def make_worker(updater: Any = None) -> ScheduledWorker:
        updater = updater or make_host_updater()
        if cuda is not None and isinstance(updater, NativeUpdater):
            return ScheduledWorker(device, cuda.event, updater=updater, driver=cuda.driver)
        return ScheduledWorker(device, Gate, updater=updater)

    patch.setattr(managed, "make_streams", lambda of: ThreadedStreams(device) if of.type == "cpu" else make_streams(of))
    patch.setattr(managed, "HostWorker", make_worker)
    patch.setattr(Buffer, "__init__", _registered(Buffer.__init__))
    patch.setattr(HostPlace, "__init__", _named(HostPlace.__init__))
    patch.setattr(SwapSpace, "_room", _used_before(device, SwapSpace._room))
    patch.setattr(SwapSpace, "release", _used_after(device, SwapSpace.release))
    for owner, names in OPERATIONS.items():
        for name in names:
            patch.setattr(owner, name, _counted(device, name, getattr(owner, name)))
    patch.setattr(Artefact, "__call__", _deferred_artefact(device, Artefact.__call__))
    patch.setattr(DeviceUpdater, "update", _deferred_update(device, DeviceUpdater.update))
    patch.setattr(ManagedModel, "step", _launched(device, "step", ManagedModel.step, lambda model: model.residency))
    for name in ("forward", "inference"):
        original = getattr(CompiledGraph, name)
        patch.setattr(CompiledGraph, name, _launched(device, name, original, lambda g, a: g._bind(a).managed))
    backward = _launched(device, "backward", CompiledGraph.backward, lambda g, a: g.contexts.find(a[0]).managed)
    patch.setattr(CompiledGraph, "backward", backward)
    for name in ("drop_accumulators", "close"):
        patch.setattr(ChunkStore, name, _poisoning(getattr(ChunkStore, name), name == "close"))


class Gate:
    """What a job of a worker without a device waits for."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.happen = self._open.set

    def synchronize(self) -> None:
        """Block until it is opened."""
        self._open.wait()


def _registered(original: Callable[..., None]) -> Callable[..., None]:
    def make(buffer: Buffer, size_bytes: int, streams: Any) -> None:
        original(buffer, size_bytes, streams)
        if isinstance(streams, ThreadedStreams):
            buffer.arrival.kind, buffer.read.kind, buffer.left.kind = "arrival", "read", "left"
            poison(buffer.bytes)
            streams.buffers.add(buffer.bytes.data_ptr())

    return make


def _named(original: Callable[..., None]) -> Callable[..., None]:
    def make(place: HostPlace, slab: Any, streams: Any) -> None:
        original(place, slab, streams)
        if isinstance(streams, ThreadedStreams):
            place.made.kind, place.left.kind, place.read.kind = "computed", "swapped", "slab"

    return make


def _used_before(device: ThreadedDevice, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let the compute stream write last what nobody reads into memory that the launching thread has allocated."""

    def room(space: SwapSpace, bundle: Any) -> Tensor:
        made = original(space, bundle)
        if isinstance(space.streams, ThreadedStreams):
            device.submit(device.compute, lambda: poison(made), "use memory before")
        return made

    return room


def _used_after(device: ThreadedDevice, original: Callable[..., None]) -> Callable[..., None]:
    """Let the compute stream use memory as soon as it is free."""

    def release(space: SwapSpace, swapped: Any) -> None:
        _, sources = space._leaving.get(swapped.number, (None, []))
        original(space, swapped)
        for source in sources if isinstance(space.streams, ThreadedStreams) else ():
            device.submit(device.compute, lambda source=source: poison(source), "use memory after")

    return release


def _counted(device: ThreadedDevice, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def operate(owner: Any, *arguments: Any) -> Any:
        chunk = arguments[0] if isinstance(arguments[0], int) else None  # not a handle, which must die in time
        with device.operating(name, chunk):
            return original(owner, *arguments)

    return operate


def _stand_in(folder: Path | None) -> FakeCuda | None:
    compilers = find_compilers(os.environ)
    if not compilers:
        return None
    if folder is not None:
        return FakeCuda(build(compilers[-1], folder))
    with tempfile.TemporaryDirectory() as made:
        return FakeCuda(build(compilers[-1], Path(made)))


def _launched(
    device: ThreadedDevice, section: str, original: Callable[..., Any], managed_of: Callable[..., Any]
) -> Callable[..., Any]:
    def launched(owner: Any, *arguments: Any) -> Any:
        if managed_of(owner, *arguments) is None:
            return original(owner, *arguments)
        with device.launching(section), Lagging(device):
            return original(owner, *arguments)

    return launched


def _deferred_artefact(device: ThreadedDevice, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(artefact: Artefact, boxed: list[Any], *, stream: str) -> Sequence[Any]:
        made = _empty_results(artefact) if device.section else None
        if made is None:
            device.drain(device.compute)
            with _disable_current_modes():
                return original(artefact, boxed, stream=stream)
        values = list(boxed)
        boxed.clear()
        targets = [None if value is None else value.data for value in made]  # leaves the versions of results alone

        def run() -> None:
            for target, value in zip(targets, original(artefact, values, stream=stream), strict=True):
                if target is not None:
                    target.copy_(value)

        device.submit(device.compute, run, artefact.__name__)
        return made

    return call


def _empty_results(artefact: Artefact) -> list[Tensor | None] | None:
    """Return tensors of NaN for an artefact's results; None if they are not all tensors of known, dense shapes.

    None as well for compiled artefacts and those that a test has put something in place of.
    """
    if not isinstance(artefact._run, types.MethodType):
        return None
    made: list[Tensor | None] = []
    with _disable_current_modes():
        for node in artefact.graph.graph.output_node().args[0]:
            fake = node.meta.get("val") if node is not None else None
            if node is not None and not isinstance(fake, Tensor):
                return None
            if fake is not None and not _is_known(fake):
                return None
            made.append(None if fake is None else torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype))
        for value in made:
            if value is not None and value.numel():
                value.untyped_storage().fill_(0xFF)
    return made


def _is_known(fake: Tensor) -> bool:
    sizes = (*fake.shape, *fake.stride())
    expanded = any(stride == 0 and size > 1 for size, stride in zip(fake.shape, fake.stride(), strict=True))
    return all(isinstance(each, int) for each in sizes) and not expanded


def _deferred_update(device: ThreadedDevice, original: Callable[..., Any]) -> Callable[..., Any]:
    def update(updater: DeviceUpdater, *arguments: Any) -> None:
        with _disable_current_modes():
            device.submit(device.compute, lambda: original(updater, *arguments), "device update")

    return update


def _poisoning(original: Callable[[ChunkStore], None], everything: bool) -> Callable[[ChunkStore], None]:
    def close(store: ChunkStore) -> None:
        for tensor in [*store.accumulators.values(), *(store.landings if everything else ())]:
            poison(tensor)
        original(store)

    return close
