"""Where a schedule is shown when it is made: standard output on rank 0, a file, or nowhere."""

from __future__ import annotations

from pathlib import Path

import torch.distributed

from protrain_compile.report.render import render
from protrain_compile.runtime.compiled_graph import CompiledGraph
from protrain_compile.schedule import Schedule


def announce(graph: CompiledGraph, schedule: Schedule, where: str) -> None:
    """Show a schedule of ``graph``: ``print``, ``full``, ``off``, or the path of a file to append to. Rank 0 only."""
    if where == "off" or not _is_first_rank():
        return
    text = render(graph, schedule, full=where not in ("print",))
    if where in ("print", "full"):
        print(text, flush=True)
    else:
        with Path(where).open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
