"""Slabs: exact size, pinning and its failure, order of release, and no use after free."""

import gc
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from protrain_compile.runtime import host_memory
from protrain_compile.runtime.host_budget import HostMemoryError
from protrain_compile.runtime.host_memory import HostMemory, PinningError, layout_offsets

MIB = 1 << 20


class LimitedRegistrar:
    """Pins up to a number of bytes, as a locked-memory limit does, and writes down what happens."""

    def __init__(self, limit_bytes: int = 1 << 60) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}
        self.events: list[tuple[str, int]] = []

    def register(self, address: int, size_bytes: int) -> None:
        if sum(self.registered.values()) + size_bytes > self.limit_bytes:
            raise PinningError("out of memory")
        self.registered[address] = size_bytes
        self.events.append(("register", address))

    def unregister(self, address: int) -> None:
        del self.registered[address]
        self.events.append(("unregister", address))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def watched_unmap(monkeypatch):
    """The addresses given to munmap, in order, which is still called."""
    libc, unmapped = host_memory._libc(), []

    class Watched:
        mmap, madvise = libc.mmap, libc.madvise

        @staticmethod
        def munmap(address, length):
            unmapped.append(address)
            return libc.munmap(address, length)

    monkeypatch.setattr(host_memory, "_libc", lambda: Watched)
    return unmapped


@pytest.mark.parametrize("mebibytes", [65, 129])
def test_a_slab_costs_what_was_asked_for(mebibytes):
    memory = HostMemory()
    before = resident_bytes()
    slab = memory.allocate(mebibytes * MIB, "chunk parameters")
    grown = resident_bytes() - before
    assert mebibytes * MIB * 0.98 <= grown <= mebibytes * MIB * 1.1
    assert memory.held_bytes == slab.size_bytes == mebibytes * MIB
    memory.close()
    assert resident_bytes() - before < 2 * MIB


@pytest.mark.parametrize("size", [1, 255, 4095, 4096, 4097, 3 * MIB + 5])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_slabs_are_zero_and_writable_to_the_last_byte(size, threads, huge_pages):
    slab = HostMemory(threads=threads, huge_pages=huge_pages).allocate(size, "test")
    view = slab.tensor(0, size, torch.uint8)
    assert not view.any()
    view.fill_(7)
    assert view[-1] == 7


def test_kernels_without_populate_are_served(monkeypatch):
    monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 9999)
    before = resident_bytes()
    slab = HostMemory(threads=2).allocate(16 * MIB, "test")
    assert resident_bytes() - before > 15 * MIB
    assert not slab.tensor(0, 16 * MIB, torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int16, torch.int64])
def test_views_share_memory_and_are_aligned(dtype):
    slab = HostMemory().allocate(4096, "test")
    view, same = slab.tensor(256, 10, dtype), slab.tensor(256, 10, dtype)
    view.fill_(3)
    assert torch.equal(view, same)
    assert view.data_ptr() % 256 == 0
    assert slab.tensor(0, 0, dtype).numel() == 0


@pytest.mark.parametrize(("offset", "count"), [(128, 1), (-256, 1), (0, 1025), (3840, 65), (0, -1)])
def test_views_outside_are_refused(offset, count):
    with pytest.raises(ValueError, match="must lie"):
        HostMemory().allocate(4096, "test").tensor(offset, count, torch.float32)


def test_layout_offsets_are_aligned():
    assert layout_offsets([1, 256, 300, 0, 5]) == ([0, 256, 512, 1024, 1024], 1280)
    assert layout_offsets([]) == ([], 0)


def test_unregistered_before_unmapped_in_reverse_order(watched_unmap, monkeypatch):
    registrar = LimitedRegistrar()
    memory = HostMemory(registrar)
    for _ in range(3):
        memory.allocate(MIB, "test")
    addresses = list(registrar.registered)
    order: list[int] = watched_unmap
    monkeypatch.setattr(registrar, "unregister", lambda address: order.append(-address))
    memory.close()
    memory.close()
    gc.collect()
    assert order == [step for address in reversed(addresses) for step in (-address, address)]
    assert memory.held_bytes == memory.pinned_bytes == 0


