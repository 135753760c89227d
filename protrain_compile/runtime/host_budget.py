"""How many bytes of host memory may be taken, and a refusal with numbers before any is.

What is available is the least of the kernel's estimate (``MemAvailable``), what every control group on the process's
path leaves (a container's limit is usually far below the machine's memory), and the user's ``host_memory_budget``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from protrain_compile.byte_text import format_needed, format_size, parse_size
from protrain_compile.errors import ProtrainError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
USER = "host_memory_budget"
"""The source of the user's own bound."""


class HostMemoryError(ProtrainError, MemoryError):
    """Less host memory is available than a plan needs; nothing has been allocated."""


class HostLimit(NamedTuple):
    """One bound on host memory: what sets it, and the bytes it leaves."""

    source: str
    available_bytes: int


@dataclass(frozen=True)
class HostBudget:
    """Host memory that protrain may take.

    Attributes:
        user_bytes: The user's ``host_memory_budget``: a bound on all that protrain holds; None for none.
        proc: The proc file system.
        cgroup: Where control groups are mounted.
    """

    user_bytes: int | None = None
    proc: Path = PROC
    cgroup: Path = CGROUP

    @classmethod
    def parse(cls, host_memory_budget: int | str | None) -> HostBudget:
        """Return the budget for what a user passed as ``host_memory_budget``.

        Raises:
            OptionError: If it is not a size.
        """
        if host_memory_budget is None:
            return cls()
        return cls(user_bytes=parse_size(host_memory_budget, "host_memory_budget"))

    def limits(self, held_bytes: int = 0) -> list[HostLimit]:
        """Return every bound that applies now; ``held_bytes`` is what protrain holds already."""
        found = _memory_available(self.proc)
        for folder in cgroup_folders("memory", self.proc, self.cgroup):
            found += _folder_limits(folder)
        if self.user_bytes is not None:
            found.append(HostLimit(USER, max(0, self.user_bytes - held_bytes)))
        return found

    def available_bytes(self, held_bytes: int = 0, sharers: int = 1) -> int | None:
        """Return the bytes that may be taken now; None where nothing bounds them (not on Linux).

        Args:
            held_bytes: What protrain holds already.
            sharers: How many processes share the machine's memory evenly; the user's bound is for each.
        """
        limits = self.limits(held_bytes)
        shares = (each.available_bytes // (1 if each.source == USER else sharers) for each in limits)
        return min(shares, default=None)

    def require(self, needed_bytes: int, purpose: str, held_bytes: int = 0) -> None:
        """Return if ``needed_bytes`` more may be taken.

        Args:
            needed_bytes: Bytes about to be allocated.
            purpose: What for, as in "optimizer states"; part of the message.
            held_bytes: What protrain holds already, counted against ``host_memory_budget``.

        Raises:
            HostMemoryError: If they may not; the message names needed, available, the bound and what to change.
        """
        limits = self.limits(held_bytes)
        if not limits:
            return
        least = min(limits, key=lambda limit: limit.available_bytes)
        if needed_bytes > least.available_bytes:
            raise HostMemoryError(
                f"{purpose} needs {format_needed(needed_bytes)} of host memory, but "
                f"{format_size(least.available_bytes)} is available ({least.source}); {_advice(least.source)}"
            )


def _advice(source: str) -> str:
    remedies = "keep more on the device with a larger memory_budget, or use fewer ranks on this node"
    if source == USER:
        return f"raise host_memory_budget, {remedies}"
    if source == "MemAvailable":
        return f"free host memory, {remedies}"
    return f"raise the memory limit of the container or job, {remedies}"


# ---- what bounds memory --------------------------------------------------------------------------------------


def _memory_available(proc: Path) -> list[HostLimit]:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read_text(proc / "meminfo") or "", re.MULTILINE)
    return [HostLimit("MemAvailable", int(match[1]) * 1024)] if match else []


_VERSIONS = (
    ("memory.max", "memory.current", "active_file", "inactive_file"),
    ("memory.high", "memory.current", "active_file", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
)


def _folder_limits(folder: Path) -> list[HostLimit]:
    """Return what one control group leaves: its limit less its usage, file cache not counted (it can be dropped)."""
    found = []
    for limit_name, usage_name, *cache_names in _VERSIONS:
        limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is None or usage is None:
            continue  # no such file, or "max"
        cache = sum(_read_stat(folder / "memory.stat", name) for name in cache_names)
        found.append(HostLimit(f"{limit_name} of {folder}", max(0, limit - max(0, usage - cache))))
    return found


def cgroup_folders(controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """Return the folders of the process's control groups for ``controller``, innermost first, version 2 and 1.

    In a container, the path that the kernel tells may lie outside of what is mounted: folders that do not exist
    are left out, the mount's root is the last.
    """
    folders: list[Path] = []
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and hierarchy == "0":
            mounts = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroup / controllers, cgroup / controller]
        else:
            continue
        for mount in mounts:
            folders += _path_folders(mount, path)
    return list(dict.fromkeys(folders))


def _path_folders(mount: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    ancestry = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in ancestry if folder.is_dir()]


def read_text(path: Path) -> str | None:
    """Return a file's text; None if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _read_stat(path: Path, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", read_text(path) or "", re.MULTILINE)
    return int(match[1]) if match else 0
