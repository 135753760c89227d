"""Host memory that crosses the link: slabs of exactly the bytes needed, pinned where possible.

The pinned allocators of torch and CUDA round up to powers of two and zero pages on one core. A slab here is an
anonymous mapping, touched by several threads at once (which backs it with memory) and then registered with the driver.

- Forked children (data loaders) do not inherit it.
- It lives as long as anything refers to it: a tensor keeps its slab mapped after ``close()``.
- It is unregistered before it is unmapped, and at interpreter exit unregistered only: the process's end unmaps it.
- Where it cannot be pinned (memlock limits, containers), it stays pageable: slower copies, right results, one warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import math
import mmap
import os
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from protrain_compile.byte_text import format_size
from protrain_compile.runtime.host_budget import HostMemoryError

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 256
"""Alignment of views: CUDA's own, and more than the 16 bytes below which compiled code clones its inputs."""

_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_CUDA_HOST_REGISTER_PORTABLE = 1


class PinningError(Exception):
    """Memory could not be pinned; the text says why."""


class Registrar(Protocol):
    """Pins memory for one kind of device."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin ``[address, address + size_bytes)``.

        Raises:
            PinningError: If it cannot be pinned; no error state is left behind.
        """

    def unregister(self, address: int) -> None:
        """Unpin what was registered at ``address``."""


class CudaRegistrar:
    """Pins memory with ``cudaHostRegister``, for all CUDA devices of the process."""

    def register(self, address: int, size_bytes: int) -> None:
        """See :meth:`Registrar.register`."""
        runtime = _torch_cudart()
        error = runtime.cudaHostRegister(address, size_bytes, _CUDA_HOST_REGISTER_PORTABLE)
        if int(error) != 0:
            _clear_cuda_error()
            raise PinningError(str(runtime.cudaGetErrorString(error)))

    def unregister(self, address: int) -> None:
        """See :meth:`Registrar.unregister`; a failure is logged, as there is nothing left to do about it."""
        runtime = _torch_cudart()
        error = runtime.cudaHostUnregister(address)
        if int(error) != 0:
            _clear_cuda_error()
            log.warning("cudaHostUnregister failed: %s", runtime.cudaGetErrorString(error))


def _torch_cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_cuda_error() -> None:
    """Forget the last CUDA error, which torch would report at its next kernel launch as that kernel's failure."""
    runtime = _cuda_runtime()
    if runtime is not None:
        runtime.cudaGetLastError()
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # its launch check reads, raises and clears it


@functools.cache
def _cuda_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded, by its name and major version; None if torch links it in."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcudart.so.{major}", "libcudart.so"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    return None