def test_tensors_keep_their_slab(watched_unmap):
    registrar = LimitedRegistrar()
    memory = HostMemory(registrar)
    view = memory.allocate(MIB, "test").tensor(512, 100, torch.float32)[3:7]
    view.fill_(5)
    memory.close()
    del memory
    gc.collect()
    assert registrar.registered
    assert not watched_unmap
    assert torch.equal(view, torch.full((4,), 5.0))
    del view
    gc.collect()
    assert not registrar.registered
    assert len(watched_unmap) == 1


def test_a_closed_slab_gives_no_views():
    memory = HostMemory()
    slab = memory.allocate(MIB, "test")
    other = memory.allocate(MIB, "test")
    slab.close()
    slab.close()
    assert memory.held_bytes == MIB
    with pytest.raises(ValueError, match="closed"):
        slab.tensor(0, 1, torch.float32)
    assert other.tensor(0, 1, torch.float32).item() == 0


def test_pinning_that_fails_leaves_pageable_memory_and_one_warning():
    memory = HostMemory(LimitedRegistrar(limit_bytes=5 * MIB))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slabs = [memory.allocate(2 * MIB, "optimizer states") for _ in range(5)]
    assert [slab.pinned for slab in slabs] == [True, True, False, False, False]
    (warning,) = caught
    text = str(warning.message)
    assert all(part in text for part in ("pinned", "optimizer states", "ulimit -l", "2.0 MiB", "4.0 MiB"))
    assert "CUDA" not in text
    assert warning.filename == __file__
    assert (memory.held_bytes, memory.pinned_bytes) == (10 * MIB, 4 * MIB)
    slabs[4].tensor(0, 10, torch.float32).fill_(1)


def test_without_a_registrar_nothing_is_pinned_and_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not HostMemory().allocate(MIB, "test").pinned


def test_a_registrar_that_breaks_leaves_nothing_mapped(watched_unmap):
    class Broken(LimitedRegistrar):
        def register(self, address, size_bytes):
            raise KeyboardInterrupt

    memory = HostMemory(Broken())
    with pytest.raises(KeyboardInterrupt):
        memory.allocate(MIB, "test")
    assert len(watched_unmap) == 1
    assert memory.held_bytes == 0


def test_more_than_the_address_space_is_refused_in_words():
    with pytest.raises(HostMemoryError, match=r"optimizer states.*GiB.*host_memory_budget"):
        HostMemory().allocate(1 << 60, "optimizer states")
    with pytest.raises(ValueError, match="at least 1 byte"):
        HostMemory().allocate(0, "test")


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    head = "import gc, os, sys, torch\nsys.path.insert(0, '.')\nfrom protrain_compile.runtime.host_memory import *\n"
    return subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, timeout=120, check=False
    )


RECORDER = """
class Registrar:
    def register(self, address, size_bytes): print("register", flush=True)
    def unregister(self, address): print("unregister", flush=True)
"""


def test_forked_children_do_not_inherit_a_slab():
    script = RECORDER + (
        "memory = HostMemory(Registrar())\n"
        "view = memory.allocate(1 << 20, 'test').tensor(0, 10, torch.float32)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    memory.close(); saved = view; del view; del saved; gc.collect()\n"  # neither unmaps nor unregisters
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    view[0].item()\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        f"assert os.WTERMSIG(status) == {int(signal.SIGSEGV)}, status\n"
        "assert view.sum() == 0\n"
    )
    result = run_script(script)
    assert (result.returncode, result.stdout.split()) == (0, ["register", "unregister"]), result.stderr


def test_exit_unregisters_and_keeps_the_memory_of_tensors():
    script = RECORDER + (
        "import atexit\n"
        "atexit.register(lambda: print('late', view.sum().item(), flush=True))\n"
        "memory = HostMemory(Registrar())\n"
        "view = memory.allocate(1 << 20, 'test').tensor(0, 10, torch.float32)\n"
        "view.fill_(1)\n"
    )
    result = run_script(script)
    assert (result.returncode, sorted(result.stdout.split())) == (0, ["10.0", "late", "register", "unregister"])


def test_data_loader_workers_run_beside_slabs():
    script = (
        "from torch.utils.data import DataLoader\n"
        "view = HostMemory().allocate(8 << 20, 'test').tensor(0, 10, torch.float32)\n"
        "loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context='fork')\n"
        "assert sum(int(batch) for batch in loader) == 28\n"
        "assert view.sum() == 0\n"
    )
    result = run_script(script)
    assert result.returncode == 0, result.stderr
