"""UpdateGuard: when the updates of a backward run, and what eager would do differently then.

It decides, for each backward, whether chunks may be updated as their gradients complete (``in_backward``) and checks at
every door that this was right. The window is the time between two ``step()`` calls::

    forward    refused after an update that step() has not confirmed: eager would still use the old weights
    backward   in_backward only if: no clipping declared; not the first step; no gradient was ever read before step();
               no fp16; no other forward waits for its backward; graph not retained; the last declared micro-batch
    step       in_backward: the hyper-parameters must be those that were used; at_step: runs the updates
    zero_grad  refused after such an update: eager would forget gradients that have been used
"""

from __future__ import annotations

import warnings
from typing import Any

from protrain_compile.errors import DoorError
from protrain_compile.residency import UpdateMode


class UpdateGuard:
    """Decides when updates run, and refuses what eager would do differently (see the module docstring).

    Args:
        clips: Whether clipping was declared (``max_grad_norm``).
        micro_batches: The declared ``gradient_accumulation_steps``.
        half: Whether fp16 parameters are trained: a loss scale may skip the step.
    """

    def __init__(self, *, clips: bool, micro_batches: int, half: bool) -> None:
        self._waits = clips or half
        self._micro_batches = micro_batches
        self._steps = 0
        self._window = 0
        self._reads_gradients = False
        self._used_rules: Any = None
        self._broken_off: float | None = None

    @property
    def ahead(self) -> bool:
        """Whether chunks were updated since the last ``step()``."""
        return self._used_rules is not None

    @property
    def gradients_were_read(self) -> bool:
        """Whether a waiting gradient was read (and perhaps changed) by the user."""
        return self._reads_gradients

    @property
    def expects_more(self) -> bool:
        """Whether more of the declared micro-batches follow before ``step()``."""
        return self._window < self._micro_batches

    def before_forward(self) -> None:
        """Check that a forward may run.

        Raises:
            DoorError: If the weights are newer than eager's would be.
        """
        if self._broken_off is not None:
            warnings.warn(
                f"the last backward raised after {self._broken_off:.0%} of the trainable chunks had been updated; "
                "training goes on from these weights (load a checkpoint if that matters)",
                RuntimeWarning,
                stacklevel=2,
            )
            self._broken_off = None
            self._finish(stepped=True)
        if self.ahead:
            raise DoorError(
                "a forward between a backward that updated the weights and optimizer.step(): call step() first, or "
                "pass gradient_accumulation_steps (the most backwards before a step) or max_grad_norm (math.inf for "
                "no clipping) to prepare, so that updates wait for step()"
            )

    def mode_of_backward(self, *, alone: bool, waiting: bool, rules: Any) -> UpdateMode:
        """Return when the chunks of the backward that begins now are updated.

        Args:
            alone: Whether no other forward waits for its backward and the graph is not retained.
            waiting: Whether gradients of an earlier backward wait for ``step()``.
            rules: The update rules as of now; ``step()`` must find them unchanged.

        Raises:
            DoorError: If this backward follows one that updated the weights.
        """
        if self.ahead:
            raise DoorError(
                "a second backward before optimizer.step(), after one that updated the weights: pass "
                "gradient_accumulation_steps to prepare, or run all forwards before the first backward"
            )
        self._window += alone
        last = alone and self._window == self._micro_batches and (self._micro_batches > 1 or not waiting)
        if self._waits or self._reads_gradients or self._steps == 0 or not last:
            return "at_step"
        self._used_rules = rules
        return "in_backward"

    def broke_off(self, fraction: float) -> None:
        """Note that a backward raised after ``fraction`` of the trainable chunks were updated."""
        if self.ahead:
            self._broken_off = fraction

    def gradient_read(self, name: str) -> None:
        """Note that a waiting gradient is read before ``step()``; from then on updates wait for it.

        Raises:
            DoorError: If the gradient was used up in the backward.
        """
        if self.ahead:
            raise DoorError(
                f"{name}.grad was read after a backward that used the gradients up to update the weights: pass "
                "max_grad_norm to prepare (math.inf to read or change gradients without clipping), so that updates "
                "wait for step()"
            )
        self._reads_gradients = True

    def before_step(self, rules: Any, *, waiting: bool) -> None:
        """Note that ``step()`` is called; it runs the updates that wait.

        Args:
            rules: The update rules as of now.
            waiting: Whether gradients wait.

        Raises:
            DoorError: If hyper-parameters were changed since the backward that used them.
        """
        if self.ahead and rules != self._used_rules:
            raise DoorError(
                "a hyper-parameter of the optimizer (lr, betas, weight_decay, ...) was changed between the backward "
                "that updated the weights with the old one and step(): change it before the backward or after "
                "step(), or pass max_grad_norm (math.inf for no clipping) to prepare, so that updates wait for "
                "step()"
            )
        self._finish(stepped=waiting or self.ahead)

    def before_zero_grad(self) -> None:
        """Check that gradients may be dropped.

        Raises:
            DoorError: If they have been used to update the weights and ``step()`` was not called.
        """
        if self.ahead and self._broken_off is None:
            raise DoorError(
                "zero_grad() between a backward that updated the weights and step(): eager would skip this step; "
                "call step() first, or pass max_grad_norm (math.inf for no clipping) to prepare, so that updates "
                "wait for step()"
            )
        self._window = 0

    def _finish(self, *, stepped: bool) -> None:
        self._steps += stepped
        self._window = 0
        self._used_rules = None
