"""Random synthetic programs: the passes' schedules are clean, and give eager's results at whatever pace streams run.

``--examples 20000`` runs so many instead of the usual ones; see ``support.volume``.
"""

from __future__ import annotations

from support.interleave import execute, orders, results
from support.schedules import take_tour
from support.symbolic_ranks import runtime_for
from support.symbolic_runtime import SymbolicRuntime
from support.synthetic import Eager, Synthetic, draw
from support.volume import Volume

from passes.tours import Tour, tours_of
from protrain_compile.errors import PlanError
from protrain_compile.schedule import Schedule
from protrain_compile.shards import SHARDINGS

EXAMPLES = 180


def test_random_programs(volume: Volume) -> None:
    scheduled = []

    def run(seed: int) -> None:
        synthetic = draw(seed)
        try:
            schedule = synthetic.schedule(train=seed % 8 > 0)
            shared = synthetic.schedule(sharding=SHARDINGS[seed // 4 % 3]) if seed % 4 == 1 else None
        except PlanError:  # one call uses more chunks than there are buffers
            return
        scheduled.append(seed)
        for tour in tours_of(schedule.graphs):
            check(synthetic, schedule, tour, seed)
        if shared is not None:
            check_ranks(shared, seed)

    volume.run(EXAMPLES, run)
    assert len(scheduled) > 0.7 * len(volume.numbers(EXAMPLES)) or volume.examples == 1


def check(synthetic: Synthetic, schedule: Schedule, tour: Tour, seed: int) -> None:
    """Compare what a user sees after a tour with eager's, in the order of issue, with each stream late, at random."""
    assert schedule.chunks is not None
    runtime = SymbolicRuntime(schedule.chunks, tour.landings)
    take_tour(runtime, schedule, tour)
    expected = Eager(synthetic, schedule).follow(tour)
    first = runtime.store.first_values()
    for order in (list(range(len(runtime.trace.instructions))), *orders(runtime.trace, seeds=1)):
        memory = execute(runtime.trace, order, first)
        values = [0] * len(synthetic.sizes)
        for home, chunk in zip(runtime.store.parameters, synthetic.layout.chunks, strict=True):
            for slot in chunk.slots:
                values[slot.parameter] = memory[home.name][slot.offset]
        outputs = [value.read(memory) for run in runtime.runs for value in run.outputs]
        assert (outputs, values) == expected, f"seed {seed}, {tour.name}"


def check_ranks(schedule: Schedule, seed: int) -> None:
    """Where ranks share the chunks, what a user sees of one does not depend on the streams' pace."""
    assert schedule.chunks is not None
    for tour in tours_of(schedule.graphs, ranks=True):
        runtime = runtime_for(schedule.chunks, tour.landings)
        take_tour(runtime, schedule, tour)
        assert len(set(results(runtime, seeds=1))) == 1, f"seed {seed}, {tour.name}, on ranks"
