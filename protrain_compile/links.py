"""Links: how the devices of a cluster are connected, and how long their collectives take by it. Pure data, JSON.

The times are those of rings. A collective over ``n`` ranks moves ``(n - 1) / n`` of the buffer through every rank, in
``n - 1`` steps::

    all_gather, reduce_scatter   size x (n - 1) / n / rate + (n - 1) x step
    all_reduce                   twice that

Inside a node the rate is a device's to the others. Where a ring crosses nodes, as many rings run side by side as a node
has members in it, and each enters and leaves the node through another network port: all ports of a node together,
though no more than the rate inside.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from pathlib import Path
from typing import Any

from protrain_compile import json_data
from protrain_compile.errors import ProfileError

DEFAULT = "h200"
"""The table that counts where none is given and no collective was measured."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Links between devices.

    Attributes:
        name: What they are.
        inside_gb_per_s: Each way, of one device to the others of its node, in a collective.
        inside_us: Time that a step of a ring inside a node takes at least.
        across_gb_per_s: Each way, of one device's share of the network between nodes.
        across_us: Time that a step between nodes takes at least.
        source: Where the figures come from.
    """

    name: str
    inside_gb_per_s: float
    inside_us: float
    across_gb_per_s: float
    across_us: float
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        for name in ("inside_gb_per_s", "across_gb_per_s"):
            if not getattr(self, name) > 0:
                raise ProfileError(f"Links: {name} must be above 0, got {getattr(self, name)!r}")
        for name in ("inside_us", "across_us"):
            if not getattr(self, name) >= 0:
                raise ProfileError(f"Links: {name} must be at least 0, got {getattr(self, name)!r}")

    def ring_ms(self, size_bytes: float, ranks: int, *, node_members: int | None = None) -> float:
        """Return the time of an all_gather or reduce_scatter of a whole buffer.

        Args:
            size_bytes: Bytes of the buffer.
            ranks: How many share it.
            node_members: How many of them are on each node, where they are on several; None inside one.
        """
        if ranks == 1:
            return 0.0
        rate, step_us = self.inside_gb_per_s, self.inside_us
        if node_members is not None:
            rate, step_us = min(rate, self.across_gb_per_s * node_members), max(step_us, self.across_us)
        return size_bytes * (ranks - 1) / ranks / rate / 1e6 + (ranks - 1) * step_us / 1e3

    def to_json(self) -> str:
        """Return the Links as JSON text."""
        return json_data.to_json(self)

    @classmethod
    def load(cls, name: str | Path) -> Links:
        """Return the links in a JSON file, or those that come with the package, such as ``h200``.

        Raises:
            ProfileError: If there is no such file or table, or it is malformed; the message names it.
        """
        folder = importlib.resources.files("protrain_compile") / "hardware" / "links"
        path: Any = Path(name) if Path(name).is_file() else folder / f"{str(name).lower()}.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            shipped = sorted(each.name.removesuffix(".json") for each in folder.iterdir())
            raise ProfileError(
                f"link table {str(name)!r}: no such file, and the package has {', '.join(shipped)}"
            ) from error
        return json_data.from_json(cls, text, f"link table {name}")


@functools.cache
def default_links() -> Links:
    """Return the links that count where nothing is known."""
    return Links.load(DEFAULT)
