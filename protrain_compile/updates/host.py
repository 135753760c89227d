"""Executes updates on CPU cores: a fused kernel in C, or torch operations where no compiler exists.

Calls are synchronous and hold no GIL while the kernel runs; an updater runs one at a time (a second caller waits for
the first). ``job_queue.py`` runs the same kernel behind the caller's back.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from protrain_compile.updates.definition import Segment, StepScalars, check_segments, reference_update
from protrain_compile.updates.formats import ChunkStates
from protrain_compile.updates.native import ArrayStruct, SegmentStruct, UpdateStruct, load_library
from protrain_compile.updates.threads import update_threads


class HostUpdater(Protocol):
    """What both executions offer; all tensors are flat, contiguous and on the CPU."""

    threads: int

    def update(self, states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]) -> None:
        """Update a chunk in place; arguments as of :func:`~protrain_compile.updates.definition.reference_update`."""

    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` to ``total`` (each bf16, fp16 or fp32), in fp32 per element, rounded once."""

    def convert(self, target: Tensor, source: Tensor) -> None:
        """Write ``source`` into ``target`` (each bf16, fp16 or fp32), rounded to nearest even."""

    def square_sum(self, values: Tensor) -> float:
        """Return the sum of squares, in double precision: not finite exactly when some element is not."""

    def close(self) -> None:
        """End the updater's threads; it cannot be used afterwards. May be called again."""


def make_host_updater(threads: int | None = None) -> HostUpdater:
    """Return the fastest updater that this machine has, with ``threads`` threads (default: `update_threads()`)."""
    library = load_library()
    if library is None:
        return TorchUpdater()
    return NativeUpdater(library, update_threads() if threads is None else threads)


_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class NativeUpdater:
    """The fused kernel of ``kernel.c`` on a pool of its own threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        pool = library.protrain_pool_create(threads)
        if not pool:
            raise MemoryError(f"no memory for a pool of {threads} update threads")
        self.threads = int(library.protrain_pool_threads(pool))
        self.library = library
        self._pool: int = pool
        self._turn = threading.Lock()
        self._destroy = weakref.finalize(self, library.protrain_pool_destroy, pool)
        self._destroy.atexit = False  # a daemon thread may be in an update; the process's end ends the pool

    @property
    def pool(self) -> int:
        """The library's pool; RuntimeError once the updater is closed."""
        if not self._destroy.alive:
            raise RuntimeError("this host updater is closed")
        return self._pool

    def update(self, states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]) -> None:
        """See :meth:`HostUpdater.update`."""
        job, table = update_struct(states, gradient, segments)
        with self._turn:
            self.library.protrain_update(self.pool, ctypes.byref(job), table)

    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """See :meth:`HostUpdater.accumulate`."""
        self._run("protrain_accumulate", total, gradient)

    def convert(self, target: Tensor, source: Tensor) -> None:
        """See :meth:`HostUpdater.convert`."""
        self._run("protrain_convert", target, source)

    def square_sum(self, values: Tensor) -> float:
        """See :meth:`HostUpdater.square_sum`."""
        total = self._run("protrain_square_sum", values, values)
        assert total is not None
        return total

    def scale(self, values: Tensor) -> None:
        """Read and write each fp32 of ``values`` once; a measure of the bandwidth that bounds an update."""
        assert values.dtype == torch.float32
        self._run("protrain_scale", values, values)

    def close(self) -> None:
        """See :meth:`HostUpdater.close`."""
        with self._turn:
            self._destroy()

    def _run(self, function: str, target: Tensor, source: Tensor) -> float | None:
        job = array_struct(target, source)
        with self._turn:
            result: float | None = getattr(self.library, function)(self.pool, ctypes.byref(job))
        return result


def update_struct(
    states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]
) -> tuple[UpdateStruct, ctypes.Array[SegmentStruct]]:
    """Return the kernel's arguments for an update; ValueError if they do not fit each other."""
    check_update(states, gradient, segments)
    segments = _joined(segments)
    job = UpdateStruct(
        *(_address(part) for part in (states.param, states.companion)),
        *(_address(part) for part in (states.moment1, states.moment2, states.moment2_max)),
        gradient.data_ptr(),
        None,
        len(segments),
        int(states.format),
        _DTYPES[gradient.dtype],
    )
    return job, (SegmentStruct * len(segments))(*(SegmentStruct(s.begin, s.end, 0, *s.scalars) for s in segments))


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbours with equal scalars, as most parameters of a chunk have: fewer to convert for each call."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].end == segment.begin and joined[-1].scalars == segment.scalars:
            joined[-1] = Segment(joined[-1].begin, segment.end, segment.scalars)
        else:
            joined.append(segment)
    return joined


