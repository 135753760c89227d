"""UpdateBook: which update every parameter gets. Links a user's param groups to chunks and counts steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from protrain_compile.chunks import Chunk
from protrain_compile.errors import OptionError
from protrain_compile.runtime.chunk_store import MOMENTS, ChunkStore
from protrain_compile.updates.definition import Segment, UpdateKind, UpdateRule, rule_of_group
from protrain_compile.updates.formats import StateFormat

STATE_NAMES = {
    "adam": {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max"},
    "sgd": {"momentum_buffer": "moment1"},
}
"""What ``torch.optim`` calls the moments, by kind of optimizer."""

MASTER_NAME = "protrain_master"
"""Entry of an optimizer's state dict with the fp32 master of a 16-bit parameter, for an exact resume."""


class UpdateBook:
    """Knows each parameter's param group and step count.

    Args:
        optimizer: The user's optimizer, not managed yet. Edits of its ``param_groups`` are seen; it is held weakly,
            since its parameters lead back here.
        group_of: For every managed parameter, the number of its param group; None for a frozen one.
        dtypes: For every managed parameter, the data type that the user sees.
    """

    def __init__(self, optimizer: Optimizer, group_of: Sequence[int | None], dtypes: Sequence[torch.dtype]) -> None:
        self._type = type(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self.group_of = tuple(group_of)
        self._dtypes = tuple(dtypes)
        self.steps = [0] * len(group_of)
        self._given: dict[int, Mapping[str, Any]] = {}
        self._first: tuple[UpdateRule, ...] = ()
        self._first = self._current = self.rules()

    @property
    def optimizer(self) -> Optimizer | None:
        """The user's optimizer; None if it is gone."""
        return self._optimizer()

    @property
    def names(self) -> Mapping[str, str]:
        """Moment by the name that ``torch.optim`` has for it."""
        return STATE_NAMES["sgd" if issubclass(self._type, torch.optim.SGD) else "adam"]

    def rules(self) -> tuple[UpdateRule, ...]:
        """Return the rule of every param group, as of now; updates use it from then on.

        Raises:
            OptionError: If a group has an option that cannot be carried out, or that needs states that it did not need.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return self._current
        self._current = tuple(rule_of_group(self._type, group) for group in optimizer.param_groups)
        for number, (now, first) in enumerate(zip(self._current, self._first, strict=False)):
            if _moments(now.kind) - _moments(first.kind):
                raise OptionError(
                    f"optimizer: param group {number} was switched to momentum or amsgrad after prepare, which laid "
                    "out states without: set it before prepare"
                )
        return self._current

    def kind_of_chunk(self, chunk: Chunk) -> UpdateKind | None:
        """Return the update that needs most moments among a chunk's parameters; None for a frozen chunk."""
        groups = [self.group_of[slot.parameter] for slot in chunk.slots]
        kinds = [self._current[group].kind for group in groups if group is not None]
        return max(kinds, key=_count_moments) if kinds else None

    def state_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a chunk's states and gradients beside its parameters."""
        kind = self.kind_of_chunk(chunk)
        if kind is None:
            return 0
        companion = StateFormat.of(chunk.dtype).companion_dtype
        per_element = 4 * _count_moments(kind) + (companion.itemsize if companion is not None else 0)
        return chunk.numel * (per_element + chunk.dtype.itemsize)

    def segments(self, chunk: Chunk, slots: Sequence[int], multiplier: float) -> list[Segment]:
        """Count a step of each slot's parameter; return the segments of the chunk's update.

        Neighbours with the same scalars share a segment; the padding between them is updated too (it is zero).
        """
        found: list[Segment] = []
        last = -2
        for number in slots:
            slot = chunk.slots[number]
            group = self.group_of[slot.parameter]
            assert group is not None
            self.steps[slot.parameter] += 1
            scalars = self._current[group].scalars(self.steps[slot.parameter], multiplier)
            end = slot.offset + slot.numel
            if number == last + 1 and found[-1].scalars == scalars:
                found[-1] = Segment(found[-1].begin, end, scalars)
            else:
                found.append(Segment(slot.offset, end, scalars))
            last = number
        return found

    # ---- states in and out -------------------------------------------------------------------------------------

    def give(self, parameter: int, state: Mapping[str, Any], store: ChunkStore | None) -> None:
        """Take over one parameter's optimizer state (``exp_avg``, ``step``, ...); kept aside until there is a store."""
        if "step" in state:
            self.steps[parameter] = int(state["step"])
        elif any(isinstance(value, torch.Tensor) for value in state.values()):
            self.steps[parameter] = max(1, self.steps[parameter])  # the first step of SGD's momentum is behind
        if store is None:
            self._given[parameter] = dict(state)
            return
        for name, moment in self.names.items():
            value = state.get(name)
            if isinstance(value, torch.Tensor):
                store.write_moment(parameter, moment, value)
        master = state.get(MASTER_NAME)
        if isinstance(master, torch.Tensor) and store.has_companion(parameter):
            store.write(parameter, master)

    def given(self, parameter: int) -> Mapping[str, Any]:
        """Return the state of one parameter that was given, or loaded, before there was a store; empty if none was."""
        return self._given.get(parameter, {})

    def reset(self, parameter: int, store: ChunkStore | None) -> None:
        """Forget one parameter's optimizer state, as if it had never been updated."""
        self.steps[parameter] = 0
        self._given.pop(parameter, None)
        if store is not None:
            for name in MOMENTS:
                store.write_moment(parameter, name, None)

    def install(self, store: ChunkStore) -> None:
        """Write the states that were given before there was a store; parameters keep their values."""
        for parameter, given in self._given.items():
            state = dict(given)
            master = state.pop(MASTER_NAME, None)
            self.give(parameter, state, store)
            if isinstance(master, torch.Tensor) and store.has_companion(parameter):
                store.refine(parameter, master)
        self._given.clear()

    def has_state(self, parameter: int) -> bool:
        """Whether ``torch.optim`` would have a state for a parameter: it was updated, by more than plain SGD."""
        group = self.group_of[parameter]
        return group is not None and self.steps[parameter] > 0 and bool(_moments(self._current[group].kind))

    def take(self, parameter: int, store: ChunkStore | None) -> dict[str, Any]:
        """Return one parameter's optimizer state as ``torch.optim`` has it: fresh tensors on the host."""
        if not self.has_state(parameter):
            return {}
        if store is None:
            given = self.given(parameter)
            return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        state: dict[str, Any] = {}
        group = self.group_of[parameter]
        assert group is not None
        kept = _moments(self._current[group].kind)
        if not issubclass(self._type, torch.optim.SGD):
            state["step"] = torch.tensor(float(self.steps[parameter]), dtype=torch.float32)
        for name, moment in self.names.items():
            value = store.read_moment(parameter, moment) if moment in kept else None
            if value is not None:
                state[name] = value
        if self._dtypes[parameter] != torch.float32:
            state[MASTER_NAME] = store.read(parameter, torch.float32).cpu()
        return state


def _moments(kind: UpdateKind) -> frozenset[str]:
    return frozenset(name for name in MOMENTS if getattr(kind, f"has_{name}"))


def _count_moments(kind: UpdateKind) -> int:
    return len(_moments(kind))
