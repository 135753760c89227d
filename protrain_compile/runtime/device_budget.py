"""How many bytes of device memory a step may have, and what it has taken when it fails.

::

    allowed   what this process may have allocated at once: the user's ``memory_budget``, never more than there is, less
              a reserve for the gaps between allocations
    other     of it, what is allocated outside of the step when it is planned: other models, the user's optimizer
    usable    allowed - other, which the planner divides up

What there is: the memory that the driver says is free, and what PyTorch's allocator holds already; at most the share
that ``torch.cuda.set_per_process_memory_fraction`` leaves. What the driver, the context and loaded kernels take is
missing from it by itself; libraries take their workspaces before it is read. Gaps are few because the allocator is told
to let its segments grow. On the CPU nothing is measured: only a given budget bounds anything.
"""

from __future__ import annotations

import dataclasses

import torch

from protrain_compile import compat
from protrain_compile.byte_text import format_size
from protrain_compile.errors import ProtrainError

RESERVE_SHARE = 0.03
"""Left of what there is. Chosen, not measured: a prediction this much too low still fits."""


LOOP_BYTES = 4 << 20
"""What a training loop holds beside the step: the next batch, losses. A GPT-2's peak was 2 MiB above its prediction."""


class DeviceMemoryError(ProtrainError, torch.OutOfMemoryError):
    """A step found less device memory than it was planned for."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Device memory as it is at one moment.

    Attributes:
        allocated_bytes: In tensors of this process.
        reserved_bytes: Held by PyTorch's allocator.
        free_bytes: Free, as the driver says.
        total_bytes: Of the device.
        limit_bytes: The most that the allocator may hold.
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int
    limit_bytes: int

    @classmethod
    def now(cls, device: torch.device) -> Usage:
        """Return the usage of a CUDA device; without an index, of the current one."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(index)
        return cls(
            allocated_bytes=torch.cuda.memory_allocated(index),
            reserved_bytes=torch.cuda.memory_reserved(index),
            free_bytes=free,
            total_bytes=total,
            limit_bytes=int(total * torch.cuda.get_per_process_memory_fraction(index)),
        )

    @property
    def outside_bytes(self) -> int:
        """Taken outside of PyTorch: by the driver, by kernels, by other processes."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def available_bytes(self) -> int:
        """What the allocator could hold at most."""
        return min(self.free_bytes + self.reserved_bytes, self.limit_bytes)


@dataclasses.dataclass(frozen=True)
class DeviceBudget:
    """Device memory that a step may use.

    Attributes:
        allowed_bytes: See the module docstring; None where nothing bounds it.
        other_bytes: See the module docstring.
        reserve_bytes: How far a measured peak may exceed a prediction without a word.
        usage: What the device looked like; None for the CPU.
    """

    allowed_bytes: int | None
    other_bytes: int = 0
    reserve_bytes: int = 0
    usage: Usage | None = None

    @property
    def usable_bytes(self) -> int | None:
        """What the planner may divide up; None without a bound."""
        return None if self.allowed_bytes is None else max(0, self.allowed_bytes - self.other_bytes)

    def explain(self, error: BaseException, predicted_bytes: int, now: Usage | None) -> DeviceMemoryError:
        """Return the error that says what was planned and what was there when a step ran out of memory."""
        planned = f"planned to peak at {format_size(predicted_bytes)}"
        if self.allowed_bytes is not None:
            planned += f" of {format_size(self.allowed_bytes)}"
        found = ""
        if now is not None and self.usage is not None:
            found = (
                f"; PyTorch holds {format_size(now.reserved_bytes)} ({format_size(now.allocated_bytes)} of it in "
                f"tensors), and {format_size(now.outside_bytes)} are taken outside of PyTorch "
                f"({format_size(self.usage.outside_bytes)} when the step was planned)"
            )
        return DeviceMemoryError(
            f"out of device memory in a step that was {planned}, {format_size(self.other_bytes)} of it held by others"
            f"{found}. Free what has grown since, or pass a smaller memory_budget. ({_first_line(error)})"
        )


def measure_budget(
    device: torch.device, memory_budget: int | None, held_bytes: int, coming_bytes: int = 0
) -> DeviceBudget:
    """Return the budget of a step on ``device``.

    Args:
        device: Where the model computes.
        memory_budget: What the user allowed, or None.
        held_bytes: Allocated already, and part of the step's own prediction: inputs, packed chunks.
        coming_bytes: What others will allocate, if it is not there yet: an optimizer's states.
    """
    if device.type != "cuda":
        return DeviceBudget(memory_budget, coming_bytes)
    compat.use_expandable_segments()
    _load_libraries(device)
    budget = budget_of(Usage.now(device), memory_budget, held_bytes, coming_bytes)
    return dataclasses.replace(budget, other_bytes=budget.other_bytes + LOOP_BYTES)


def budget_of(usage: Usage, memory_budget: int | None, held_bytes: int, coming_bytes: int = 0) -> DeviceBudget:
    """Return the budget where the device looks like ``usage``; see ``measure_budget``."""
    reserve = int(usage.available_bytes * RESERVE_SHARE)
    most = usage.available_bytes - reserve
    allowed = most if memory_budget is None else min(memory_budget, most)
    other = max(usage.allocated_bytes - held_bytes, coming_bytes, 0)
    return DeviceBudget(allowed, other, reserve, usage)


def _load_libraries(device: torch.device) -> None:
    """Let the libraries for products take their workspaces now, which they keep: on an H200 32 MiB for each thread.

    Threads that compute are this one and the one that autograd runs backwards of ``device`` on.
    """

    def leaf() -> torch.Tensor:
        return torch.ones(16, 16, dtype=torch.bfloat16, device=device, requires_grad=True)

    with torch.inference_mode(False), torch.enable_grad():
        leaves = [leaf() for _ in range(2)]
        products = [leaves[0] @ leaf(), torch.addmm(leaf()[0], leaves[1], leaf())]
        # Nothing reads the products: compute-sanitizer does not see how they are written, and would report it.
        torch.autograd.grad(products, leaves, [leaf().detach() for _ in products])


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
