"""Leave one wait out of every step: wrong values within 50 interleavings, or the other waits order the same.

The second is not a matter of luck: operations carry vector clocks, and a wait whose clock is known already where it
stands (in every step, and without that wait in any of them) orders nothing. The verifier must say the same of the same
loop, and refuse whatever is wrong in one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device import install
from support.missing_waits import DroppedWait, is_missed
from support.prepared import Stack, Trainee, adamw, forced, prepared, warmed
from support.threaded import Site, ThreadedDevice
from torch import Tensor

import protrain_compile
from passes.effects import EFFECTS
from passes.tours import STEP, Stop, Tour, Visit
from protrain_compile import Plan, ops
from protrain_compile.schedule import Schedule

SEEDS = 50
STEPS = 3


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

    @property
    def schedule(self) -> Schedule:
        (part,) = protrain_compile.schedule(self.trainee.called).parts
        return part.schedule

    def run(self, seed: int, skip: Site | None = None) -> list[Tensor]:
        """Return all parameters after some steps; the launching thread never waits for the compute stream."""
        self.trainee.model.load_state_dict(self.start[0])
        self.trainee.optimizer.load_state_dict(copy.deepcopy(self.start[1]))
        self.trainee.managed.packed._turn = 0  # the same landing for the same chunk in every run
        self.device.reseed(seed)
        self.device.skip, self.device.drains = skip, False
        for step in range(STEPS):
            for part in range(self.backwards):
                self.trainee.forward(10 * step + part).backward()
            self.trainee.update()
        self.device.synchronize()
        self.device.skip, self.device.drains = None, True
        return [value.clone() for value in self.trainee.model.state_dict().values()]

    def tour(self) -> Tour:
        """Return the way that ``run`` takes, as the verifier knows it."""
        stops: list[Stop] = []
        residency = self.trainee.managed.packed
        for step in range(STEPS):
            for part in range(self.backwards):
                number = self.backwards * step + part
                self.trainee.forward(number).backward()
                stops += [Visit("forward", number), Visit("backward", number, residency.mode)]
            self.trainee.update()
            stops.append(STEP)
        return Tour("bench", residency.store.spec.landings, tuple(stops))

    def dropped(self, site: Site) -> DroppedWait:
        """Return the same wait as one of the schedule."""
        name, chunk = self.device.operations[site.section, site.operation]
        if site.section == "step":
            return DroppedWait("step", str(chunk), site.kind)
        targets = EFFECTS.keys() - {ops.snapshot}
        nodes = [node for node in self.schedule.graphs[site.section].graph.nodes if node.target in targets]
        node = nodes[site.operation]
        assert node.target.__name__.startswith(name)  # type: ignore[union-attr]
        return DroppedWait(site.section, node.name, site.kind)

    def goes_wrong(self, site: Site, seed: int, wanted: list[Tensor]) -> bool:
        """Whether values are wrong without the wait at ``site``; where it orders nothing, two seeds must do."""
        if seed >= 2 and self.redundant(site):
            return False
        return not same(self.run(seed, site), wanted)

    def redundant(self, site: Site) -> bool:
        """Whether the waits that the last run left out ordered nothing."""
        found = [wait.redundant for wait in self.device.waits if wait.site == site]
        assert found
        return all(found)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


EVERYTHING = Plan(
    policies=("swap", "recompute", "keep"),
    residency=("offloaded", "persistent", "split", "offloaded", "offloaded"),
    buffers=3,
    chunk_bytes=2_000,
)
CASES: dict[str, tuple[int, Plan, dict[str, Any]]] = {
    "in the backward": (3, forced("offloaded", "recompute", buffers=3), {}),
    "split chunks": (2, forced("split", "recompute", buffers=3), {}),
    "clipping": (2, forced("offloaded", "recompute", buffers=3), {"max_grad_norm": 0.1}),
    "accumulation": (3, forced("offloaded", "recompute", buffers=3), {"gradient_accumulation_steps": 2}),
    "every policy and residency": (3, EVERYTHING, {}),
    "every policy and residency, clipping": (3, EVERYTHING, {"max_grad_norm": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_missing_wait_is_found(case: str, device: ThreadedDevice) -> None:
    blocks, plan, arguments = CASES[case]
    trainee = prepared(Stack(blocks=blocks), plan, adamw, **arguments)
    bench = Bench(device, trainee, arguments.get("gradient_accumulation_steps", 1))
    tour, wanted = bench.tour(), bench.run(0)
    assert all(same(bench.run(seed), wanted) for seed in range(1, 6)), "an interleaving with all waits is wrong"
    sites = list(dict.fromkeys(wait.site for wait in device.waits))
    explained = []
    for site in sites:
        seed = next((seed for seed in range(SEEDS) if bench.goes_wrong(site, seed, wanted)), None)
        redundant, dropped = bench.redundant(site), bench.dropped(site)
        assert (seed is None) == redundant, f"{dropped}: orders {'nothing' if redundant else 'something'}, seed {seed}"
        missed = is_missed(bench.schedule, dropped, tour)
        assert missed == (not redundant), f"{dropped}: seed {seed} is wrong, and the verifier says {missed}"
        if redundant:
            explained.append(site)
        else:
            assert is_missed(bench.schedule, dropped), f"{dropped}: wrong in one loop, and the verifier accepts it"
    assert 0 < len(explained) < len(sites)