def array_struct(target: Tensor, source: Tensor) -> ArrayStruct:
    """Return the kernel's arguments for two flat arrays; ValueError if they do not fit each other."""
    check_pair(target, source)
    types = (_DTYPES[target.dtype], _DTYPES[source.dtype])
    return ArrayStruct(target.data_ptr(), source.data_ptr(), None, target.numel(), *types)


class TorchUpdater:
    """The same updates in torch operations, several times slower; torch's own threads run them."""

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()

    def update(self, states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]) -> None:
        """See :meth:`HostUpdater.update`; Adam runs in torch's fused kernel, the rest in the reference."""
        check_update(states, gradient, segments)
        for begin, end, scalars in segments:
            if not scalars.kind.has_moment2 or scalars.step_size == 0.0:
                reference_update(states, gradient, [Segment(begin, end, scalars)])
                continue
            for start in range(begin, end, _FUSED_SLICE):
                stop = min(start + _FUSED_SLICE, end)
                _fused_adam(states.narrow(start, stop), gradient[start:stop], scalars)

    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """See :meth:`HostUpdater.accumulate`."""
        check_pair(total, gradient)
        total.copy_(total.float().add_(gradient))

    def convert(self, target: Tensor, source: Tensor) -> None:
        """See :meth:`HostUpdater.convert`."""
        check_pair(target, source)
        target.copy_(source)

    def square_sum(self, values: Tensor) -> float:
        """See :meth:`HostUpdater.square_sum`."""
        check_pair(values, values)
        parts = (values[start : start + _FUSED_SLICE] for start in range(0, values.numel(), _FUSED_SLICE))
        return float(sum(part.double().square_().sum().item() for part in parts))

    def close(self) -> None:
        """See :meth:`HostUpdater.close`; there is nothing to end."""


_FUSED_SLICE = 1 << 20
"""Elements per call of torch's fused kernel: its fp32 temporaries take 8 MiB, whatever the chunk's size."""

_PAST_CORRECTIONS = 1e30
"""A step count at which Adam's bias corrections are 1 in double precision."""


def _fused_adam(part: ChunkStates, gradient: Tensor, scalars: StepScalars) -> None:
    """Run torch's fused Adam with the corrections folded into its learning rate and eps.

    ``step_size * m / (sqrt(v) * c + eps) = (step_size / c) * m / (sqrt(v) + eps / c)``, and torch's decoupled decay
    multiplies by ``1 - lr * weight_decay``.
    """
    assert part.moment1 is not None
    assert part.moment2 is not None
    master = part.load_master()
    lr = scalars.step_size / scalars.moment2_correction
    decoupled = scalars.l2 == 0.0
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kept_max = [part.moment2_max] if scalars.kind.has_moment2_max and part.moment2_max is not None else []
    fused(
        [master],
        [gradient.float() * scalars.gradient_factor],
        [part.moment1],
        [part.moment2],
        kept_max,
        [torch.tensor(_PAST_CORRECTIONS)],
        lr=lr,
        beta1=scalars.moment1_keep,
        beta2=scalars.moment2_keep,
        weight_decay=(1.0 - scalars.decay) / lr if decoupled else scalars.l2,
        eps=scalars.eps / scalars.moment2_correction,
        amsgrad=scalars.kind.has_moment2_max,
        maximize=False,
    )
    part.store_master(master)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_update(states: ChunkStates, gradient: Tensor, segments: Sequence[Segment]) -> None:
    """Raise ValueError unless these can be an update on the host."""
    check_segments(states, gradient, segments)
    _check_host(gradient)


def check_pair(target: Tensor, source: Tensor) -> None:
    """Raise ValueError unless these are host arrays of one length."""
    for tensor in (target, source):
        _check_host(tensor)
        if not tensor.is_contiguous():
            raise ValueError("tensors must be contiguous")
    if target.numel() != source.numel():
        raise ValueError(f"tensors must have one length, got {target.numel()} and {source.numel()}")


def _check_host(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.dtype not in _DTYPES:
        raise ValueError(f"expected bf16, fp16 or fp32 on the CPU, got {tensor.dtype} on {tensor.device}")
