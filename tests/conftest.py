"""What every test relies on: a seed, a fixed number of threads, no compiled code of an earlier test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

THREADS = 2
"""Sums are split by threads, so results depend on their number."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--threaded",
        metavar="SEED",
        help="run models that tests prepare on the CPU on a device whose streams are threads; SEED is an interleaving",
    )
    parser.addoption("--examples", type=int, metavar="N", help="run N random examples in tests that have such")
    parser.addoption("--first", type=int, default=0, metavar="NUMBER", help="number of the first random example")
    parser.addoption(
        "--shard", default="1/1", metavar="K/N", help="run the K-th of N equal parts of the random examples"
    )


def pytest_configure() -> None:
    torch.set_num_threads(THREADS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--examples") is not None:
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def volume(request: pytest.FixtureRequest) -> Any:
    """How many random examples to run; see ``support.volume``."""
    from support.volume import Volume

    return Volume.of(request.config)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles of earlier runs are not read, and none are left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def threaded_device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield the device that ``--threaded`` asks for, or None."""
    if request.config.getoption("--threaded") is None:
        yield None
        return
    from support.device import install
    from support.threaded import ThreadedDevice

    device = ThreadedDevice()
    with pytest.MonkeyPatch.context() as patch:
        install(device, patch, tmp_path_factory.mktemp("device"))
        yield device


@pytest.fixture(autouse=True)
def interleaving(request: pytest.FixtureRequest, threaded_device: Any) -> Iterator[None]:
    """Give every test an interleaving of its own under ``--threaded``, and let nothing run on after it."""
    if threaded_device is not None:
        threaded_device.reseed(f"{request.config.getoption('--threaded')} {request.node.nodeid}")
    yield
    if threaded_device is not None:
        threaded_device.synchronize()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    _forget_compiled()
    yield
    _forget_compiled()


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:  # importing it takes seconds that many tests do not need
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
