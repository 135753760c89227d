"""Effects: what every operation of a schedule does to memory, on which stream, and what orders it. One table.

An operation issues *steps*. A step runs on one stream: it waits for events, reads and writes resources, then records
events. ``prefetch(chunk=3, buffer=1)`` is one step::

    Step("h2d", waits=(read[1], left[1], updated[3]), reads=home[3], writes=buffer[1], records=(arrival[1],))

and ``offload`` is two: it marks the compute stream's last use of the buffer, then copies on ``d2h``. Waiting for an
event means: for what was recorded last when the wait was issued; never recorded means no wait.

=============  ==============================================  ===========================================
resource       what it is                                      holds
=============  ==============================================  ===========================================
home c         a host chunk's parameters and states            parameters of chunk c
parameters c   a persistent chunk's parameters and states      parameters of chunk c
gradients c    a persistent chunk's gradient storage           gradients of chunk c
buffer b       a chunk buffer on the device                    parameters, then gradients, of some chunk
landing n      pinned host memory where gradients arrive; a    gradients of some chunk
               chunk's own landing has the chunk's number
accumulator c  host memory in which gradients add up           summed gradients of chunk c
value v        what a node of the graph returned               its result
=============  ==============================================  ===========================================

=============  =====================================================================================
event          recorded when
=============  =====================================================================================
arrival b      a chunk has been copied into buffer b
read b         the compute stream is done with buffer b
left b         the gradients in buffer b have been copied to the host
landed c       the gradients of chunk c are in their landing (an event of its own for every offload)
fetched c      chunk c, whose gradient waits, has been fetched for a forward before ``step()``
emptied n      a host job is done with landing n
updated c      the last host update of chunk c has run
computed s     the values that segment s swaps have been computed
swapped s      they have left for the host
allocated s    the compute stream is done with the memory that they come back to
reloaded s     they are back
=============  =====================================================================================

What an operation does may depend on what the launching thread knows: a ``prefetch`` of what a buffer holds already does
nothing. That knowledge is the ``Ledger``, which follows the fields of ``residency.ChunkResidency`` one by one.
A new operation of the schedule needs a row in ``EFFECTS``; a new resource or event only a name. What is different where
ranks share chunks is in ``rank_effects``.
The stream ``caller`` is the launching thread itself: whatever is issued after a step of it, comes after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

from torch import fx

from protrain_compile import ops
from protrain_compile.artefacts import Artefact
from protrain_compile.chunks import ChunkBinding, Residency

STREAMS = ("caller", "compute", "h2d", "d2h", "gather", "host", "nvme")
"""The streams of a schedule, and the launching thread."""


class Resource(NamedTuple):
    """Memory that operations share."""

    kind: str
    key: int | str

    def __str__(self) -> str:
        """Return ``buffer 1``."""
        return f"{self.kind} {self.key}"


class Event(NamedTuple):
    """A mark in a stream, by what it says."""

    kind: str
    key: int | str

    def __str__(self) -> str:
        """Return ``arrival 1``."""
        return f"{self.kind} {self.key}"


class Content(NamedTuple):
    """What a resource holds: ``parameters`` or ``gradients`` or ``summed gradients`` of a chunk, or a node's value."""

    kind: str
    key: int | str

    def __str__(self) -> str:
        """Return ``parameters of chunk 1``."""
        return f"{self.kind} {self.key}" if self.kind == "value" else f"{self.kind} of chunk {self.key}"


class Access(NamedTuple):
    """A resource, and what a read expects in it or a write leaves in it.

    ``newest``: whether a read needs the last that was made of this content, wherever it was made.
    """

    resource: Resource
    content: Content
    newest: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one stream does for an operation: wait, read and write, record."""

    stream: str
    waits: tuple[Event, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    records: tuple[Event, ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation as a graph calls it.

    Attributes:
        arguments: Its keyword arguments.
        inputs: What the values that it takes refer to: results of other nodes, or views of chunks.
        result: What its own result is, if anything reads that.
    """

    arguments: Mapping[str, Any]
    inputs: tuple[Access, ...] = ()
    result: Access | None = None

    @property
    def chunk(self) -> int:
        """The chunk that it works on."""
        return int(self.arguments["chunk"])

    @property
    def buffer(self) -> int | None:
        """The chunk buffer that it uses; None for an operation without."""
        return self.arguments.get("buffer")


