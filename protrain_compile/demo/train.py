"""The training loop: an ordinary one, with nothing of protrain in it but the model it is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from tqdm import tqdm

import protrain_compile
from protrain_compile.demo.data import Batch
from protrain_compile.demo.world import WHOLE, World
from protrain_compile.errors import ProtrainError

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""The model, compiled or not: the loss of (tokens, targets)."""

WARMUP_STEPS = 60
FINAL_RATE = 0.1  # the last step's learning rate, as a part of the peak
MAX_GRAD_NORM = 1.0


class DivergedError(ProtrainError):
    """The loss stopped being a number."""


class Trainer:
    """One model in training.

    Attributes:
        losses: The loss of every step so far.
        seconds: Time of all steps but the first, which holds the compilation.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossFunction,
        *,
        device: torch.device,
        dtype: torch.dtype,
        steps: int,
        lr: float,
        world: World = WHOLE,
    ) -> None:
        self.losses: list[float] = []
        self.seconds = 0.0
        self._model = model
        self._loss_of = loss_of
        self._autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self._steps = steps
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        self._world = world
        if world.size > 1:
            protrain_compile.prepare(model, self._optimizer, max_grad_norm=MAX_GRAD_NORM, device=device)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)

    def run(self, batches: Iterable[Batch], *, label: str) -> None:
        """Train on `batches`, the first of which compiles; shows progress on standard error."""
        remaining = iter(batches)
        tokens = self._step(next(remaining))
        start = time.perf_counter()
        total, silent = self._steps * tokens, not self._world.is_first
        with tqdm(total=total, initial=tokens, desc=label, unit="tok", unit_scale=True, disable=silent) as bar:
            for batch in remaining:
                bar.update(self._step(batch))
                bar.set_postfix_str(f"step {len(self.losses)}/{self._steps}, loss {self.losses[-1]:.3f}", refresh=False)
        self.seconds = time.perf_counter() - start

    def _step(self, batch: Batch) -> int:
        with self._autocast:
            loss = self._loss_of(*self._world.part(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._world.size == 1:  # else prepare was told
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self._record(self._world.mean(loss.item()))
        return batch.tokens.numel()

    def _record(self, loss: float) -> None:
        self.losses.append(loss)
        if not math.isfinite(loss):
            raise DivergedError(f"the loss became {loss} at step {len(self.losses)}; try a smaller --lr")

    def _rate(self, step: int) -> float:
        """Part of the peak rate at `step`: a linear rise, then a cosine down."""
        warmup = min(WARMUP_STEPS, self._steps // 5 + 1)
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, self._steps - warmup)
        return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: nn.Module, loss_of: LossFunction, batches: Iterable[Batch], *, dtype: torch.dtype) -> float:
    """Return the mean loss over `batches`, with `model` in evaluation mode meanwhile."""
    was_training = model.training
    model.eval()
    losses = []
    for batch in batches:
        with torch.autocast(batch.tokens.device.type, dtype, enabled=dtype != torch.float32):
            losses.append(loss_of(*batch).item())
    model.train(was_training)
    return sum(losses) / len(losses)


def largest_difference(losses: Iterable[float], reference: Iterable[float]) -> float:
    """Return the largest relative difference between two loss curves of one length."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True))
