"""Named operations of a schedule that are not artefacts. Plain functions: a call costs well under a microsecond."""

from __future__ import annotations

from typing import Any, Protocol

import torch


def pack(*values: Any) -> list[Any]:
    """Hand ``values`` over to the boxed call that follows, which lets each die at its last use.

    Generated code drops its own names for values that are not used again right after this line.
    """
    return list(values)


def snapshot(value: torch.Tensor, *, stream: str) -> torch.Tensor:
    """Copy a graph input that the forward gives a new value, for a backward that needs the old one."""
    return value.clone()


class ChunkOperations(Protocol):
    """Who carries out the operations on chunks: the residency of one prepared model, a graph's first argument.

    Every chunk lies in a *home* on the host or the device. ``buffer`` names the chunk buffer that an operation uses.
    """

    def bind(self, chunk: int, slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Return views of a persistent chunk's parameters."""
        ...

    def gather(self, chunk: int, slots: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return fresh copies of exact values, for a graph that reads them in another type than the chunk has."""
        ...

    def prefetch(self, chunk: int, buffer: int) -> None:
        """Start copying a chunk's parameters into a buffer, behind its last reader and the chunk's update."""
        ...

    def wait(self, chunk: int, buffer: int, slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Make the compute stream wait for the chunk; return views of its parameters in the buffer."""
        ...

    def release(self, chunk: int, buffer: int) -> None:
        """Mark the buffer as free once what the compute stream was given so far is done; its content stays valid."""
        ...

    def collect(self, chunk: int, buffer: int | None, slots: tuple[int, ...], gradients: list[Any]) -> None:
        """Write gradients over the chunk's parameters in the buffer, or into a persistent chunk's gradient storage."""
        ...

    def offload(self, chunk: int, buffer: int) -> None:
        """Start copying the gradients in the buffer to the host; free the buffer when that is done."""
        ...

    def update(self, chunk: int, slots: tuple[int, ...]) -> None:
        """Update the chunk with the gradients that were collected, now or (``at_step``) when ``step()`` is called."""
        ...


class SwapOperations(Protocol):
    """Who carries out the operations on swapped values (policy ``swap``): a graph's argument before the model's own.

    ``swapped`` stands for the values of one segment on the host; the forward's context keeps it, and its memory on the
    host goes back to a pool when it dies. ``reloaded`` stands for these values on their way back.
    """

    def swap_out(self, values: list[Any]) -> Any:
        """Start copying values to the host, behind what computes them; their memory stays until ``release``."""
        ...

    def release(self, swapped: Any) -> None:
        """Make the compute stream wait until the copy has left; the values' device memory is free then."""
        ...

    def reload(self, swapped: Any) -> Any:
        """Start copying the values back, to new device memory."""
        ...

    def wait_reload(self, reloaded: Any) -> tuple[torch.Tensor, ...]:
        """Make the compute stream wait for the values; return them, with their shapes and strides."""
        ...


class RankOperations(ChunkOperations, Protocol):
    """Who carries out the operations on chunks that ranks share: every rank owns a shard of each."""

    def all_gather(self, chunk: int, buffer: int | None) -> None:
        """Start gathering every rank's shard of the parameters: in the buffer, or of a chunk whole on the device."""
        ...

    def reduce_scatter(self, chunk: int, buffer: int | None) -> None:
        """Start averaging the collected gradient over ranks; each rank keeps its shard of the mean."""
        ...


def bind(residency: ChunkOperations, *, chunk: int, slots: tuple[int, ...], stream: str) -> tuple[torch.Tensor, ...]:
    """See :meth:`ChunkOperations.bind`."""
    return residency.bind(chunk, slots)


def gather(
    residency: ChunkOperations, *, chunk: int, slots: tuple[int, ...], dtype: torch.dtype, stream: str
) -> tuple[torch.Tensor, ...]:
    """See :meth:`ChunkOperations.gather`."""
    return residency.gather(chunk, slots, dtype)


def prefetch(residency: ChunkOperations, *, chunk: int, buffer: int, stream: str) -> None:
    """See :meth:`ChunkOperations.prefetch`."""
    residency.prefetch(chunk, buffer)


def wait(
    residency: ChunkOperations, *, chunk: int, buffer: int, slots: tuple[int, ...], stream: str
) -> tuple[torch.Tensor, ...]:
    """See :meth:`ChunkOperations.wait`."""
    return residency.wait(chunk, buffer, slots)


def release(residency: ChunkOperations, *, chunk: int, buffer: int, stream: str) -> None:
    """See :meth:`ChunkOperations.release`."""
    residency.release(chunk, buffer)


def collect(
    residency: ChunkOperations,
    gradients: list[Any],
    *,
    chunk: int,
    buffer: int | None = None,
    slots: tuple[int, ...],
    stream: str,
) -> None:
    """See :meth:`ChunkOperations.collect`; boxed: empties ``gradients``."""
    residency.collect(chunk, buffer, slots, gradients)
    gradients.clear()


def offload(residency: ChunkOperations, *, chunk: int, buffer: int, stream: str) -> None:
    """See :meth:`ChunkOperations.offload`."""
    residency.offload(chunk, buffer)


def update(residency: ChunkOperations, *, chunk: int, slots: tuple[int, ...], stream: str) -> None:
    """See :meth:`ChunkOperations.update`."""
    residency.update(chunk, slots)


def swap_out(swap: SwapOperations, values: list[Any], *, segment: int, stream: str) -> Any:
    """See :meth:`SwapOperations.swap_out`; boxed: empties ``values``."""
    swapped = swap.swap_out(values)
    values.clear()
    return swapped


def release_swapped(swap: SwapOperations, swapped: Any, *, segment: int, stream: str) -> None:
    """See :meth:`SwapOperations.release`."""
    swap.release(swapped)


def reload(swap: SwapOperations, swapped: Any, *, segment: int, stream: str) -> Any:
    """See :meth:`SwapOperations.reload`."""
    return swap.reload(swapped)


def wait_reload(swap: SwapOperations, reloaded: Any, *, segment: int, stream: str) -> tuple[torch.Tensor, ...]:
    """See :meth:`SwapOperations.wait_reload`."""
    return swap.wait_reload(reloaded)


def all_gather(residency: RankOperations, *, chunk: int, buffer: int | None = None, stream: str) -> None:
    """See :meth:`RankOperations.all_gather`."""
    residency.all_gather(chunk, buffer)


def reduce_scatter(residency: RankOperations, *, chunk: int, buffer: int | None = None, stream: str) -> None:
    """See :meth:`RankOperations.reduce_scatter`."""
    residency.reduce_scatter(chunk, buffer)
