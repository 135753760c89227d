"""Slabs registered with the CUDA driver: asynchronous copies, failures that stay ours, release in order."""

import gc
import subprocess
import sys
import warnings

import pytest
import torch

from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory, PinningError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def test_slabs_are_pinned_and_copies_return_at_once():
    memory = HostMemory(CudaRegistrar())
    slab = memory.allocate(256 * MIB, "test")
    assert slab.pinned
    host = slab.tensor(0, 256 * MIB // 4, torch.float32)
    assert host.is_pinned()
    device = torch.empty_like(host, device="cuda")
    host.fill_(3)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the device is busy for about a tenth of a second
    device.copy_(host, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    assert not copied.query()  # the call returned before the copy could begin
    torch.cuda.synchronize()
    assert (device == 3).all()
    del host
    memory.close()


def test_a_failure_to_pin_is_not_the_next_kernels_failure():
    memory = HostMemory(CudaRegistrar())
    view = memory.allocate(MIB, "test").tensor(0, 10, torch.float32)
    with pytest.raises(PinningError):
        CudaRegistrar().register(view.data_ptr(), 4096)  # registered already
    assert torch.ones(4, device="cuda").add(1).sum().item() == 8
    CudaRegistrar().unregister(16 * MIB)  # never registered: logged
    assert torch.ones(4, device="cuda").add(1).sum().item() == 8


def test_slabs_that_are_too_large_to_pin_stay_pageable():
    class Limited(CudaRegistrar):
        def register(self, address, size_bytes):
            if size_bytes > 4 * MIB:
                super().register(1 << 46, size_bytes)  # nothing is mapped there: the driver refuses
            super().register(address, size_bytes)

    memory = HostMemory(Limited())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slabs = [memory.allocate(size * MIB, "test") for size in (4, 8, 8)]
    assert [slab.pinned for slab in slabs] == [True, False, False]
    assert len(caught) == 1
    assert "pinned" in str(caught[0].message)
    view = slabs[1].tensor(0, 10, torch.float32).fill_(2)
    assert view.cuda().sum().item() == 20


def test_memory_can_be_pinned_again_after_release():
    for _ in range(20):
        memory = HostMemory(CudaRegistrar())
        memory.allocate(64 * MIB, "test")
        assert memory.pinned_bytes == 64 * MIB
        memory.close()
        gc.collect()


def test_exit_with_live_tensors_is_clean():
    script = (
        "import torch\n"
        "from protrain_compile.runtime.host_memory import CudaRegistrar, HostMemory\n"
        "memory = HostMemory(CudaRegistrar())\n"
        "view = memory.allocate(64 << 20, 'test').tensor(0, 1 << 20, torch.float32)\n"
        "device = view.to('cuda', non_blocking=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
