"""The Profile: what was measured (or estimated) of a model's templates and of the machine. Pure data, JSON both ways.

Units are in the names: ``ms``, ``us``, ``bytes``, ``gb_per_s`` (1e9 bytes a second), ``gparams_per_s`` (1e9 parameters
a second), ``tflops`` (1e12 floating-point operations a second).
"""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from protrain_compile import json_data
from protrain_compile.errors import ProfileError
from protrain_compile.links import Links
from protrain_compile.roles import Role

Format = Literal["split", "fp32", "fp16"]
"""How a chunk's states are stored; the names of ``updates.formats.StateFormat`` in small letters."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclasses.dataclass(frozen=True)
class NodeCost:
    """What one ATen node of a template's joint graph costs (equations 2 and 3 of the ProTrain paper).

    Attributes:
        name: The node's name in the joint graph.
        op: The operation's short name, such as ``mm``.
        ms: Time alone on the device, the cost of launching it not included where it overlaps.
        change_bytes: Allocated memory after it, inputs at their last use freed, less before it (the paper's C).
        inside_bytes: The most allocated inside it, less before it (the paper's P); at least ``change_bytes`` and 0.
    """

    name: str
    op: str
    ms: float
    change_bytes: int
    inside_bytes: int

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_negative(self, "ms", "inside_bytes")


@dataclasses.dataclass(frozen=True)
class ArtefactCost:
    """What one call of a template's compiled part costs.

    Attributes:
        ms: Time on the device, launches overlapped with it as in a long run of calls.
        workspace_bytes: The most allocated inside the call, beyond what is alive before it and what it returns. Inputs
            are held during a forward or recompute; in a backward the saved values and tangents die at their last use,
            so that its figure may be negative: their memory serves what is made later. (Not those that autograd holds.)
        launches: Kernels that it launches; ``launches x launch_us`` is the least that the launching thread takes.
    """

    ms: float
    workspace_bytes: int = 0
    launches: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_negative(self, "ms", "launches")


@dataclasses.dataclass(frozen=True)
class TemplateProfile:
    """What one template costs.

    Attributes:
        parts: The cost of each part that the template has.
        nodes: The cost of every node of its joint graph, in graph order; may be empty.
        measured: Whether it was measured on the device, or estimated from a HardwareProfile.
    """

    parts: Mapping[Role, ArtefactCost]
    nodes: tuple[NodeCost, ...] = ()
    measured: bool = False

    def to_json(self) -> str:
        """Return the TemplateProfile as JSON text."""
        return json_data.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> TemplateProfile:
        """Return what ``to_json`` wrote; ProfileError, naming the field, if it is not one."""
        return json_data.from_json(cls, text, "template")


@dataclasses.dataclass(frozen=True)
class LinkRate:
    """Rates of one direction of the host-device link, from pinned memory.

    Attributes:
        alone_gb_per_s: Nothing else using the link or the host's memory.
        both_gb_per_s: While the other direction copies too.
        beside_updates_gb_per_s: While the other direction copies too and the host updates parameters.
    """

    alone_gb_per_s: float
    both_gb_per_s: float
    beside_updates_gb_per_s: float

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_no_rate(self, "alone_gb_per_s", "both_gb_per_s", "beside_updates_gb_per_s")


@dataclasses.dataclass(frozen=True)
class HostUpdateRate:
    """How fast the host updates parameters (AdamW, gradients of the type that crosses the link).

    Attributes:
        format: How parameters and states are stored.
        threads: Threads of the update.
        gparams_per_s: The rate alone.
        beside_copies_gparams_per_s: The rate while the link copies both ways.
    """

    format: Format
    threads: int
    gparams_per_s: float
    beside_copies_gparams_per_s: float

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_no_rate(self, "threads", "gparams_per_s", "beside_copies_gparams_per_s")


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """One measured collective.

    Attributes:
        kind: The operation.
        size_bytes: Bytes of the whole (unsharded) buffer.
        ranks: How many ranks took part.
        ms: Its time.
    """

    kind: CollectiveKind
    size_bytes: int
    ranks: int
    ms: float

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_no_rate(self, "size_bytes", "ranks", "ms")


@dataclasses.dataclass(frozen=True)
class NvmeRate:
    """Rates of the local disk, with direct access."""

    read_gb_per_s: float
    write_gb_per_s: float

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_no_rate(self, "read_gb_per_s", "write_gb_per_s")


@dataclasses.dataclass(frozen=True)
class HardwareProfile:
    """What one machine (one device, and the host that it may have for itself or share) can do.

    Attributes:
        name: The device's name.
        device_bytes: Device memory.
        host_bytes: Host memory.
        cores: CPU cores that the process may use.
        matmul_tflops: Rate of large matrix products by dtype, such as ``bfloat16``.
        device_gb_per_s: Rate at which kernels read and write device memory, together.
        h2d: The link from the host to the device.
        d2h: The link from the device to the host.
        host_updates: Rates of host updates by format and threads.
        device_update_gparams_per_s: Rate of device updates by format.
        launch_us: Time of the launching thread for one small kernel.
        collectives: Measured collectives; may be empty.
        devices: How many devices like this one have the host in common; 1 where the host's figures are one device's
            share already, as those of the profile that comes with the package.
        links: How devices are connected, for collectives that were not measured; None for the default table.
        nvme: Rates of the disk, if measured.
        source: Where the figures come from.
    """

    name: str
    device_bytes: int
    host_bytes: int
    cores: int
    matmul_tflops: Mapping[str, float]
    device_gb_per_s: float
    h2d: LinkRate
    d2h: LinkRate
    host_updates: tuple[HostUpdateRate, ...]
    device_update_gparams_per_s: Mapping[Format, float]
    launch_us: float
    collectives: tuple[CollectiveCost, ...] = ()
    devices: int = 1
    links: Links | None = None
    nvme: NvmeRate | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        _refuse_no_rate(self, "device_bytes", "host_bytes", "cores", "devices", "device_gb_per_s", "launch_us")
        for name in ("matmul_tflops", "device_update_gparams_per_s"):
            for key, rate in getattr(self, name).items():
                if rate <= 0:
                    raise ProfileError(f"HardwareProfile: {name}.{key} must be above 0, got {rate!r}")
        if not self.matmul_tflops:
            raise ProfileError("HardwareProfile: matmul_tflops must name at least one dtype")

    def host_update(self, format: Format, threads: int | None = None) -> HostUpdateRate:
        """Return the host's update rate with ``threads`` threads, interpolated; the fastest measured if None.

        A format that was not measured has the rate of the slowest one that was.

        Raises:
            ProfileError: If no host update was measured.
        """
        if not self.host_updates:
            raise ProfileError("HardwareProfile: host_updates is empty, so no update on the host can be planned")
        of_format = [rate for rate in self.host_updates if rate.format == format]
        known = sorted(of_format or _slowest(self.host_updates), key=lambda rate: rate.threads)
        if threads is None:
            return max(known, key=lambda rate: rate.gparams_per_s)
        return _interpolate(known, threads)

    def with_updates(self, host: Iterable[HostUpdateRate], device: Mapping[Format, float]) -> HardwareProfile:
        """Return the same with the rates of updates of more formats, on the host and on the device."""
        rates = {**self.device_update_gparams_per_s, **device}
        return dataclasses.replace(self, host_updates=(*self.host_updates, *host), device_update_gparams_per_s=rates)

    def share(self, ranks: int) -> HardwareProfile:
        """Return what each of several ranks of this machine has, a device each.

        Memory, cores and host updates, which memory bandwidth bounds, are divided. A device's link to the host is its
        own; that the copies of all devices share the host's memory is not known.
        """
        parts = min(ranks, self.devices)
        if parts == 1:
            return self
        updates = tuple(
            HostUpdateRate(
                rate.format,
                max(1, rate.threads // parts),
                rate.gparams_per_s / parts,
                rate.beside_copies_gparams_per_s / parts,
            )
            for rate in self.host_updates
        )
        return dataclasses.replace(
            self,
            host_bytes=self.host_bytes // parts,
            cores=max(1, self.cores // parts),
            host_updates=updates,
            devices=self.devices // parts,
        )

    def to_json(self) -> str:
        """Return the HardwareProfile as JSON text."""
        return json_data.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Return what ``to_json`` wrote; ProfileError, naming the field, if it is not one."""
        return json_data.from_json(cls, text, "hardware")

    @classmethod
    def load(cls, name: str | Path) -> HardwareProfile:
        """Return the profile in a JSON file, or one that comes with the package, such as ``h200``.

        Raises:
            ProfileError: If there is no such file or profile, or it is malformed; the message names it.
        """
        shipped = importlib.resources.files("protrain_compile") / "hardware" / f"{str(name).lower()}.json"
        path: Any = Path(name) if Path(name).is_file() else shipped
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"hardware profile {str(name)!r}: no such file, and the package has {', '.join(shipped_profiles())}; "
                "record one with `protrain profile --hardware-only --output FILE`"
            ) from error
        return json_data.from_json(cls, text, f"hardware profile {name}")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Everything that planning knows of one program and one machine.

    Attributes:
        hardware: The machine.
        templates: In the order of ``Program.templates``.
    """

    hardware: HardwareProfile
    templates: tuple[TemplateProfile, ...]

    def to_json(self) -> str:
        """Return the Profile as JSON text."""
        return json_data.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return what ``to_json`` wrote; ProfileError, naming the field, if it is not one."""
        return json_data.from_json(cls, text, "profile")


def shipped_profiles() -> list[str]:
    """Return the names of the hardware profiles that come with the package."""
    folder = importlib.resources.files("protrain_compile") / "hardware"
    return sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))


