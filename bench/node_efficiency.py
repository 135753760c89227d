"""Predicted, not measured: what part of one GPU's speed each of 1 to 64 GPUs keeps, by the cost model and a link table.

    python -m bench.node_efficiency --output bench/results/node_efficiency.md

The plan of every cell is searched as ``protrain plan --ranks`` searches it, with what is divided given. Kept is a part
of the speed of one GPU whose memory were unlimited, everything kept and resident; and, in brackets, of the speed that
as many GPUs would have if links took no time.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench.common import table
from protrain_compile import Plan
from protrain_compile.commands.models import resolve
from protrain_compile.commands.outlook import Workload, step_of
from protrain_compile.errors import BudgetError
from protrain_compile.links import Links, default_links
from protrain_compile.profile import HardwareProfile, Profile
from protrain_compile.runtime.device_budget import RESERVE_SHARE
from protrain_compile.shards import ALONE, Sharding, World
from protrain_compile.solver import SAME_SHARE, STAY_SHARE, search
from protrain_compile.step_shape import StepShape

MODEL = (
    "llama:hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32,"
    "num_key_value_heads=8,vocab_size=128256,max_position_embeddings=8192"
)
SEQ = 4096
BATCHES = (1, 4)
NODE_RANKS = 8
RANKS = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = ("gradients", "parameters", "parameters, hybrid")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step and the device memory that it may use."""

    shape: StepShape
    profile: Profile
    device_bytes: int | None

    def step_ms(self, world: World, sharding: Sharding) -> float | None:
        """Return the time of a step of the best plan with that sharding; None if none fits."""
        shape = dataclasses.replace(self.shape, world=world)
        given = Plan(uniform_sharding=sharding)
        try:
            found = search(shape, self.profile, device_bytes=self.device_bytes, host_bytes=None, given=given)
        except BudgetError:
            return None
        return found.prediction.step_ms

    def unlimited_ms(self) -> float:
        """Return the time of a step of one GPU whose memory were unlimited."""
        alone = dataclasses.replace(self.shape, world=ALONE)
        return search(alone, self.profile, device_bytes=None, host_bytes=None).prediction.step_ms


def world_of(ranks: int, column: str) -> World:
    """Return how ``ranks`` GPUs share a model in a column."""
    nodes = -(-ranks // NODE_RANKS)
    return World(ranks // nodes, nodes, nodes) if column.endswith("hybrid") else World(ranks, 1, nodes)


FREE = Links("without time", 1e9, 0.0, 1e9, 0.0)


def cell(case: Case, ranks: int, column: str) -> str:
    """Return what each of ``ranks`` keeps, as the table shows it."""
    part = kept(case, ranks, column)
    if part is None:
        return "does not fit"
    hardware = dataclasses.replace(case.profile.hardware, links=FREE)
    free = kept(dataclasses.replace(case, profile=dataclasses.replace(case.profile, hardware=hardware)), ranks, column)
    assert free is not None
    return f"{part:.0%} ({part / free:.0%})"


def kept(case: Case, ranks: int, column: str) -> float | None:
    """Return the part of one GPU's speed that each of ``ranks`` keeps; None if no plan fits."""
    sharding: Sharding = "gradients" if column == "gradients" else "parameters"
    step_ms = case.step_ms(world_of(ranks, column), sharding)
    return None if step_ms is None else case.unlimited_ms() / step_ms


def rows(cases: Sequence[tuple[int, Case]]) -> list[tuple[str, ...]]:
    """Return the table: for every number of GPUs and tokens, the part that each kind of sharding keeps."""
    found = []
    for ranks in RANKS:
        for tokens, case in cases:
            cells = [cell(case, ranks, column) for column in COLUMNS]
            found.append((str(ranks), str(-(-ranks // NODE_RANKS)), f"{tokens:,}", *cells))
    return found


def traced_case(batch: int, hardware: HardwareProfile) -> Case:
    """Return the step of the bench's model."""
    step = step_of(Workload(resolve(MODEL), batch, SEQ), hardware, ranks=RANKS[-1])
    return Case(step.shape, step.profile, int(hardware.device_bytes * (1 - RESERVE_SHARE)))


def page(found: Sequence[tuple[str, ...]], hardware: HardwareProfile, links: Links) -> str:
    """Return the page: table and assumptions."""
    header = ("GPUs", "nodes", "tokens a GPU", *(f"{column} divided" for column in COLUMNS))
    return PAGE.format(
        table=table(header, found, markdown=True), hardware=hardware, links=links, stay=STAY_SHARE, same=SAME_SHARE
    )


PAGE = """\
# Efficiency of 1 to 64 H200s: predicted, nothing on this page was measured on several GPUs

Part that each GPU keeps of the speed of one GPU whose memory were unlimited, and in brackets of the speed that as many
GPUs would have if links took no time (`bench/node_efficiency.py`; plans and times by the search and the cost model of
`protrain plan --ranks`):

{table}

Assumptions:

- An 8 B Llama in bf16 with AdamW, rows of 4,096 tokens, everything else planned. Times are estimated from the rates in
  `protrain_compile/hardware/h200.json` ({hardware.name}).
- Above 100%: the one GPU of unlimited memory updates all states, some 65 ms of work on the device, or on the host
  beside compute where that is faster by more than {stay:.0%}; of many GPUs each updates a small share of them. Where
  memory is short, states must move to the host, so that a GPU with its own memory may be up to {stay:.0%} faster than
  the one whose memory is unlimited. In brackets two searches are compared, which take plans within {same:.1%} for equal
  and stay with what moves less within {stay:.0%}: a difference of that size, either way, says nothing of links.
- Collectives are rings over the links of `protrain_compile/hardware/links/h200.json`: {links.inside_gb_per_s:.0f} GB/s
  each way and {links.inside_us:.0f} us a step inside a node of 8; {links.across_gb_per_s:.0f} GB/s each way for a GPU
  and {links.across_us:.0f} us a step between nodes. None of these is measured; that file says where each is from.
- Where a ring crosses nodes, the ports of all eight GPUs carry it. With hybrid sharding chunks are divided inside a
  node, and the shard of the gradient is averaged across nodes by an all_reduce.
- Collectives slow no kernels down, and all ranks are equally fast.
"""


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the page; default: standard output")
    arguments = parser.parse_args()
    hardware, links = HardwareProfile.load("h200"), default_links()
    found = page(rows([(batch * SEQ, traced_case(batch, hardware)) for batch in BATCHES]), hardware, links)
    if arguments.output is None:
        print(found)
    else:
        arguments.output.write_text(found)


if __name__ == "__main__":
    main()
