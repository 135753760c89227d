"""What is available in faked machines and containers."""

import pytest

from protrain_compile.byte_text import format_size
from protrain_compile.errors import OptionError
from protrain_compile.runtime.host_budget import HostBudget, HostMemoryError, cgroup_folders

GIB = 1 << 30


class Machine:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root):
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal: 1 kB\nMemAvailable:   {100 * GIB // 1024} kB\n")

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))

    def group(self, path, **files):
        for name, text in files.items():
            self.write(self.cgroup / path / name.replace("__", "."), text)

    def budget(self, user_bytes=None):
        return HostBudget(user_bytes, self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_bare_machine_has_what_the_kernel_says(machine):
    assert machine.budget().available_bytes() == 100 * GIB


def test_version_2_takes_the_least_along_the_path(machine):
    machine.write(machine.proc / "self/cgroup", "0::/pod/container\n")
    machine.group("pod/container", memory__max="max\n", memory__current=f"{GIB}\n")
    machine.group("pod", memory__max=f"{30 * GIB}\n", memory__current=f"{20 * GIB}\n")
    assert machine.budget().available_bytes() == 10 * GIB
    machine.group("pod/container", memory__high=f"{5 * GIB}\n")
    assert machine.budget().available_bytes() == 4 * GIB


def test_file_cache_counts_as_available(machine):
    machine.write(machine.proc / "self/cgroup", "0::/\n")
    stat = f"anon 5\nactive_file {2 * GIB}\ninactive_file {3 * GIB}\n"
    machine.group(".", memory__max=30 * GIB, memory__current=20 * GIB, memory__stat=stat)
    assert machine.budget().available_bytes() == 15 * GIB


def test_version_1_and_its_unlimited_value(machine):
    machine.write(machine.proc / "self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    machine.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=50 * GIB)
    assert machine.budget().available_bytes() == 100 * GIB
    machine.group(
        "memory/docker/abc",
        memory__limit_in_bytes=8 * GIB,
        memory__usage_in_bytes=6 * GIB,
        memory__stat=f"inactive_file 1\ntotal_active_file 0\ntotal_inactive_file {GIB}\n",
    )
    assert machine.budget().available_bytes() == 3 * GIB


def test_a_container_that_sees_the_hosts_path(machine):
    machine.write(machine.proc / "self/cgroup", "0::/../../kubepods/pod1\n")
    machine.group(".", memory__max=4 * GIB, memory__current=GIB)
    assert cgroup_folders("memory", machine.proc, machine.cgroup) == [machine.cgroup]
    assert machine.budget().available_bytes() == 3 * GIB


def test_usage_beyond_the_limit_leaves_nothing(machine):
    machine.write(machine.proc / "self/cgroup", "0::/\n")
    machine.group(".", memory__max=GIB, memory__current=2 * GIB)
    assert machine.budget().available_bytes() == 0


def test_the_users_budget_counts_what_is_held(machine):
    budget = machine.budget(20 * GIB)
    assert budget.available_bytes() == 20 * GIB
    assert budget.available_bytes(held_bytes=15 * GIB) == 5 * GIB
    assert budget.available_bytes(held_bytes=25 * GIB) == 0


@pytest.mark.parametrize(
    ("user_bytes", "needed", "words"),
    [
        (20 * GIB, 24 * GIB, ["raise host_memory_budget", "20.00 GiB"]),
        (None, 120 * GIB, ["MemAvailable", "free host memory", "100.00 GiB"]),
    ],
)
def test_too_little_raises_with_numbers_and_a_remedy(machine, user_bytes, needed, words):
    with pytest.raises(HostMemoryError) as caught:
        machine.budget(user_bytes).require(needed, "optimizer states")
    for word in (*words, "optimizer states", format_size(needed), "memory_budget"):
        assert word in str(caught.value)


def test_the_containers_limit_is_named(machine):
    machine.write(machine.proc / "self/cgroup", "0::/job\n")
    machine.group("job", memory__max=2 * GIB, memory__current=GIB)
    with pytest.raises(HostMemoryError, match=r"memory\.max of .*job.*limit of the container"):
        machine.budget().require(2 * GIB, "optimizer states")


def test_enough_is_enough(machine):
    machine.budget(20 * GIB).require(20 * GIB, "optimizer states")


def test_nothing_known_is_no_bound(tmp_path):
    budget = HostBudget(None, tmp_path, tmp_path)
    assert budget.available_bytes() is None
    budget.require(1 << 60, "optimizer states")


def test_parse():
    assert HostBudget.parse("20GiB").user_bytes == 20 * GIB
    assert HostBudget.parse(None).user_bytes is None
    with pytest.raises(OptionError, match="host_memory_budget"):
        HostBudget.parse("lots")


def test_this_machine_answers():
    available = HostBudget().available_bytes()
    assert available is None or available > 0


def test_ranks_of_a_node_share_its_memory(machine):
    assert machine.budget().available_bytes(sharers=8) == 100 * GIB // 8
    assert machine.budget(user_bytes=5 * GIB).available_bytes(sharers=8) == 5 * GIB
    assert machine.budget(user_bytes=20 * GIB).available_bytes(sharers=8) == 100 * GIB // 8