UpdateMode = Literal["in_backward", "at_step"]


@dataclasses.dataclass
class Ledger:
    """What the launching thread knows when it issues an operation; see the fields of ``ChunkResidency``.

    Attributes:
        residency: Per chunk.
        landings: Per chunk, how many landings take turns for its gradient: those that are large enough. Empty where
            every chunk has one of its own.
        mode: When updates run.
        holder: Whose parameters each buffer holds.
        pending: Chunks whose gradient waits for an update.
        landed: The landing that holds a chunk's gradient.
        accumulating: Chunks that have an accumulator.
        fetched: Chunks that were fetched while their gradient waited.
        turn: Offloads so far.
        misses: Waits that had to fetch their chunk because the contract at entry did not hold.
    """

    residency: tuple[Residency, ...]
    landings: tuple[int, ...]
    mode: UpdateMode = "at_step"
    holder: dict[int, int] = dataclasses.field(default_factory=dict)
    pending: set[int] = dataclasses.field(default_factory=set)
    landed: dict[int, int] = dataclasses.field(default_factory=dict)
    accumulating: set[int] = dataclasses.field(default_factory=set)
    fetched: set[int] = dataclasses.field(default_factory=set)
    turn: int = 0
    misses: int = 0

    @classmethod
    def of(cls, chunks: ChunkBinding, landings: int) -> Self:
        """Return the ledger at the start; ``landings`` take turns, as large as the largest chunks; 0: own ones."""
        host = [c.size_bytes for c in chunks.layout.chunks if c.trainable and chunks.residency[c.index] != "persistent"]
        sizes = sorted(host, reverse=True)[:landings]
        fitting = tuple(sum(size >= chunk.size_bytes for size in sizes) for chunk in chunks.layout.chunks)
        return cls(chunks.residency, fitting if landings else ())

    def on_device(self, chunk: int) -> bool:
        """Whether a chunk's states lie on the device."""
        return self.residency[chunk] == "persistent"

    def take_landing(self, chunk: int) -> int:
        """Return the landing for a chunk's gradient."""
        number = self.turn % self.landings[chunk] if self.landings else chunk
        self.turn += 1
        return number

    def forget(self, chunk: int) -> None:
        """Note that a chunk's home was written: buffers that hold it are stale."""
        self.holder = {buffer: held for buffer, held in self.holder.items() if held != chunk}

    def optimizer_step(self) -> Steps:
        """Return what ``step()`` issues: the updates that wait, in the order of the chunks."""
        return tuple(step for chunk in sorted(self.pending) for step in apply_update(chunk, self))

    def written(self, chunk: int) -> tuple[Access, tuple[Event, ...]]:
        """Return what a write of a persistent chunk's parameters leaves, and what it records."""
        return parameters(chunk), ()


# ---- accesses ------------------------------------------------------------------------------------------------------


def home(chunk: int) -> Access:
    """A host chunk's parameters and states."""
    return Access(Resource("home", chunk), Content("parameters", chunk))


def parameters(chunk: int) -> Access:
    """A persistent chunk's parameters and states."""
    return Access(Resource("parameters", chunk), Content("parameters", chunk))


def gradients(chunk: int) -> Access:
    """A persistent chunk's gradient storage."""
    return Access(Resource("gradients", chunk), Content("gradients", chunk))


def buffered(buffer: int, kind: str, chunk: int) -> Access:
    """A chunk buffer that holds ``parameters`` or ``gradients`` (or what ``rank_effects`` says)."""
    return Access(Resource("buffer", buffer), Content(kind, chunk))


def landing(number: int, chunk: int) -> Access:
    """Pinned host memory with a chunk's gradients."""
    return Access(Resource("landing", number), Content("gradients", chunk))


def accumulator(chunk: int) -> Access:
    """Host memory in which a chunk's gradients add up."""
    return Access(Resource("accumulator", chunk), Content("summed gradients", chunk))


