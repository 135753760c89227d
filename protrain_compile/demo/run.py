"""The demo from start to end: text, model, training, evaluation, sample, check."""

from __future__ import annotations

import copy
import dataclasses
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from protrain_compile.demo.data import Batch, batches, load_text, split_text
from protrain_compile.demo.generate import generate
from protrain_compile.demo.model import GPT, VOCABULARY
from protrain_compile.demo.settings import Settings, missing_compiler
from protrain_compile.demo.train import LossFunction, Trainer, evaluate, largest_difference
from protrain_compile.demo.world import WHOLE, World, joined

BACKEND = "protrain"
VALIDATION_BATCHES = 20

FIRST_STEPS = 10

TOLERANCES = {torch.float32: (1e-4, 0.05), torch.bfloat16: (0.02, 0.1)}
"""Largest relative differences from eager that `--check` accepts, in the first steps and in all.

Both trainings are the same computation, rounded in another order. Rounding alone is below 1e-6 at first (float32);
every step amplifies it, so that late losses differ by per cents even from those of a float64 copy.
"""


def run(settings: Settings) -> int:
    """Run the demo and return its exit status: 1 if `--check` found another loss curve than eager's."""
    with joined(settings.batch) as world:
        if world.size > 1 and settings.device == torch.device("cuda"):
            settings = dataclasses.replace(settings, device=torch.device("cuda", torch.cuda.current_device()))
        return _run(settings, world)


def _run(settings: Settings, world: World) -> int:
    training, validation = split_text(load_text(settings.text), settings.seq)
    settings = _with_usable_compiler(settings)
    torch.manual_seed(settings.seed)
    model = GPT(blocks=settings.blocks, width=settings.width, heads=settings.heads, max_length=settings.seq)
    model.to(settings.device)
    eager = copy.deepcopy(model) if settings.check else None
    _describe(settings, model, training, validation)

    compiled = _compile(model, settings)
    trainer = _train(model, compiled, training, settings, label="training", world=world)
    _report_training(trainer, settings)
    _report_validation(model, compiled, validation, settings)
    _report_sample(model if world.size == 1 else copy.deepcopy(model), settings)  # a copy has its parameters whole
    if eager is None or not world.is_first:
        return 0
    reference = _train(eager, eager, training, settings, label="eager")
    return _report_check(trainer, reference, settings)


def _with_usable_compiler(settings: Settings) -> Settings:
    if settings.compile == "eager":
        return settings
    missing = missing_compiler(settings.device)
    if missing is None:
        return settings
    print(f"note: --compile inductor needs a {missing}; continuing with --compile eager, which is slower")
    return dataclasses.replace(settings, compile="eager")


def _describe(settings: Settings, model: GPT, training: Tensor, validation: Tensor) -> None:
    source = settings.text or "Python's documentation topics"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"text      {source}: {len(training):,} bytes to train on, {len(validation):,} to validate on")
    print(
        f"model     {settings.blocks} blocks of width {settings.width}, {settings.heads} heads, "
        f"{parameters / 1e6:.2f} M parameters"
    )
    print(
        f"training  {settings.steps} steps of {settings.batch} x {settings.seq} bytes on {settings.device}, "
        f"{str(settings.dtype).removeprefix('torch.')}"
    )


def _compile(model: GPT, settings: Settings) -> LossFunction:
    options: dict[str, Any] = {"schedule": settings.schedule, "compile": settings.compile}
    if settings.memory_budget is None:
        options["plan"] = settings.plan.to_json()
    else:
        options["memory_budget"] = settings.memory_budget
    return torch.compile(model, backend=BACKEND, options=options)


def _train(
    model: GPT, loss_of: LossFunction, data: Tensor, settings: Settings, *, label: str, world: World = WHOLE
) -> Trainer:
    trainer = Trainer(
        model, loss_of, device=settings.device, dtype=settings.dtype, steps=settings.steps, lr=settings.lr, world=world
    )
    trainer.run(_batches(data, settings, count=settings.steps), label=label)
    return trainer


def _batches(data: Tensor, settings: Settings, *, count: int) -> Iterator[Batch]:
    return batches(
        data,
        count=count,
        batch=settings.batch,
        length=settings.seq,
        seed=settings.seed,
        device=settings.device,
    )


def _report_training(trainer: Trainer, settings: Settings) -> None:
    tokens = (len(trainer.losses) - 1) * settings.batch * settings.seq
    speed = f", {tokens / trainer.seconds:,.0f} tokens/s" if tokens else ""
    print(f"training loss {trainer.losses[0]:.3f} -> {trainer.losses[-1]:.3f}{speed}")
    if settings.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(settings.device)
        print(f"peak memory {peak / 2**20:,.0f} MiB")


def _report_validation(model: GPT, compiled: LossFunction, data: Tensor, settings: Settings) -> None:
    held_out = _batches(data, settings, count=VALIDATION_BATCHES)
    loss = evaluate(model, compiled, held_out, dtype=settings.dtype)
    print(f"validation loss {loss:.3f} nats a byte (guessing: {math.log(VOCABULARY):.3f})")


def _report_sample(model: GPT, settings: Settings) -> None:
    if settings.sample == 0:
        return
    text = generate(model, settings.prompt, count=settings.sample, seed=settings.seed).decode(errors="replace")
    printable = "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    print("sample", textwrap.indent(printable, "  | ", lambda _: True), sep="\n")


def _report_check(trainer: Trainer, reference: Trainer, settings: Settings) -> int:
    early = largest_difference(trainer.losses[:FIRST_STEPS], reference.losses[:FIRST_STEPS])
    overall = largest_difference(trainer.losses, reference.losses)
    early_tolerance, tolerance = TOLERANCES[settings.dtype]
    passed = early <= early_tolerance and overall <= tolerance
    print(
        f"check {'passed' if passed else 'FAILED'}: the loss differs from eager's by at most {early:.1e} "
        f"(tolerance {early_tolerance:.0e}) in the first {min(FIRST_STEPS, settings.steps)} steps, "
        f"{overall:.1e} ({tolerance:.0e}) in all {settings.steps}"
    )
    return 0 if passed else 1
