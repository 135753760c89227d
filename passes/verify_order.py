"""The verifier's part about order: whatever the streams' pace, every operation finds what it needs.

The steps of a schedule (``effects``) are issued along tours through the training loop (``tours``). At each step:

* two accesses of one resource, one of them a write, are ordered by the streams and events (``happens_before``): a
  buffer is filled only behind its last reader, a copy's source stays until the copy is over, a chunk is fetched only
  behind its update of the step before (DESIGN 7, invariants 2, 3 and 6)
* what a step reads holds what it needs, as new as it was ever made: parameters after the last update, gradients of the
  last backward (invariants 1, 3 and 6)
* a ``wait`` in a backward that follows its forward finds its chunk in the buffer, as ``place`` promises (invariant 1)

After each graph, any other graph of the model may follow: then the events alone must say when a buffer is free and when
a chunk may be fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from passes.chunk_views import Operation
from passes.effects import Access, Content, Event, Resource, Step
from passes.happens_before import HappensBefore
from passes.rank_effects import RankLedger, ledger_of
from passes.tours import Stop, Tour, Visit, issued_steps, tours_of
from passes.violation import Place, fail
from protrain_compile.chunks import ChunkBinding, ChunkLayout
from protrain_compile.schedule import Schedule


def verify_order(schedule: Schedule, where: str, operations: Mapping[str, Sequence[Operation]]) -> None:
    """Check all tours of a schedule whose buffers are placed; ``operations`` are those of its graphs.

    Raises:
        VerifierError: If an operation may run too early, or finds something else than it needs.
    """
    ranks = schedule.chunks is not None and schedule.chunks.sharding is not None
    for tour in tours_of(schedule.graphs, ranks=ranks):
        verify_tour(schedule, where, operations, tour)


def verify_tour(
    schedule: Schedule,
    where: str,
    operations: Mapping[str, Sequence[Operation]],
    tour: Tour,
    *,
    others_follow: bool = True,
) -> None:
    """Check one tour; with ``others_follow`` also that any other graph of the model may follow each of its graphs.

    Raises:
        VerifierError: See :func:`verify_order`.
    """
    _Walk(where, tour, operations, schedule.chunks or NO_CHUNKS, others_follow).run()


@dataclasses.dataclass
class _History:
    """The last accesses of a memory, by step, and what it holds since: a content and its version."""

    written: int | None = None
    readers: dict[str, int] = dataclasses.field(default_factory=dict)
    content: Content | None = None
    version: int = 0


NO_CHUNKS = ChunkBinding(ChunkLayout((), (), ()), (), 0, {})
"""Those of a model that is not prepared."""


class _Walk:
    """One tour."""

    def __init__(
        self,
        where: str,
        tour: Tour,
        operations: Mapping[str, Sequence[Operation]],
        chunks: ChunkBinding,
        others_follow: bool,
    ) -> None:
        self.others_follow = others_follow
        self.where = where
        self.tour = tour
        self.operations = operations
        self.chunks = chunks
        self.ledger = ledger_of(chunks, tour.landings)
        self.order = HappensBefore()
        self.recorded: dict[Event, int] = {}
        self.histories: dict[tuple[Resource, int], _History] = {}
        self.versions: dict[tuple[Content, int], int] = {}
        self.places: list[Place] = []

    def run(self) -> None:
        """Follow the tour."""
        before: Stop | None = None
        for stop in self.tour.stops:
            run = stop.run if isinstance(stop, Visit) else -1
            follows = _follows(before, stop)
            for step, operation in issued_steps(stop, self.operations, self.ledger, self.chunks):
                self._take(step, Place(stop.graph if isinstance(stop, Visit) else stop.kind, operation), run)
                if follows and self.ledger.misses:
                    self._fail(len(self.places) - 1, "waits for a chunk that nothing brought into its buffer")
            self.ledger.misses = 0
            if self.others_follow and isinstance(stop, Visit):
                self._check_exit(stop)
            before = stop

    def _take(self, step: Step, place: Place, run: int) -> None:
        """Add a step; check what it reads and overwrites."""
        waits = [self.recorded[event] for event in step.waits if event in self.recorded]
        number = self.order.add(step.stream, waits)
        self.places.append(place)
        for access in step.reads:
            self._read(number, step, access, run)
        for access in step.writes:
            self._write(number, step, access, run)
        for event in step.records:
            self.recorded[event] = number

    def _read(self, number: int, step: Step, access: Access, run: int) -> None:
        history = self._history(access.resource, run)
        self._check_after(number, history.written, access.resource, "reads {}, which may still be written by")
        if history.content is None and access.resource.kind in ("home", "parameters"):
            history.content = access.content
        if history.content != access.content:
            holds = "nothing" if history.content is None else str(history.content)
            self._fail(number, f"needs {access.content} in {access.resource}, which holds {holds}", history.written)
        if access.newest and history.version != self.versions.get(self._content(access, run), 0):
            self._fail(number, f"reads old {access.content} in {access.resource}", history.written)
        history.readers[step.stream] = number

    def _write(self, number: int, step: Step, access: Access, run: int) -> None:
        history = self._history(access.resource, run)
        self._check_after(number, history.written, access.resource, "writes {}, which may still be written by")
        for reader in history.readers.values():
            self._check_after(number, reader, access.resource, "writes {}, which may still be read by")
        if history.content is not None and "gradients" in history.content.kind and not history.readers:
            self._fail(number, f"writes {access.resource}, whose {history.content} nothing has read", history.written)
        content = self._content(access, run)
        copied = any(_is_copy(read, access) for read in step.reads)
        self.versions[content] = self.versions.get(content, 0) + (not copied)
        history.written, history.readers = number, {}
        history.content, history.version = access.content, self.versions[content]

    def _history(self, resource: Resource, run: int) -> _History:
        """Return what is known of a memory; a node's value is another one in every run."""
        memory = (resource, run if resource.kind == "value" else -1)
        if memory not in self.histories:
            self.histories[memory] = _History()
        return self.histories[memory]

    @staticmethod
    def _content(access: Access, run: int) -> tuple[Content, int]:
        kind, key = access.content
        kind = "parameters" if kind == "shard" else kind  # a part of the same
        return (Content(kind, key), run if kind == "value" else -1)

    def _check_after(self, number: int, other: int | None, resource: Resource, message: str) -> None:
        if other is not None and not self.order.before(other, number):
            self._fail(number, message.format(resource), other)

    def _check_exit(self, visit: Visit) -> None:
        """Check that another graph's operations, ordered by events alone, would come after this one's accesses."""
        for (resource, _), history in self.histories.items():
            for what, stream, events in _next_uses(resource, isinstance(self.ledger, RankLedger)):
                waits = [self.recorded[event] for event in events if event in self.recorded]
                for other in (history.written, *history.readers.values()):
                    if other is not None and not self.order.would_follow(stream, waits, other):
                        self._fail(other, f"another graph's {what} of {resource} would not wait for it")

    def _fail(self, number: int, message: str, other: int | None = None) -> None:
        fail(self.where, self.places[number], message, None if other is None else self.places[other])


