"""``protrain plan``: what training a model would be like on a machine, without the machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from protrain_compile.byte_text import format_size, parse_size
from protrain_compile.commands.arguments import at_least
from protrain_compile.commands.cluster import Alone, add_ranks, linked, rank_lines, ranks_dict, worlds_of
from protrain_compile.commands.families import FAMILIES, family
from protrain_compile.commands.models import DTYPES, resolve
from protrain_compile.commands.outlook import LARGEST_BATCH, Machine, Step, Workload, largest, largest_batch, step_of
from protrain_compile.errors import BudgetError, OptionError
from protrain_compile.profile import HardwareProfile
from protrain_compile.report.plan_table import (
    chunks_text,
    memory_table,
    memory_text,
    policies_text,
    prediction_dict,
    sharding_text,
    time_text,
)
from protrain_compile.runtime.device_budget import RESERVE_SHARE
from protrain_compile.shards import ALONE, World
from protrain_compile.solver import Solution

DESCRIPTION = """\
Plan the training of a model (AdamW, fp32 masters) on a machine that need not be at hand: prints the plan, the predicted
time of a step, and the bytes of device and host by kind. MODEL is a Hugging Face config.json or its folder, an
architecture with sizes (llama:hidden_size=3200,num_hidden_layers=26), or module:function, which returns a model or a
model and its inputs. Times are estimated from the machine's rates."""

LEAST_BYTES = 11
"""Bytes of a parameter with its states, which no plan does without: 12, for names of models that are rounded."""

DEFAULT_SIZES = (8, 1024)
"""Batch and sequence."""

USUAL_BYTES = 16
"""With its gradient and the model's activations, as a first guess."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("plan", help="plan a model's training without a GPU", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what to train (see above)")
    parser.add_argument("--largest", metavar="FAMILY", help=f"find the largest of {', '.join(FAMILIES)} instead")
    parser.add_argument("--hardware", metavar="FILE", default="h200", help="a hardware profile, or h200 (the default)")
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="rows of a batch, of each rank (8)")
    parser.add_argument("--seq", type=at_least(1), metavar="N", help="tokens of a row (1024)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (bfloat16; a function's model: as it is)")
    parser.add_argument("--memory-budget", metavar="SIZE", help="device memory of each rank, at most all but 3%%")
    parser.add_argument(
        "--host-memory-budget", metavar="SIZE", help="host memory of each rank, at most its share, all but 3%%"
    )
    add_ranks(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(parser=parser, execute=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Plan and print; return the exit status, 1 if nothing fits."""
    if (parsed.model is None) == (parsed.largest is None):
        raise OptionError("give either MODEL or --largest FAMILY")
    machine = _machine(parsed)
    if parsed.largest is not None:
        return _run_largest(parsed, machine)
    source = resolve(parsed.model)
    workload = Workload(source, *source.sizes(parsed.batch, parsed.seq, DEFAULT_SIZES), DTYPES.get(parsed.dtype))
    step = step_of(workload, machine.hardware, machine.worlds[0].size)
    return _show(parsed, Outlook.of(workload, step, machine))


def _machine(parsed: argparse.Namespace) -> Machine:
    hardware, worlds = HardwareProfile.load(parsed.hardware), worlds_of(parsed)
    machine = Machine(
        hardware,
        _budget(parsed.memory_budget, "--memory-budget", hardware.device_bytes),
        _budget(parsed.host_memory_budget, "--host-memory-budget", hardware.share(worlds[0].node_ranks).host_bytes),
        worlds,
    )
    return linked(machine, parsed)


def _budget(given: str | None, argument: str, present: int) -> int:
    most = int(present * (1 - RESERVE_SHARE))
    return most if given is None else min(parse_size(given, argument), most)


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What is told of one workload.

    Attributes:
        workload: What is trained.
        machine: On what.
        step: Its step.
        solution: The plan and its prediction; None if none fits.
        refusal: Why none fits, if none does.
        most_rows: The largest batch that fits; None if that is not known.
        world: The ranks that the plan is for.
        alone: What one of them by itself would do; None where there is one.
    """

    workload: Workload
    machine: Machine
    step: Step
    solution: Solution | None
    refusal: BudgetError | None = None
    most_rows: int | None = None
    world: World = ALONE
    alone: Alone | None = None

    @classmethod
    def of(cls, workload: Workload, step: Step, machine: Machine) -> Outlook:
        """Plan a step, and look for the largest batch."""
        most = None if "batch" in workload.source.own_sizes() else largest_batch(workload, step, machine)
        try:
            solution, world = step.plan_in_world(machine)
            alone = Alone.of(step, machine) if world.size > 1 else None
            return cls(workload, machine, step, solution, most_rows=most, world=world, alone=alone)
        except BudgetError as error:
            return cls(workload, machine, step, None, error, most)

    def tokens_per_s(self, solution: Solution) -> float | None:
        """Return on how many tokens a rank trains in a second; None where the model's own inputs say how many."""
        if self.workload.source.own_sizes():
            return None
        return self.workload.batch * self.workload.seq / solution.prediction.step_ms * 1000


