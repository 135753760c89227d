"""How many threads a host update uses.

``OMP_NUM_THREADS`` is not asked: launchers set it to 1 for every rank, meant for data loading, and an update on one
core then outlasts the step. What counts is where this process may run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from protrain_compile.runtime.host_budget import cgroup_folders, read_text

FREE_CORES = ((16, 3), (8, 2))
"""From how many cores on how many stay free, for the launching thread and those of autograd and the driver; else one.
Measured with 16: 12 and 13 threads reach 95 and 98% of the memory bandwidth and leave kernel launches as fast as alone
(1.03 and 0.98 of the time); beside 14 they take 1.43 times as long, and 16 slow the update itself down by a third."""


def update_threads(
    environ: Mapping[str, str] | None = None, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the threads for this process: its cores, shared among the node's ranks, less those left to launch.

    Args:
        environ: Read for ``LOCAL_WORLD_SIZE``, which launchers set; by default the process's environment.
        proc: The proc file system, for the process's control group.
        cgroup: Where control groups are mounted, for a CPU quota.
    """
    environ = os.environ if environ is None else environ
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(proc, cgroup)
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    return threads_of_share(cores // local_ranks(environ))


def threads_of_share(cores: int) -> int:
    """Return the update threads of a process that has ``cores`` cores."""
    if cores <= 2:
        return 1
    return cores - next((free for least, free in FREE_CORES if cores >= least), 1)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return how many ranks of the job share this node; 1 unless a launcher says otherwise."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.strip().isdecimal() else 1


def cpu_quota(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU cores that the process's control groups allow, or None where none limits them."""
    quotas = [_folder_quota(folder) for folder in cgroup_folders("cpu", proc, cgroup)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folder_quota(folder: Path) -> float | None:
    fields = (read_text(folder / "cpu.max") or "").split()
    if len(fields) != 2:
        fields = [read_text(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if not all(field.strip().isdecimal() for field in fields) or int(fields[1]) == 0:
        return None  # "max", -1, or no such file
    return int(fields[0]) / int(fields[1])