def _is_copy(read: Access, written: Access) -> bool:
    """Whether what is written is what was read: elsewhere, or a chunk from its shards; not new parameters."""
    if read.content == written.content:
        return read.resource != written.resource
    kinds = (read.content.kind, written.content.kind)
    return read.content.key == written.content.key and (
        kinds == ("shard", "parameters") or (kinds == ("parameters", "shard") and read.resource != written.resource)
    )


def _next_uses(resource: Resource, ranks: bool) -> Iterator[tuple[str, str, tuple[Event, ...]]]:
    """Yield how another graph may use a resource next: what it does, on which stream, behind which events."""
    number = resource.key
    if resource.kind == "buffer":
        if ranks:
            yield "all_gather", "gather", (Event("read", number), Event("left", number))
        yield "prefetch", "h2d", (Event("read", number), Event("left", number))
        yield "collect", "compute", (Event("arrival", number), Event("left", number))
    elif resource.kind == "landing":
        yield "offload", "d2h", (Event("emptied", number),)


def _follows(before: Stop | None, stop: Stop) -> bool:
    """Whether a visit finds in the buffers what ``place`` assumes: a backward right behind its forward."""
    if not isinstance(stop, Visit) or stop.graph != "backward":
        return True
    return isinstance(before, Visit) and before.graph == "forward" and before.run == stop.run
