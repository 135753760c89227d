"""Shards: how the ranks of a process group share a chunk. Pure data.

A chunk is a flat buffer of ``ranks`` shards of equal size; rank ``r`` owns the ``r``-th. What is divided is a chunk's
sharding, after ZeRO (Rajbhandari et al., 2020):

==============  ========  =============================================  =========================================
sharding        ZeRO      whole on every rank's device                   all_gather
==============  ========  =============================================  =========================================
``states``      stage 1   parameters, gradients (sum of micro-batches)   once after every update
``gradients``   stage 2   parameters                                     once after every update
``parameters``  stage 3   nothing; a chunk buffer while in use           before every stay in a buffer
==============  ========  =============================================  =========================================

Optimizer states are always divided. ``reduce_scatter`` runs after every backward; with ``states`` only after the last
micro-batch of a step. What lies on the host is always divided, so residency bounds the choice (``allowed_sharding``).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

Sharding = Literal["states", "gradients", "parameters"]
SHARDINGS: tuple[str, ...] = get_args(Sharding)


@dataclasses.dataclass(frozen=True)
class World:
    """How many ranks train a model together, and how.

    Attributes:
        ranks: How many divide each chunk.
        replicas: How many such groups there are; more than one is hybrid sharding.
        nodes: On how many machines all of them are.
    """

    ranks: int = 1
    replicas: int = 1
    nodes: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.ranks * self.replicas

    @property
    def node_ranks(self) -> int:
        """The most ranks of one node, where they are spread as evenly as they can be."""
        return -(-self.size // self.nodes)


ALONE = World()
"""A world of one rank."""


def allowed_sharding(residency: str, wanted: Sharding) -> Sharding:
    """Return ``wanted``, or the only sharding that a residency on the host has.

    An offloaded chunk's home is on the host, where each rank holds its shard only: ``parameters``. A split chunk holds
    whole parameters on the device and its gradients leave at once: ``gradients``.
    """
    forced: dict[str, Sharding] = {"offloaded": "parameters", "split": "gradients"}
    return forced.get(residency, wanted)