def value(name: str) -> Access:
    """What a node returned, by a name that is unique over the graphs."""
    return Access(Resource("value", name), Content("value", name))


def view(target: Callable[..., Any], call: Call) -> Access:
    """Return what the views that ``bind`` or ``wait`` return are views of."""
    if target is ops.bind:
        return parameters(call.chunk)
    assert call.buffer is not None
    return buffered(call.buffer, "parameters", call.chunk)


# ---- the table -----------------------------------------------------------------------------------------------------

Steps = tuple[Step, ...]
Effect = Callable[[Call, Ledger], Steps]


def _compute(call: Call, ledger: Ledger) -> Steps:
    """An artefact, or a snapshot: reads what it is given, makes its result."""
    return (Step("compute", reads=call.inputs, writes=() if call.result is None else (call.result,)),)


def _bind(call: Call, ledger: Ledger) -> Steps:
    """Views only; whoever uses them reads."""
    return ()


def _gather(call: Call, ledger: Ledger) -> Steps:
    made = () if call.result is None else (call.result,)
    if ledger.on_device(call.chunk):
        return (Step("compute", reads=(parameters(call.chunk),), writes=made),)
    settle = Step("caller", waits=(Event("updated", call.chunk),), reads=(home(call.chunk),))
    return (settle, Step("compute", writes=made))


def _fetch(chunk: int, buffer: int, ledger: Ledger) -> Steps:
    ledger.holder[buffer] = chunk
    waits = (Event("read", buffer), Event("left", buffer), Event("updated", chunk))
    records = [Event("arrival", buffer)]
    if chunk in ledger.pending:
        ledger.fetched.add(chunk)
        records.append(Event("fetched", chunk))
    return (Step("h2d", waits, (home(chunk),), (buffered(buffer, "parameters", chunk),), tuple(records)),)


def _prefetch(call: Call, ledger: Ledger) -> Steps:
    assert call.buffer is not None
    return () if ledger.holder.get(call.buffer) == call.chunk else _fetch(call.chunk, call.buffer, ledger)


def _wait(call: Call, ledger: Ledger) -> Steps:
    """Also repairs a contract that did not hold at entry, by a fetch behind whatever the buffer was used for."""
    assert call.buffer is not None
    repair: Steps = ()
    if ledger.holder.get(call.buffer) != call.chunk:
        ledger.misses += 1
        last_use = Step("compute", records=(Event("read", call.buffer),))
        repair = (last_use, *_fetch(call.chunk, call.buffer, ledger))
    return (*repair, Step("compute", waits=(Event("arrival", call.buffer),)))


def _release(call: Call, ledger: Ledger) -> Steps:
    return (Step("compute", records=(Event("read", _number(call)),)),)


def _collect(call: Call, ledger: Ledger) -> Steps:
    chunk, buffer = call.chunk, call.buffer
    if buffer is None:
        before = (gradients(chunk),) if chunk in ledger.pending else ()
        return (Step("compute", reads=(*call.inputs, *before), writes=(gradients(chunk),)),)
    ledger.holder.pop(buffer, None)
    waits = (Event("arrival", buffer), Event("left", buffer))
    return (Step("compute", waits, call.inputs, (buffered(buffer, "gradients", chunk),)),)


def _offload(call: Call, ledger: Ledger) -> Steps:
    chunk, buffer = call.chunk, _number(call)
    last_use = Step("compute", records=(Event("read", buffer),))
    moved: Steps = ()
    if chunk in ledger.pending and chunk in ledger.landed and not ledger.landings:
        moved = _accumulate(chunk, chunk not in ledger.accumulating, ledger, newest=False)
    number = ledger.take_landing(chunk)
    ledger.landed[chunk] = number
    copy = Step(
        "d2h",
        waits=(Event("read", buffer), Event("emptied", number)),
        reads=(buffered(buffer, "gradients", chunk),),
        writes=(landing(number, chunk),),
        records=(Event("left", buffer), Event("landed", chunk)),
    )
    return (last_use, *moved, copy)


