"""The passes, in the order in which they run. One pass per file; see DESIGN for the picture.

Structure passes turn a captured graph into segments and templates; schedule passes turn those and a Plan into the
graphs that run::

    tag_blocks           find the transformer blocks; give every node its stage
    hoist_casts          a prepared model's parameters used as 16 bits travel as 16 bits
    seed_randomness      random draws become functions of seeds made in the prologue
    outline_blocks       one joint subgraph per stage
    dedupe_templates     segments of one structure share one template
    slice_loss           the loss of a large vocabulary a second time, in slices of tokens
    partition_templates  forward, recompute and backward of each template
    omit_tangents        backwards without the tangents of outputs that nothing was computed from

    apply_policies       the forward and backward graphs for the Plan's policies
    offload_activations  saved values of swapped blocks leave for the host, and are back before their backward
    move_chunks          a prepared model's artefacts read parameters from chunks
    insert_updates       gradients end in their chunk, which is offloaded and updated
    place                which buffer a chunk uses, and when its prefetch starts
    shard_collectives    chunks that ranks share are gathered before use, their gradients reduced

``pack_chunks`` lays a prepared model's parameters out when it is first called, before its first schedule is written.
"""

from __future__ import annotations

import protrain_compile  # noqa: F401 - first, so that either package may be imported first
from passes.apply_policies import ApplyPolicies
from passes.dedupe_templates import DedupeTemplates
from passes.hoist_casts import HoistCasts
from passes.insert_updates import InsertUpdates
from passes.interface import Pass, PassRecord, Pipeline
from passes.move_chunks import MoveChunks
from passes.offload_activations import OffloadActivations
from passes.omit_tangents import OmitTangents
from passes.outline_blocks import OutlineBlocks
from passes.partition_templates import PartitionTemplates
from passes.place import Place
from passes.seed_randomness import SeedRandomness
from passes.shard_collectives import ShardCollectives
from passes.slice_loss import SliceLoss
from passes.tag_blocks import TagBlocks
from passes.verify import verify_program, verify_schedule
from protrain_compile.program import Program
from protrain_compile.schedule import Schedule

__all__ = ["Pass", "PassRecord", "Pipeline", "pass_names", "schedule_pipeline", "structure_pipeline"]


def structure_pipeline(*, inductor: bool, inductor_draws: bool, print_after: str | None = None) -> Pipeline[Program]:
    """Return the passes that find segments and templates in a captured graph.

    Args:
        inductor: Whether Inductor compiles the artefacts.
        inductor_draws: Whether Inductor's random kernels draw random numbers.
        print_after: Name of a pass after which the graphs are printed.
    """
    return Pipeline[Program](
        [
            TagBlocks(),
            HoistCasts(),
            SeedRandomness(inductor_draws=inductor_draws),
            OutlineBlocks(),
            DedupeTemplates(),
            SliceLoss(),
            PartitionTemplates(inductor=inductor),
            OmitTangents(),
        ],
        given={"captured"},
        verify=verify_program,
        print_after=print_after,
    )


def schedule_pipeline(*, print_after: str | None = None) -> Pipeline[Schedule]:
    """Return the passes that turn segments, templates and a Plan into the graphs that run."""
    passes: list[Pass[Schedule]] = [
        ApplyPolicies(),
        OffloadActivations(),
        MoveChunks(),
        InsertUpdates(),
        Place(),
        ShardCollectives(),
    ]
    return Pipeline[Schedule](passes, given={"parts"}, verify=verify_schedule, print_after=print_after)


def pass_names() -> tuple[str, ...]:
    """Return the names of all passes, in order."""
    pipelines = (structure_pipeline(inductor=True, inductor_draws=True), schedule_pipeline())
    return tuple(each.name for pipeline in pipelines for each in pipeline.passes)