def _slowest(rates: tuple[HostUpdateRate, ...]) -> list[HostUpdateRate]:
    slowest = min(rates, key=lambda rate: rate.gparams_per_s)
    return [rate for rate in rates if rate.format == slowest.format]


def _interpolate(known: list[HostUpdateRate], threads: int) -> HostUpdateRate:
    """Return the rate between the measured numbers of threads; the nearest one's outside them."""
    above = next((rate for rate in known if rate.threads >= threads), known[-1])
    below = next((rate for rate in reversed(known) if rate.threads <= threads), known[0])
    if above.threads <= below.threads:
        return dataclasses.replace(above, threads=threads)
    share = (threads - below.threads) / (above.threads - below.threads)

    def between(low: float, high: float) -> float:
        return low + share * (high - low)

    return HostUpdateRate(
        above.format,
        threads,
        between(below.gparams_per_s, above.gparams_per_s),
        between(below.beside_copies_gparams_per_s, above.beside_copies_gparams_per_s),
    )


def _refuse_negative(data: Any, *names: str) -> None:
    for name in names:
        if getattr(data, name) < 0:
            raise ProfileError(f"{type(data).__name__}: {name} must be at least 0, got {getattr(data, name)!r}")


def _refuse_no_rate(data: Any, *names: str) -> None:
    for name in names:
        if getattr(data, name) <= 0:
            raise ProfileError(f"{type(data).__name__}: {name} must be above 0, got {getattr(data, name)!r}")
