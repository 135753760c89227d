"""Predicted, not measured: what part of one GPU's speed each of 1 to 64 GPUs keeps, from a table of links.

    python -m bench.node_efficiency --output bench/results/node_efficiency.md

A small simulation of what the schedules of ``shard_collectives`` do with equal blocks of one chunk each: computing and
collectives are two queues, a block computes behind its gather, a gather begins when one of the chunk buffers is free, a
reduce_scatter behind its block's backward, and all collectives run in order. A ring of n ranks moves ``(n - 1) / n`` of
a chunk through every rank's slowest link, in n - 1 steps. With hybrid sharding chunks are divided inside a node, and
the shard of the gradient is averaged across nodes by an all_reduce, two such rings.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from bench.common import table

SHARDINGS = ("gradients", "parameters", "parameters, hybrid")
HEADER = ("GPUs", "nodes", "tokens a GPU", *(f"{sharding} divided" for sharding in SHARDINGS))


@dataclasses.dataclass(frozen=True)
class Links:
    """How GPUs are connected.

    Attributes:
        node_ranks: GPUs of a node.
        inside_gb_per_s: Each way, of one GPU to the others of its node.
        inside_us: Time that a step of a ring takes at least.
        across_gb_per_s: Each way, of one GPU's share of the network between nodes.
        across_us: Time that a step between nodes takes at least.
    """

    node_ranks: int = 8
    inside_gb_per_s: float = 360.0
    inside_us: float = 5.0
    across_gb_per_s: float = 40.0
    across_us: float = 10.0

    def ring_ms(self, size_bytes: float, ranks: int, *, inside: bool) -> float:
        """Return the time of an all_gather or reduce_scatter of a whole chunk of ``size_bytes`` over ``ranks``."""
        if ranks == 1:
            return 0.0
        rate = self.inside_gb_per_s if inside else self.across_gb_per_s
        step_us = self.inside_us if inside else self.across_us
        return size_bytes * (ranks - 1) / ranks / rate / 1e6 + (ranks - 1) * step_us / 1e3


@dataclasses.dataclass(frozen=True)
class Work:
    """What one GPU does in a step.

    Attributes:
        blocks: Equal blocks, a chunk each.
        chunk_bytes: Bytes of a block's parameters.
        forward_ms: Of one block; its backward takes twice that.
        buffers: Chunk buffers.
    """

    blocks: int = 32
    chunk_bytes: float = 436e6
    forward_ms: float = 5.9
    buffers: int = 4

    @property
    def compute_ms(self) -> float:
        """Time of a step that waits for nothing."""
        return 3 * self.blocks * self.forward_ms


def collective_times(work: Work, links: Links, ranks: int, sharding: str) -> tuple[float, float, float]:
    """Return ms of a chunk's gather in the forward, in the backward, and of its reduce_scatter."""
    inside = ranks <= links.node_ranks
    if sharding == "parameters, hybrid" and not inside:
        near = links.ring_ms(work.chunk_bytes, links.node_ranks, inside=True)
        far = 2 * links.ring_ms(work.chunk_bytes / links.node_ranks, ranks // links.node_ranks, inside=False)
        return near, near, near + far
    ring = links.ring_ms(work.chunk_bytes, ranks, inside=inside)
    return ring, 0.0 if sharding == "gradients" else ring, ring


def step_ms(work: Work, links: Links, ranks: int, sharding: str) -> float:
    """Return the time of a step, from the start of the first gather to the end of the last reduce_scatter."""
    forward, backward, reduce = collective_times(work, links, ranks, sharding)
    moves = sharding != "gradients"  # else whole parameters stay: gathers wait for no buffer
    linked, computed = 0.0, 0.0
    ends: list[float] = []
    for block in range(work.blocks):
        freed = ends[block - work.buffers] if moves and block >= work.buffers else 0.0
        linked = max(linked, freed) + forward
        computed = max(computed, linked) + work.forward_ms
        ends.append(computed)
    arrived = [0.0] * work.blocks  # what the forward left in the buffers is there
    for block in range(work.blocks):
        computed = max(computed, arrived[block]) + 2 * work.forward_ms
        linked = max(linked, computed) + reduce
        if moves and block + work.buffers < work.blocks:
            linked += backward  # into the buffer that the gradients have just left
            arrived[block + work.buffers] = linked
    return max(linked, computed)


def efficiency(work: Work, links: Links, ranks: int, sharding: str) -> float:
    """Return the part of one GPU's speed that each of ``ranks`` keeps."""
    return work.compute_ms / step_ms(work, links, ranks, sharding)


def report(links: Links, tokens: tuple[int, ...] = (4096, 16384)) -> str:
    """Return the page: table and assumptions."""
    rows = []
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        for count in tokens:
            work = dataclasses.replace(Work(), forward_ms=forward_ms(count))
            kept = [f"{efficiency(work, links, ranks, sharding):.0%}" for sharding in SHARDINGS]
            rows.append((ranks, -(-ranks // links.node_ranks), f"{count:,}", *kept))
    return PAGE.format(table=table(HEADER, rows, markdown=True), links=links, work=Work(), tflops=TFLOPS)


TFLOPS = 604.0
"""Measured on an H200 for Llama-shaped blocks in bf16, one GPU (compiled by segments, 8 layers)."""


def forward_ms(tokens: int) -> float:
    """Return the time of a block's forward: two operations a parameter and token."""
    return 2 * Work().chunk_bytes / 2 * tokens / TFLOPS / 1e9


PAGE = """\
# Efficiency of 1 to 64 H200s: predicted, nothing on this page was measured on several GPUs

Part of one GPU's speed that each GPU keeps, from the simulation of `bench/node_efficiency.py`:

{table}

Assumptions:

- {work.blocks} equal blocks of {work.chunk_bytes:.3g} bytes of bf16 parameters (an 8 B model without its embedding), a
  chunk each; {work.buffers} chunk buffers; everything on the device.
- Two operations a parameter and token in the forward, four in the backward, at {tflops:.0f} TFLOPS (the one measured
  figure: an H200 on Llama-shaped blocks). Attention, the loss, the update and launches are left out.
- Inside a node of {links.node_ranks}: {links.inside_gb_per_s:.0f} GB/s each way for a GPU, 80% of NVLink's data sheet;
  {links.inside_us:.0f} us for a step of a ring.
- Across nodes: {links.across_gb_per_s:.0f} GB/s each way for a GPU, 80% of a 400 Gb/s port for each;
  {links.across_us:.0f} us a step. A ring across nodes runs at this rate throughout.
- Collectives slow no kernels down, and all ranks are equally fast.
"""


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the page; default: standard output")
    arguments = parser.parse_args()
    page = report(Links())
    if arguments.output is None:
        print(page)
    else:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()
