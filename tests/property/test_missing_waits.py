"""Leave one wait out of every step: wrong values within 50 interleavings, or the other waits order the same.

The second is not a matter of luck: operations carry vector clocks, and a wait whose clock is known already where it
stands (in every step, and without that wait in any of them) orders nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device import install
from support.prepared import Stack, Trainee, adamw, forced, prepared, warmed
from support.threaded import ThreadedDevice
from torch import Tensor

SEEDS = 50
STEPS = 3
Site = tuple[str, int]


@pytest.fixture
def device() -> Iterator[ThreadedDevice]:
    made = ThreadedDevice(records=True)
    with pytest.MonkeyPatch.context() as patch:
        install(made, patch)
        yield made


@dataclasses.dataclass
class Bench:
    """Runs the same few steps from the same values, under any interleaving and with any wait left out."""

    device: ThreadedDevice
    trainee: Trainee
    backwards: int
    start: Any = None

    def __post_init__(self) -> None:
        warmed(self.trainee)
        self.start = copy.deepcopy((self.trainee.model.state_dict(), self.trainee.optimizer.state_dict()))

    def run(self, seed: int, skip: Site | None = None) -> list[Tensor]:
        """Return all parameters after some steps; the launching thread never waits for the compute stream."""
        self.trainee.model.load_state_dict(self.start[0])
        self.trainee.optimizer.load_state_dict(copy.deepcopy(self.start[1]))
        self.device.reseed(seed)
        self.device.skip, self.device.drains = skip, False
        for step in range(STEPS):
            for part in range(self.backwards):
                self.trainee.forward(10 * step + part).backward()
            self.trainee.update()
        self.device.synchronize()
        self.device.skip, self.device.drains = None, True
        return [value.clone() for value in self.trainee.model.state_dict().values()]

    def goes_wrong(self, site: Site, seed: int, wanted: list[Tensor]) -> bool:
        """Whether values are wrong without the wait at ``site``; where it orders nothing, two seeds must do."""
        if seed >= 2 and self.redundant(site):
            return False
        return not same(self.run(seed, site), wanted)

    def redundant(self, site: Site) -> bool:
        """Whether the wait that the last run left out ordered nothing."""
        found = [wait.redundant for wait in self.device.waits if wait.site == site]
        assert found
        return all(found)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


CASES = {
    "in the backward": (3, "offloaded", {}),
    "split chunks": (2, "split", {}),
    "clipping": (2, "offloaded", {"max_grad_norm": 0.1}),
    "accumulation": (3, "offloaded", {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_missing_wait_is_found(case: str, device: ThreadedDevice) -> None:
    blocks, residency, arguments = CASES[case]
    plan = forced(residency, "recompute", buffers=3)
    trainee = prepared(Stack(blocks=blocks), plan, adamw, **arguments)
    bench = Bench(device, trainee, arguments.get("gradient_accumulation_steps", 1))
    wanted = bench.run(0)
    assert all(same(bench.run(seed), wanted) for seed in range(1, 6)), "an interleaving with all waits is wrong"
    waits = {wait.site: wait.what for wait in device.waits}
    explained = []
    for site, what in waits.items():
        seed = next((seed for seed in range(SEEDS) if bench.goes_wrong(site, seed, wanted)), None)
        if bench.redundant(site):
            assert seed is None, f"{site} {what}: left out, nothing is in another order, yet seed {seed} is wrong"
            explained.append(site)
        else:
            assert seed is not None, f"{site} {what}: left out, and {SEEDS} interleavings are right"
    assert 0 < len(explained) < len(waits)