def _run_largest(parsed: argparse.Namespace, machine: Machine) -> int:
    found = family(parsed.largest)
    batch, seq = parsed.batch or DEFAULT_SIZES[0], parsed.seq or DEFAULT_SIZES[1]
    steps: dict[int, tuple[Workload, Step]] = {}
    room = (machine.device_bytes + machine.host_bytes) * machine.worlds[0].size
    counts = range(1, len(found.names) + 1)

    def fits(count: int) -> bool:
        if count > 1 and found.parameters(count - 1) * LEAST_BYTES > room:
            return False
        workload = Workload(found.member(count - 1, seq), batch, seq, DTYPES.get(parsed.dtype))
        steps[count] = workload, step_of(workload, machine.hardware, machine.worlds[0].size)
        return steps[count][1].fits(machine)

    start = max((count for count in counts if found.parameters(count - 1) * USUAL_BYTES <= room), default=1)
    count = max(1, largest(fits, start, len(found.names)))
    status = _show(parsed, Outlook.of(*steps[count], machine))
    if count < len(found.names) and not parsed.json:
        print(f"next      the next size, {found.names[count]}, does not fit")
    return status


def _show(parsed: argparse.Namespace, outlook: Outlook) -> int:
    print(json.dumps(_to_dict(outlook), indent=1) if parsed.json else "\n".join(_lines(outlook)))
    return 0 if outlook.solution is not None else 1


def _lines(outlook: Outlook) -> list[str]:
    workload, machine = outlook.workload, outlook.machine
    own = workload.source.own_sizes()
    inputs = "its own inputs" if own else f"batch {workload.batch} x {workload.seq} tokens"
    size = f"{outlook.step.parameters / 1e9:.3g} G parameters, {inputs}"
    budgets = f"budget {format_size(machine.device_bytes)}, host {format_size(machine.host_bytes)}"
    lines = [f"protrain plan: {workload.source.name}, {size}, {machine.hardware.name}, {budgets}"]
    if outlook.solution is None:
        return [*lines, f"does not fit: {outlook.refusal}", _batch_line(outlook)]
    plan, prediction = outlook.solution.plan, outlook.solution.prediction
    assert plan.policies is not None
    residency = plan.fit_chunks(len(outlook.step.layout.chunks)) or ()
    chunks = chunks_text(residency, outlook.step.layout.largest_bytes, plan.buffers or 0, plan.sharding)
    speed = outlook.tokens_per_s(outlook.solution)
    ranks = rank_lines(outlook.world, outlook.solution, outlook.alone, speed) if outlook.alone is not None else []
    divided = f"; {sharding_text(plan.sharding)}" if plan.sharding is not None else ""
    sliced = "; loss in slices" if plan.loss == "sliced" else ""
    return [
        *lines,
        f"plan      {policies_text(plan.policies)}; {chunks}{divided}{sliced}",
        f"predicted {time_text(prediction, measured=False)}" + (f"; {speed:,.0f} tokens/s" if speed else ""),
        *ranks,
        f"memory    {memory_text(prediction)}",
        _batch_line(outlook),
        "",
        memory_table(prediction),
    ]


def _batch_line(outlook: Outlook) -> str:
    if "batch" in outlook.workload.source.own_sizes():
        return "batch     that of its own inputs; the largest is not known"
    if outlook.most_rows is None:
        return "batch     the largest that fits is not known: steps of two batches differ in more than size"
    if outlook.most_rows == 0:
        return "batch     not even one row fits"
    more = "at least " if outlook.most_rows == LARGEST_BATCH else ""
    return f"batch     the largest that fits is {more}{outlook.most_rows}"


def _to_dict(outlook: Outlook) -> dict[str, Any]:
    workload, solution = outlook.workload, outlook.solution
    own = workload.source.own_sizes()
    found: dict[str, Any] = {
        "model": workload.source.name,
        "parameters": outlook.step.parameters,
        "batch": None if "batch" in own else workload.batch,
        "seq": None if "seq" in own else workload.seq,
        "hardware": outlook.machine.hardware.name,
        "memory_budget_bytes": outlook.machine.device_bytes,
        "host_memory_budget_bytes": outlook.machine.host_bytes,
        "fits": solution is not None,
        "largest_batch": outlook.most_rows,
    }
    if solution is None:
        assert outlook.refusal is not None
        return found | {"needed_bytes": outlook.refusal.needed_bytes, "reason": str(outlook.refusal)}
    if outlook.alone is not None:
        speed = outlook.tokens_per_s(solution)
        found |= {"world": ranks_dict(outlook.world, solution, outlook.alone, speed)}
    return found | {
        "plan": json.loads(solution.plan.to_json()),
        "tokens_per_s": outlook.tokens_per_s(solution),
        "predicted": prediction_dict(solution.prediction, measured=False),
    }