def _accumulate(chunk: int, first: bool, ledger: Ledger, *, newest: bool) -> Steps:
    """Empty a landing into the accumulator; not ``newest``: a second gradient is about to arrive."""
    number = ledger.landed.pop(chunk)
    ledger.accumulating.add(chunk)
    reads = [landing(number, chunk)._replace(newest=newest)]
    if not first:
        reads.append(accumulator(chunk))
    step = Step("host", (Event("landed", chunk),), tuple(reads), (accumulator(chunk),), (Event("emptied", number),))
    return (step,)


def _update(call: Call, ledger: Ledger) -> Steps:
    chunk = call.chunk
    was_pending = chunk in ledger.pending
    ledger.pending.add(chunk)
    moved: Steps = ()
    must_move = bool(ledger.landings) or chunk in ledger.accumulating
    if chunk in ledger.landed and must_move and (ledger.mode == "at_step" or was_pending):
        moved = _accumulate(chunk, not was_pending, ledger, newest=True)
    return (*moved, *(apply_update(chunk, ledger) if ledger.mode == "in_backward" else ()))


def apply_update(chunk: int, ledger: Ledger) -> Steps:
    """Update a chunk with the gradient that waits."""
    ledger.pending.remove(chunk)
    if ledger.on_device(chunk):
        return (Step("compute", reads=(gradients(chunk), parameters(chunk)), writes=(parameters(chunk),)),)
    ledger.forget(chunk)
    updated, source = Event("updated", chunk), home(chunk)
    fetched = (Event("fetched", chunk),) if chunk in ledger.fetched else ()
    ledger.fetched.discard(chunk)
    if chunk not in ledger.landed:
        return (Step("host", fetched, (accumulator(chunk), source), (source,), (updated,)),)
    number, landed = ledger.landed.pop(chunk), Event("landed", chunk)
    both = (Step("d2h", waits=fetched, records=(landed,)),) if fetched else ()
    reads = (landing(number, chunk), source)
    return (*both, Step("host", (landed,), reads, (source,), (updated, Event("emptied", number))))


def _swap_out(call: Call, ledger: Ledger) -> Steps:
    """The result stands for the slab: every run has one of its own until its handle dies."""
    segment = int(call.arguments["segment"])
    made = Step("compute", records=(Event("computed", segment),))
    slab = () if call.result is None else (call.result,)
    return (made, Step("d2h", (Event("computed", segment),), call.inputs, slab, (Event("swapped", segment),)))


def _release_swapped(call: Call, ledger: Ledger) -> Steps:
    """The memory of the values that left is free: whatever compute does next may write there."""
    return (Step("compute", waits=(Event("swapped", int(call.arguments["segment"])),), writes=call.inputs),)


def _reload(call: Call, ledger: Ledger) -> Steps:
    """The memory that the values come back to was used by what compute did before."""
    segment = int(call.arguments["segment"])
    memory = () if call.result is None else (call.result,)
    allocated = Step("compute", writes=memory, records=(Event("allocated", segment),))
    waits = (Event("allocated", segment), Event("swapped", segment))
    return (allocated, Step("h2d", waits, call.inputs, memory, (Event("reloaded", segment),)))


def _wait_reload(call: Call, ledger: Ledger) -> Steps:
    return (Step("compute", waits=(Event("reloaded", int(call.arguments["segment"])),)),)


EFFECTS: dict[Callable[..., Any], Effect] = {
    ops.snapshot: _compute,
    ops.bind: _bind,
    ops.gather: _gather,
    ops.prefetch: _prefetch,
    ops.wait: _wait,
    ops.release: _release,
    ops.collect: _collect,
    ops.offload: _offload,
    ops.update: _update,
    ops.swap_out: _swap_out,
    ops.release_swapped: _release_swapped,
    ops.reload: _reload,
    ops.wait_reload: _wait_reload,
}
"""What each named operation does; calls of artefacts are all alike, see ``effect_of``."""


def effect_of(node: fx.Node, table: Mapping[Callable[..., Any], Effect] = EFFECTS) -> Effect | None:
    """Return the row of a node's operation; None for what issues nothing (pack, getitem, placeholders, output)."""
    if isinstance(node.target, Artefact):
        return _compute
    return table.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]


def _number(call: Call) -> int:
    assert call.buffer is not None
    return call.buffer
