"""Ranks: the processes that share one prepared model, and every word that passes between them.

``torch.distributed`` does the work. Chunks travel through the group of the model's device (NCCL on GPUs); what the
ranks agree upon (layouts, plans, digests) travels through a gloo group of its own, so that a rank which compiles while
another computes waits in another place than that other: both end with a message, neither reads the other's bytes.

With a mesh of two dimensions (hybrid sharding) chunks are divided along the second, inside a node, and gradients
averaged along the first too, across nodes::

    reduce_scatter (shard group) -> all_reduce of the shard (replicate group)

Two ranks on one GPU talk through gloo, which takes host tensors: chunks then pass through the host (for tests).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from protrain_compile import compat
from protrain_compile.errors import OptionError, RankError
from protrain_compile.profile import CollectiveKind
from protrain_compile.shards import World

T = TypeVar("T")


@dataclasses.dataclass
class Traffic:
    """Bytes of chunks that this rank received from others in collectives of its shard group, and how many there were.

    Attributes:
        gathered_bytes: By all_gather.
        reduced_bytes: By reduce_scatter.
        gathers: How many all_gathers.
        reduces: How many reduce_scatters.
    """

    gathered_bytes: int = 0
    reduced_bytes: int = 0
    gathers: int = 0
    reduces: int = 0


class Ranks:
    """The ranks that share a model (see the module docstring).

    Attributes:
        rank: This process's number among those that divide chunks.
        world: How many there are, and on how many machines.
        traffic: What the collectives moved so far.
    """

    def __init__(self, device: torch.device, mesh: DeviceMesh | None = None) -> None:
        """Join the ranks; a collective call.

        Raises:
            OptionError: If the process group cannot move tensors of ``device``, or the mesh has other dimensions.
        """
        self.device = device
        self.traffic = Traffic()
        self._shard, self._replicate = _groups_of(mesh)
        self.rank = dist.get_rank(self._shard)
        self._world_rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._staged = _backend_of(self._shard, device) == "gloo" and device.type != "cpu"
        # Gloo reaches a waiting rank's timeout as the main group does.
        self._agreement = dist.new_group(backend="gloo", timeout=compat.group_timeout(self._shard, device))
        nodes = len(set(self._every(platform.node(), "the names of the nodes")))
        replicas = 1 if self._replicate is None else dist.get_world_size(self._replicate)
        self.world = World(dist.get_world_size(self._shard), replicas, nodes)

    @property
    def size(self) -> int:
        """How many divide chunks."""
        return self.world.ranks

    # ---- chunks --------------------------------------------------------------------------------------------------

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of a flat chunk that this rank owns."""
        numel = flat.numel() // self.size
        return flat[self.rank * numel : (self.rank + 1) * numel]

    def all_gather(self, flat: torch.Tensor, what: str) -> None:
        """Fill a flat chunk from every rank's shard of it, in place."""
        with self._waiting(f"all_gather of {what}"):
            self._on_host(flat, functools.partial(self._run, "all_gather"))
        self.traffic.gathers += 1
        self.traffic.gathered_bytes += flat.nbytes - flat.nbytes // self.size

    def reduce_scatter(self, flat: torch.Tensor, what: str) -> None:
        """Replace this rank's shard of ``flat`` by its mean over all ranks, in place; the rest is lost."""
        flat.div_(self.world.size)  # before the sum, as DDP does: a sum of 16-bit gradients may overflow
        with self._waiting(f"reduce_scatter of {what}"):
            self._on_host(flat, self._reduce)
        self.traffic.reduces += 1
        self.traffic.reduced_bytes += flat.nbytes - flat.nbytes // self.size

    def _reduce(self, flat: torch.Tensor) -> None:
        self._run("reduce_scatter", flat)
        if self._replicate is not None:
            self._run("all_reduce", flat)

    def run(self, kind: CollectiveKind, flat: torch.Tensor) -> None:
        """Run one collective on a flat chunk, to measure it; ``all_reduce`` is that of its shard across replicas."""
        with self._waiting(f"the measured {kind}"):
            self._on_host(flat, functools.partial(self._run, kind))

    def _run(self, kind: CollectiveKind, flat: torch.Tensor) -> None:
        own = self.shard(flat)
        if kind == "all_gather":
            compat.all_gather_into(flat, own, self._shard)
        elif kind == "reduce_scatter":
            compat.reduce_scatter_into(own, flat, self._shard)
        else:
            dist.all_reduce(own, group=self._replicate)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Give every rank of the shard group ``source``'s values, in place."""
        with self._waiting(f"broadcast of {what}"):
            self._on_host(tensor, lambda each: dist.broadcast(each, group=self._shard, group_src=source))

    def _on_host(self, tensor: torch.Tensor, call: Callable[[torch.Tensor], object]) -> None:
        """Run a collective on ``tensor``; through the host where the group takes host tensors only."""
        if not self._staged:
            call(tensor)
            return
        host = tensor.cpu()
        call(host)
        tensor.copy_(host)

    # ---- agreement -----------------------------------------------------------------------------------------------

    def total(self, value: float, what: str) -> float:
        """Return the sum of every shard's ``value``."""
        return sum(self._every(value, what)) / self.world.replicas

    def least(self, value: int | None, what: str) -> int | None:
        """Return the least ``value`` of all ranks; None if every rank has none."""
        return least_known(self._every(value, what))

    def exchange(self, text: str, what: str) -> list[str]:
        """Return every rank's ``text``, in order.

        Raises:
            RankError: If a rank refused instead.
        """
        every = self._every((text, ""), what)
        for rank, (_, reason) in enumerate(every):
            if reason:
                raise RankError(f"rank {rank} of {self._world_size} cannot go on, so nor can the others: {reason}")
        return [each for each, _ in every]

    def refuse(self, reason: str, what: str) -> None:
        """Let the ranks that are in ``exchange`` raise instead of waiting for this one, which is about to."""
        self._every(("", reason), what)

    def agree(self, lines: Sequence[str], what: str) -> None:
        """Return if ``lines`` are the same on all ranks.

        Raises:
            RankError: On every rank, if they are not; the message shows the first line that differs.
        """
        every = self._every("\n".join(lines), what)
        for rank, text in enumerate(every):
            if text != every[0]:
                raise RankError(_difference(what, rank, every[0].split("\n"), text.split("\n")))

    def from_first(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give ``tensors`` (with their names) rank 0's values, in place, as DDP does when it wraps a model."""
        for name, tensor in tensors:
            with self._waiting(f"broadcast of {name} from rank 0"):
                host = tensor.detach().cpu().contiguous()
                dist.broadcast(host.view(-1).view(torch.uint8), 0, group=self._agreement)
                if self._world_rank != 0:
                    tensor.detach().copy_(host)

    def _every(self, value: T, what: str) -> list[T]:
        found = [value] * self._world_size
        with self._waiting(what):
            dist.all_gather_object(found, value, group=self._agreement)
        return found

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Say in which operation this rank waited in vain."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self._world_rank} of {self._world_size} waited in vain in {what}: another rank has raised or "
                "ended (its own message says why), or runs other operations than this one, or takes longer than the "
                f"timeout given to init_process_group; the group says: {error}"
            ) from error


def _groups_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the groups along which chunks are divided and replicated."""
    if mesh is None:
        group = dist.group.WORLD
        assert group is not None
        return group, None
    if mesh.ndim > 2:
        raise OptionError(f"mesh has {mesh.ndim} dimensions; give one (shard), or two (replicate, shard)")
    return mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim == 2 else None


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if device.type not in backends:
        raise OptionError(
            f"the process group has no backend for {device.type}: call init_process_group() with a backend for it "
            "(nccl for cuda, gloo for cpu), or leave its backend out"
        )
    return backends[device.type]


def _difference(what: str, rank: int, first: Sequence[str], other: Sequence[str]) -> str:
    length = max(len(first), len(other))
    number = next(i for i in range(length) if first[i : i + 1] != other[i : i + 1])
    texts = [lines[number] if number < len(lines) else "nothing more" for lines in (first, other)]
    return (
        f"ranks differ in {what}: line {number + 1} of rank 0 is {texts[0]!r}, of rank {rank} {texts[1]!r}; every rank "
        "must build the same model and call it in the same order"
    )


def least_known(values: Iterable[int | None]) -> int | None:
    """Return the least of ``values`` that is not None; None if there is none."""
    return min((each for each in values if each is not None), default=None)
