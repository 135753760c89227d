"""StepShapes and Profiles made up by hand, for tests of planning: a prologue, equal blocks, an epilogue."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import networkx
from support.capture import mixed

from protrain_compile.lowering import Choice
from protrain_compile.profile import (
    ArtefactCost,
    HardwareProfile,
    HostUpdateRate,
    LinkRate,
    Profile,
    TemplateProfile,
)
from protrain_compile.roles import RECOMPUTES, RecomputeRole
from protrain_compile.step_jobs import STREAMS, StepJobs
from protrain_compile.step_shape import CallShape, ChunkShape, Life, SegmentShape, StepShape, Use

MB = 1_000_000


@dataclasses.dataclass(frozen=True)
class Finer:
    """A recompute of a block: what its policy keeps of the saved values, and what making the others again takes."""

    role: RecomputeRole
    kept_mb: int
    ms: float


@dataclasses.dataclass(frozen=True)
class Stack:
    """Sizes of a made-up model, in megabytes and milliseconds."""

    blocks: int = 4
    chunk_mb: int = 100
    ends_mb: int = 50
    saved_mb: int = 40
    output_mb: int = 4
    forward_ms: float = 4.0
    backward_ms: float = 8.0
    ends_ms: float = 1.0
    workspace_mb: int = 10
    launches: int = 5
    clips: bool = False
    landings: int = 4
    finer: tuple[Finer, ...] = ()

    def shape(self) -> StepShape:
        """Return the shape: saved values can be recomputed from a block's input, which is the output before."""
        last = self.blocks + 1
        segments = tuple(self._segment(i) for i in range(last + 1))
        chunks = tuple(self._chunk(i) for i in range(last + 1))
        lives = [_life("forward", last, self.saved_mb, uses=[_use(last)])]
        for i in range(1, last):
            lives += self._saved(i)
        for i in range(last):
            lives.append(_life("forward", i, self.output_mb, until=i + 1, uses=[_use(i + 1, *RECOMPUTES)]))
            lives.append(_life("backward", i + 1, self.output_mb, uses=[_use(i, *RECOMPUTES)]))
        lives += [_life("backward", i, chunk.size_bytes // MB, collects=(i,)) for i, chunk in enumerate(chunks)]
        return StepShape(
            name="Stack",
            block_names=tuple(f"blocks.{i}" for i in range(self.blocks)),
            segments=segments,
            chunks=chunks,
            lives=tuple(lives),
            held_bytes={"inputs": MB},
            update_mode="at_step" if self.clips else "in_backward",
            landings=0 if self.clips else self.landings,
            clips=self.clips,
        )

    def _saved(self, block: int) -> Iterator[Life]:
        """Yield the saved values of a block in bands: what a policy keeps, the next one keeps, too."""
        kept = [each.kept_mb for each in self.recomputes]
        for low, high in itertools.pairwise([*kept, self.saved_mb]):
            keeping = [each.role for each in self.recomputes if each.kept_mb >= high]
            yield _life("forward", block, high - low, uses=[_use(block, *keeping)])
            for each in self.recomputes:
                if each.kept_mb <= low:
                    uses: Any = {each.role: "backward"}
                    yield _life(each.role, block, high - low, uses=[Use(block, **uses)])

    @property
    def recomputes(self) -> tuple[Finer, ...]:
        """All recomputes, the one that keeps nothing first."""
        return (Finer("recompute", 0, self.forward_ms), *self.finer)

    def _segment(self, index: int) -> SegmentShape:
        block = index - 1 if 1 <= index <= self.blocks else -1
        size = self.saved_mb * (index > 0) + self.output_mb
        calls: Any = {"forward": CallShape((index,), size * MB)}
        recomputes = self.recomputes if block >= 0 else ()
        calls |= {each.role: CallShape((index,), (self.saved_mb - each.kept_mb) * MB) for each in recomputes}
        calls["backward"] = CallShape((index,), (self.output_mb + self._chunk_mb(index)) * MB)
        name = f"block {block}" if block >= 0 else ("prologue" if index == 0 else "epilogue")
        recompute_of: Any = {each.role: each.role for each in recomputes}
        if "recompute_pointwise" in recompute_of:
            recompute_of["swap_products"] = "recompute_pointwise"
        return SegmentShape(name, block, 0 if block < 0 else 1, calls, recompute_of)

    def _chunk_mb(self, index: int) -> int:
        return self.chunk_mb if 1 <= index <= self.blocks else self.ends_mb

    def _chunk(self, index: int) -> ChunkShape:
        size, last = self._chunk_mb(index) * MB, self.blocks + 1
        return ChunkShape(size, size // 2, True, "split", size, 4 * size, size, 0, index, 0, last - index)

    def profile(self, **hardware: Any) -> Profile:
        """Return what it costs on a machine of plain numbers: see ``plain_hardware``."""
        workspace = self.workspace_mb * MB
        ends = ArtefactCost(self.ends_ms, workspace, self.launches)
        forward = ArtefactCost(self.forward_ms, workspace, self.launches)
        backward = ArtefactCost(self.backward_ms, workspace, self.launches)
        again = {each.role: ArtefactCost(each.ms, workspace, self.launches) for each in self.recomputes}
        templates = (
            TemplateProfile({"forward": ends, "backward": ends}),
            TemplateProfile({"forward": forward, **again, "backward": backward}),
        )
        return Profile(plain_hardware(**hardware), templates)


def _use(segment: int, *roles: RecomputeRole) -> Use:
    """Return that the backward takes a storage, where the segment is kept or recomputed by one of ``roles``."""
    given: Any = dict.fromkeys(roles, "backward")
    return Use(segment, "backward", **given)


def _life(birth: Any, segment: int, size_mb: int, until: int = -1, uses: Any = (), collects: Any = ()) -> Life:
    size = size_mb * MB
    moved = size * (birth == "forward")
    life = Life(birth, segment, until, tuple(uses), collects, False, size, size, size)
    return dataclasses.replace(life, swapped_bytes=moved, products_bytes=moved)


def plain_hardware(
    link: float = 50.0,
    both: float = 50.0,
    beside: float = 50.0,
    host: float = 5.0,
    beside_copies: float = 5.0,
    **fields: Any,
) -> HardwareProfile:
    """Return a machine without surprises: 100 MB take 2 ms over the link and 10 ms to update on the host."""
    rate = LinkRate(link, both, beside)
    return HardwareProfile(
        **{
            "name": "plain",
            "device_bytes": 100_000 * MB,
            "host_bytes": 100_000 * MB,
            "cores": 16,
            "matmul_tflops": {"bfloat16": 500.0},
            "device_gb_per_s": 3_000.0,
            "h2d": rate,
            "d2h": rate,
            "host_updates": (HostUpdateRate("split", 13, host, beside_copies),),
            "device_update_gparams_per_s": {"split": 100.0},
            "launch_us": 1.0,
            **fields,
        }
    )


def random_stack(draw: random.Random, blocks: int) -> Stack:
    """Return sizes of any proportion: bound by compute, by the link, or by the host."""
    stack = Stack(
        blocks=blocks,
        chunk_mb=draw.choice((20, 100, 300)),
        ends_mb=draw.choice((10, 100, 400)),
        saved_mb=draw.choice((5, 60, 300)),
        output_mb=draw.choice((1, 10, 40)),
        forward_ms=draw.choice((0.3, 2.0, 9.0)),
        backward_ms=draw.choice((0.5, 4.0, 20.0)),
        ends_ms=draw.choice((0.1, 1.0, 5.0)),
        workspace_mb=draw.choice((0, 30, 200)),
        launches=draw.choice((0, 5, 400)),
        clips=draw.random() < 0.4,
        landings=draw.choice((1, 2, 4)),
    )
    return dataclasses.replace(stack, finer=random_finer(draw, stack))


def random_finer(draw: random.Random, stack: Stack) -> tuple[Finer, ...]:
    """Return none, one or both of the finer policies, worth their memory or not."""
    kept = sorted(draw.randint(0, stack.saved_mb) for _ in RECOMPUTES[1:])
    times = sorted((draw.random() * stack.forward_ms for _ in kept), reverse=True)
    both = [Finer(*each) for each in zip(RECOMPUTES[1:], kept, times, strict=True)]
    return tuple(each for each in both if draw.random() < 0.6)


def random_hardware(draw: random.Random) -> dict[str, float]:
    """Return rates for ``plain_hardware``, together no faster than alone."""
    link, host = draw.choice((10.0, 50.0)), draw.choice((1.0, 5.0))
    both = link * draw.choice((0.5, 0.8, 1.0))
    return {
        "link": link,
        "both": both,
        "beside": both * draw.choice((0.4, 1.0)),
        "host": host,
        "beside_copies": host * draw.choice((0.6, 1.0)),
        "launch_us": draw.choice((1.0, 10.0)),
    }


def prefix(shape: StepShape, persistent: int, policies: str, buffers: int = 3, rest: Any = "offloaded") -> Choice:
    """Return a choice: ``persistent`` chunks at the front, and a letter for each block (see ``mixed``)."""
    kinds: Any = ("persistent",) * persistent + (rest,) * (len(shape.chunks) - persistent)
    chosen = mixed(policies).policies
    assert chosen is not None
    return Choice(chosen, kinds, buffers)


def critical_path(step: StepJobs, steps: int) -> float:
    """Return the length in ms of the longest chain of jobs over some steps, each job at its speed alone.

    No schedule on the same streams is faster; networkx finds it, independently of the simulation.
    """
    graph: networkx.DiGraph = networkx.DiGraph()
    count = len(step.jobs)
    before = [-1] * len(STREAMS)
    for number in range(steps * count):
        job = step.jobs[number % count]
        base = number - number % count
        since = base + job.since
        begins_after = job.since >= -count and since >= 0
        graph.add_edge("begin", number, weight=0.0 if begins_after else job.launched_ms)
        graph.add_edge(number, "end", weight=job.ms)
        for other in [*(base + other for other in job.after), before[job.stream]]:
            if other >= 0:
                graph.add_edge(other, number, weight=step.jobs[other % count].ms)
        if begins_after:
            weight = step.jobs[since % count].ms + job.launched_ms
            if not graph.has_edge(since, number) or graph[since][number]["weight"] < weight:
                graph.add_edge(since, number, weight=weight)
        before[job.stream] = number
    return float(networkx.dag_longest_path_length(graph, weight="weight"))
