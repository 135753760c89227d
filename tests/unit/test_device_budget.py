"""What a step may use of a device that looks like this or that."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from protrain_compile.errors import ProtrainError
from protrain_compile.runtime.device_budget import (
    RESERVE_SHARE,
    DeviceBudget,
    DeviceMemoryError,
    Usage,
    budget_of,
    measure_budget,
)

GIB = 1 << 30
USAGE = Usage(
    allocated_bytes=10 * GIB, reserved_bytes=12 * GIB, free_bytes=60 * GIB, total_bytes=80 * GIB, limit_bytes=80 * GIB
)


def test_default_is_what_is_available_less_a_reserve() -> None:
    found = budget_of(USAGE, None, held_bytes=4 * GIB)
    reserve = int(72 * GIB * RESERVE_SHARE)
    assert found == DeviceBudget(72 * GIB - reserve, 6 * GIB, reserve, USAGE)
    assert found.usable_bytes == 66 * GIB - reserve


def test_a_cap_of_the_process_bounds_it() -> None:
    capped = dataclasses.replace(USAGE, limit_bytes=24 * GIB)
    assert capped.available_bytes == 24 * GIB
    assert budget_of(capped, None, 0).allowed_bytes == 24 * GIB - int(24 * GIB * RESERVE_SHARE)


def test_the_users_budget_counts_in_whole_where_there_is_room_for_gaps_beside_it() -> None:
    assert budget_of(USAGE, 20 * GIB, 10 * GIB).usable_bytes == 20 * GIB
    most = 72 * GIB - int(72 * GIB * RESERVE_SHARE)
    assert budget_of(USAGE, 72 * GIB, 10 * GIB).usable_bytes == most
    assert budget_of(USAGE, 100 * GIB, 10 * GIB).usable_bytes == most


def test_what_others_take() -> None:
    assert budget_of(USAGE, 20 * GIB, 0).other_bytes == 10 * GIB
    assert budget_of(USAGE, 20 * GIB, 15 * GIB).other_bytes == 0, "more of it is the step's than was allocated"
    assert budget_of(USAGE, 20 * GIB, 8 * GIB, coming_bytes=7 * GIB).other_bytes == 7 * GIB, "an optimizer to come"
    assert budget_of(USAGE, 20 * GIB, 0, coming_bytes=7 * GIB).other_bytes == 10 * GIB, "an optimizer that is there"
    assert budget_of(USAGE, GIB, 0).usable_bytes == 0


def test_the_cpu_has_a_budget_only_if_one_is_given() -> None:
    cpu = torch.device("cpu")
    assert measure_budget(cpu, None, 5).usable_bytes is None
    assert measure_budget(cpu, 100, 5).usable_bytes == 100
    assert measure_budget(cpu, 100, 5, coming_bytes=30).usable_bytes == 70


def test_memory_that_grew_elsewhere_is_told_in_numbers() -> None:
    now = dataclasses.replace(USAGE, free_bytes=20 * GIB, reserved_bytes=15 * GIB)
    error = budget_of(USAGE, 20 * GIB, 4 * GIB).explain(RuntimeError("CUDA out of memory\nmore"), 18 * GIB, now)
    assert isinstance(error, ProtrainError)
    assert isinstance(error, torch.OutOfMemoryError)
    for text in (
        "planned to peak at 18.00 GiB of 20.00 GiB",
        "6.00 GiB of it held by others",
        "PyTorch holds 15.00 GiB (10.00 GiB of it in tensors)",
        "45.00 GiB are taken outside of PyTorch (8.00 GiB when the step was planned)",
        "(CUDA out of memory)",
        "memory_budget",
    ):
        assert text in str(error)
    assert "\n" not in str(error)


def test_without_figures_of_the_device() -> None:
    error = DeviceBudget(None).explain(RuntimeError(""), GIB, None)
    with pytest.raises(DeviceMemoryError, match=r"planned to peak at 1\.00 GiB, 0 B of it held by others\. Free"):
        raise error
