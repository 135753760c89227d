"""What the tests of the doors share: residencies, and compiled code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.prepared import RESIDENCIES


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """Compiled code binds whatever parameters it is called with, so the tests of a module share it: seconds each."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=RESIDENCIES)
def residency(request: pytest.FixtureRequest) -> str:
    return request.param