class Slab:
    """One mapping; make it with :meth:`HostMemory.allocate`.

    Attributes:
        size_bytes: What was asked for.
        pinned: Whether copies from and to it run asynchronously at the link's full speed.
    """

    def __init__(self, size_bytes: int, mapping: _Mapping) -> None:
        self.size_bytes = size_bytes
        self.pinned = mapping.registered
        self._memory: ctypes.Array[ctypes.c_uint8] | None = _memory_of(mapping)

    def tensor(self, offset_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return ``count`` elements of ``dtype`` at ``offset_bytes``, a multiple of 256, as a flat tensor.

        The tensor keeps the slab's memory mapped and pinned, also after :meth:`close`.

        Raises:
            ValueError: If the range leaves the slab or is not aligned.
        """
        if self._memory is None:
            raise ValueError("this slab is closed")
        end = offset_bytes + count * dtype.itemsize
        if offset_bytes % ALIGNMENT_BYTES or offset_bytes < 0 or count < 0 or end > self.size_bytes:
            raise ValueError(
                f"bytes [{offset_bytes}, {end}) must lie in the slab's {self.size_bytes} "
                f"and start at a multiple of {ALIGNMENT_BYTES}"
            )
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset_bytes)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._memory is None

    def close(self) -> None:
        """Give the memory back as soon as no tensor refers to it; may be called again."""
        self._memory = None


class HostMemory:
    """Allocates slabs and keeps account of them.

    Args:
        registrar: Pins the slabs; None for memory that no device reads.
        threads: Threads that touch a new slab; default: the cores this process may use, at most 16.
        huge_pages: Ask for transparent huge pages: updates walk many arrays at once and miss fewer translations.
    """

    def __init__(
        self, registrar: Registrar | None = None, *, threads: int | None = None, huge_pages: bool = True
    ) -> None:
        self._registrar = registrar
        self._threads = min(16, len(os.sched_getaffinity(0))) if threads is None else threads
        self._huge_pages = huge_pages
        self._slabs: list[Slab] = []
        self._warned = False

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs that are not closed."""
        return sum(slab.size_bytes for slab in self._slabs if not slab.closed)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of those that are pinned."""
        return sum(slab.size_bytes for slab in self._slabs if slab.pinned and not slab.closed)

    def allocate(self, size_bytes: int, purpose: str) -> Slab:
        """Return a new slab of zeros, backed by memory and pinned if possible.

        Args:
            size_bytes: At least 1; rounded up to a page, not to a power of two.
            purpose: What for, as in "chunk parameters"; part of messages.

        Raises:
            HostMemoryError: If the system has no address space or memory left for it.
        """
        mapping = _Mapping.make(size_bytes, purpose, self._huge_pages)
        try:
            mapping.touch(self._threads)
            if self._registrar is not None:
                self._pin(mapping, self._registrar, purpose)
        except BaseException:
            mapping.release()
            raise
        slab = Slab(size_bytes, mapping)
        self._slabs = [other for other in self._slabs if not other.closed] + [slab]
        return slab

    def close(self) -> None:
        """Close all slabs, the last one made first; may be called again."""
        while self._slabs:
            self._slabs.pop().close()

    def _pin(self, mapping: _Mapping, registrar: Registrar, purpose: str) -> None:
        try:
            mapping.register(registrar)
        except PinningError as error:
            log.info("%s: %s stays pageable: %s", purpose, format_size(mapping.length), error)
            if self._warned:
                return
            self._warned = True
            warnings.warn(
                f"host memory for {purpose} ({format_size(mapping.length)}) could not be pinned ({error}); training "
                f"continues with pageable memory and slower copies. {format_size(self.pinned_bytes)} is pinned so far. "
                "Raise the locked-memory limit (ulimit -l, docker --ulimit memlock=-1, or the job's limit), or free "
                "host memory.",
                RuntimeWarning,
                stacklevel=3,
            )


class _Mapping:
    """Anonymous memory and what must be undone for it, once, by the process that made it."""

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self.length = length
        self._registrar: Registrar | None = None
        self._owner = os.getpid()
        self._mapped = True

    @classmethod
    def make(cls, size_bytes: int, purpose: str, huge_pages: bool) -> _Mapping:
        """Map ``size_bytes``, rounded up to pages, apart from forked children."""
        if size_bytes < 1:
            raise ValueError(f"{purpose}: a slab has at least 1 byte, got {size_bytes}")
        length = math.ceil(size_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address in (None, _MAP_FAILED):
            reason = os.strerror(ctypes.get_errno())
            raise HostMemoryError(
                f"{purpose}: the system refused {format_size(length)} of host memory ({reason}); "
                "lower host_memory_budget or keep more on the device with a larger memory_budget"
            )
        mapping = cls(address, length)
        mapping._advise(mmap.MADV_DONTFORK)
        if huge_pages:
            mapping._advise(mmap.MADV_HUGEPAGE)
        return mapping

    @property
    def registered(self) -> bool:
        """Whether the memory is pinned."""
        return self._registrar is not None

    def touch(self, threads: int) -> None:
        """Back every page with memory, on ``threads`` threads at once; the GIL is free meanwhile."""
        share = math.ceil(self.length / threads / _TOUCH_BYTES) * _TOUCH_BYTES
        starts = range(0, self.length, share)
        lengths = [min(share, self.length - start) for start in starts]
        with ThreadPoolExecutor(len(starts), thread_name_prefix="protrain-touch") as pool:
            list(pool.map(_populate, (self.address + start for start in starts), lengths))

    def register(self, registrar: Registrar) -> None:
        """Pin the memory."""
        registrar.register(self.address, self.length)
        self._registrar = registrar

    def unregister(self) -> None:
        """Unpin it, if it is pinned and this process made it."""
        registrar, self._registrar = self._registrar, None
        if registrar is not None and os.getpid() == self._owner:
            registrar.unregister(self.address)

    def release(self) -> None:
        """Unpin and unmap it; a forked child, which has not inherited it, leaves its addresses alone."""
        self.unregister()
        if self._mapped and os.getpid() == self._owner:
            _libc().munmap(self.address, self.length)
        self._mapped = False

    def _advise(self, advice: int) -> None:
        _libc().madvise(self.address, self.length, advice)  # advice may be refused: nothing depends on it


_TOUCH_BYTES = 2 << 20
"""Threads touch whole huge pages."""


def _populate(address: int, length: int) -> None:
    if _libc().madvise(address, length, _MADV_POPULATE_WRITE) != 0:  # before Linux 5.14
        ctypes.memset(address, 0, length)


def _memory_of(mapping: _Mapping) -> ctypes.Array[ctypes.c_uint8]:
    """Return an array over the mapping that releases it when the last reference to the array is gone.

    ``torch.frombuffer`` refers to the object it was given, so tensors count as references.
    """
    memory = (ctypes.c_uint8 * mapping.length).from_address(mapping.address)
    weakref.finalize(memory, mapping.release).atexit = False  # tensors may outlive the interpreter's exit handlers
    weakref.finalize(memory, mapping.unregister)
    return memory


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, integer, integer, integer, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, integer]
    return libc


def align_up(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to the views' alignment, for laying out a slab."""
    return math.ceil(size_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def layout_offsets(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Return the offset of each part of a slab, aligned, and the bytes that all of them take."""
    ends = list(itertools.accumulate((align_up(size) for size in sizes_bytes), initial=0))
    return ends[:-1], ends[-1]
