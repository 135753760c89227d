"""The Plan: what was decided about every block and every chunk. Pure data, JSON both ways.

A Plan lists one policy per block, in execution order, or is *uniform*: one policy for every block of whatever model it
meets; or it leaves policies to the planner. Likewise for the residency of chunks, which concerns prepared models only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from protrain_compile.chunks import RESIDENCIES, Residency
from protrain_compile.errors import PlanError
from protrain_compile.shards import SHARDINGS, Sharding, allowed_sharding

Policy = Literal["keep", "recompute_pointwise", "recompute_products", "recompute", "swap", "swap_products"]
POLICIES: tuple[str, ...] = get_args(Policy)
Loss = Literal["whole", "sliced"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
LISTS = ("policies", "blocks", "residency", "sharding")
MIN_BUFFERS = 3
"""One chunk in use, one arriving, one whose gradient is leaving."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to each block's saved values between forward and backward.

    Attributes:
        policies: One policy per block in execution order, or None.
        uniform_policy: The policy of every block, or None. Without either, the planner decides.
        blocks: Names of the blocks that ``policies`` was made for, if known; a model with other
            block names is then refused.
        residency: One residency per chunk in first-use order, or None.
        uniform_residency: The residency of every chunk, or None.
        buffers: How many chunk buffers of standard size; None leaves it to the planner.
        chunk_bytes: Capacity of a chunk; None leaves it to packing. A block larger than this has a chunk of its own.
        loss: ``whole``, or ``sliced``: the logits exist for one slice of tokens at a time; None leaves it to the
            planner. Counts where a sliced form of the loss was found.
        sharding: What of each chunk is divided among ranks (see ``shards``), in first-use order, or None.
        uniform_sharding: The same for every chunk, as far as its residency allows; or None.
    """

    policies: tuple[Policy, ...] | None = None
    uniform_policy: Policy | None = None
    blocks: tuple[str, ...] | None = None
    residency: tuple[Residency, ...] | None = None
    uniform_residency: Residency | None = None
    buffers: int | None = None
    chunk_bytes: int | None = None
    loss: Loss | None = None
    sharding: tuple[Sharding, ...] | None = None
    uniform_sharding: Sharding | None = None

    def __post_init__(self) -> None:
        """Refuse malformed plans where they are made."""
        if self.policies is not None and self.uniform_policy is not None:
            raise PlanError("a Plan takes either policies (one per block) or one policy for all: use Plan.uniform")
        for name in LISTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
                raise PlanError(f"plan: {name}={value!r}: give a list of names; for all alike, use Plan.uniform(...)")
            object.__setattr__(self, name, None if value is None else tuple(value))
        uniform = () if self.uniform_policy is None else (self.uniform_policy,)
        for policy in self.policies if self.policies is not None else uniform:
            if policy not in POLICIES:
                raise PlanError(f"plan: unknown policy {policy!r}; the policies are {', '.join(POLICIES)}")
        if self.blocks is not None and (self.policies is None or len(self.blocks) != len(self.policies)):
            raise PlanError("plan: blocks, when given, names each entry of policies")
        if self.loss is not None and self.loss not in LOSSES:
            raise PlanError(f"plan: loss={self.loss!r}: choose one of {', '.join(LOSSES)}, or None")
        self._check_residency()
        self._check_sharding()

    def _check_residency(self) -> None:
        if self.residency is not None and self.uniform_residency is not None:
            raise PlanError("plan: give residency (one per chunk) or uniform_residency, not both")
        for residency in self.residency or (self.uniform_residency,):
            if residency is not None and residency not in RESIDENCIES:
                raise PlanError(f"plan: unknown residency {residency!r}; the residencies are {', '.join(RESIDENCIES)}")
        if self.buffers is not None and (not isinstance(self.buffers, int) or self.buffers < MIN_BUFFERS):
            raise PlanError(f"plan: buffers must be a number of at least {MIN_BUFFERS}, got {self.buffers!r}")
        if self.chunk_bytes is not None and (not isinstance(self.chunk_bytes, int) or self.chunk_bytes < 1):
            raise PlanError(f"plan: chunk_bytes must be a positive number of bytes, got {self.chunk_bytes!r}")

    def _check_sharding(self) -> None:
        if self.sharding is not None and self.uniform_sharding is not None:
            raise PlanError("plan: give sharding (one per chunk) or uniform_sharding, not both")
        for sharding in self.sharding or (self.uniform_sharding,):
            if sharding is not None and sharding not in SHARDINGS:
                raise PlanError(f"plan: unknown sharding {sharding!r}; the shardings are {', '.join(SHARDINGS)}")

    @classmethod
    def uniform(
        cls, policy: str = "keep", residency: str | None = None, loss: str | None = None, sharding: str | None = None
    ) -> Plan:
        """Return a Plan that gives ``policy`` to every block of any model, ``residency`` and ``sharding`` to chunks."""
        return cls(
            uniform_policy=cast("Policy", policy),
            uniform_residency=cast("Residency | None", residency),
            loss=cast("Loss | None", loss),
            uniform_sharding=cast("Sharding | None", sharding),
        )

    @property
    def concerns_chunks(self) -> bool:
        """Whether it says anything about chunks, which only prepared models have."""
        about = (self.residency, self.uniform_residency, self.sharding, self.uniform_sharding, self.buffers)
        return any(each is not None for each in (*about, self.chunk_bytes))

    @property
    def keeps_all(self) -> bool:
        """Whether memory is not short: no block recomputes or swaps, and no chunk moves."""
        return set(self.policies or ()) <= {"keep"} and set(self.residency or ()) <= {"persistent"}

    def fit_chunks(self, chunks: int) -> tuple[Residency, ...] | None:
        """Return the residency of each of ``chunks`` chunks, or None if the Plan leaves it open.

        Raises:
            PlanError: If the Plan was made for another number of chunks.
        """
        if self.uniform_residency is not None:
            return (self.uniform_residency,) * chunks
        if self.residency is not None and len(self.residency) != chunks:
            raise _other_length("residency", len(self.residency), chunks)
        return self.residency

    def fit_sharding(self, residency: Sequence[Residency]) -> tuple[Sharding, ...] | None:
        """Return the sharding of each chunk, or None if the Plan leaves it open.

        Args:
            residency: Of every chunk; a uniform sharding gives way to it (see ``shards.allowed_sharding``).

        Raises:
            PlanError: If the Plan was made for another number of chunks, or a chunk's residency forbids its sharding.
        """
        if self.uniform_sharding is not None:
            return tuple(allowed_sharding(each, self.uniform_sharding) for each in residency)
        if self.sharding is None:
            return None
        if len(self.sharding) != len(residency):
            raise _other_length("sharding", len(self.sharding), len(residency))
        for chunk, (lives, sharding) in enumerate(zip(residency, self.sharding, strict=True)):
            allowed = allowed_sharding(lives, sharding)
            if allowed != sharding:
                raise PlanError(f"plan: chunk {chunk} is {lives}, so its sharding is {allowed}, not {sharding}")
        return self.sharding

    def fit(self, block_names: Sequence[str]) -> Plan:
        """Return this Plan with one policy for each of ``block_names``; where it leaves policies open, keep.

        Raises:
            PlanError: If the Plan was made for other blocks; the message says what differs.
        """
        names = tuple(block_names)
        if self.policies is None:
            policy: Policy = self.uniform_policy or "keep"
            return dataclasses.replace(self, policies=(policy,) * len(names), uniform_policy=None, blocks=names)
        if len(self.policies) != len(names):
            shown = f" ({names[0]} to {names[-1]})" if names else ""
            raise PlanError(
                f"plan has {len(self.policies)} block policies, but this graph has {len(names)} blocks{shown}; "
                "give one policy per block, or use Plan.uniform(policy=...)"
            )
        if self.blocks is not None and self.blocks != names:
            index = next(i for i, (ours, theirs) in enumerate(zip(self.blocks, names, strict=True)) if ours != theirs)
            raise PlanError(
                f"plan was made for block {index} = {self.blocks[index]!r}, but this graph's block {index} is "
                f"{names[index]!r}; make the plan anew for this model, or leave `blocks` out"
            )
        return dataclasses.replace(self, blocks=names)

    def to_json(self) -> str:
        """Return the Plan as JSON text."""
        return json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v is not None})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the Plan that ``to_json`` wrote.

        Raises:
            PlanError: If ``text`` is not JSON or not a Plan.
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError) as error:
            hint = f"; for every block alike, pass Plan.uniform({text!r})" if text in POLICIES else ""
            raise PlanError(f"plan is not JSON: {error}{hint}") from error
        return cls.from_mapping(fields)

    @classmethod
    def from_mapping(cls, fields: Any) -> Plan:
        """Return the Plan that a JSON object describes.

        Raises:
            PlanError: If a field is unknown or of the wrong kind.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, Mapping):
            raise PlanError(f"plan must be a JSON object with the fields {', '.join(known)}")
        unknown = sorted(str(name) for name in fields if name not in known)
        if unknown:
            raise PlanError(f"plan has unknown fields {', '.join(unknown)}; the fields are {', '.join(known)}")
        for name in LISTS:
            value = fields.get(name)
            if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
                raise PlanError(f"plan: {name} must be a list of strings")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)


def _other_length(what: str, given: int, chunks: int) -> PlanError:
    return PlanError(
        f"plan has the {what} of {given} chunks, but this model has {chunks}; "
        f"give one per chunk, or use Plan.uniform({what}=...)"
    )
