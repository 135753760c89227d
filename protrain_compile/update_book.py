"""UpdateBook: which update every parameter gets. Links a user's param groups to chunks and counts steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from protrain_compile.chunks import Chunk
from protrain_compile.runtime.chunk_store import ChunkStore
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
        optimizer_type: The user's optimizer class.
        param_groups: The optimizer's live list of param groups: edits are seen.
        group_of: For every managed parameter, the number of its param group; None for a frozen one.
    """

    def __init__(
        self, optimizer_type: type, param_groups: list[dict[str, Any]], group_of: Sequence[int | None]
    ) -> None:
        self._type = optimizer_type
        self._groups = param_groups
        self.group_of = tuple(group_of)
        self.steps = [0] * len(group_of)
        self._given: dict[int, Mapping[str, Any]] = {}
        self._current: tuple[UpdateRule, ...] = self.rules()

    @property
    def names(self) -> Mapping[str, str]:
        """Moment by the name that ``torch.optim`` has for it."""
        return STATE_NAMES["sgd" if issubclass(self._type, torch.optim.SGD) else "adam"]

    def rules(self) -> tuple[UpdateRule, ...]:
        """Return the rule of every param group, as of now; updates use it from then on.

        Raises:
            OptionError: If a group has an option that cannot be carried out.
        """
        self._current = tuple(rule_of_group(self._type, group) for group in self._groups)
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
        elif state:
            self.steps[parameter] = max(1, self.steps[parameter])
        if store is None:
            self._given[parameter] = dict(state)
            return
        for name, moment in self.names.items():
            target = store.moment(parameter, moment)
            value = state.get(name)
            if target is not None and isinstance(value, torch.Tensor):
                target.copy_(value)
        master = state.get(MASTER_NAME)
        if isinstance(master, torch.Tensor):
            store.write(parameter, master)

    def install(self, store: ChunkStore) -> None:
        """Write the states that were given before there was a store."""
        for parameter, state in self._given.items():
            self.give(parameter, state, store)
        self._given.clear()

    def take(self, parameter: int, store: ChunkStore | None) -> dict[str, Any]:
        """Return one parameter's optimizer state as ``torch.optim`` has it: fresh tensors on the host."""
        if self.steps[parameter] == 0:
            return {}
        if store is None:
            return dict(self._given.get(parameter, {}))
        state: dict[str, Any] = {}
        if not issubclass(self._type, torch.optim.SGD):
            state["step"] = torch.tensor(float(self.steps[parameter]), dtype=torch.float32)
        for name, moment in self.names.items():
            view = store.moment(parameter, moment)
            if view is not None:
                state[name] = view.cpu().clone()
        chunk, _ = store.slot_range(parameter)
        if chunk in store.states and store.states[chunk].companion is not None:
            state[MASTER_NAME] = store.read(parameter, torch.float32).cpu()
        return state


def _count_moments(kind: UpdateKind) -> int:
    return sum((kind.has_moment1, kind.has_moment2, kind.has_moment2_max))
