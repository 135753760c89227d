"""Types of command line arguments that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

LARGEST = 2**63 - 1  # what torch.Generator takes as a seed


def at_least(minimum: int) -> Callable[[str], int]:
    """Return the type of a whole number of at least ``minimum``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= LARGEST:
            raise argparse.ArgumentTypeError(
                f"{value} is too {'small' if value < minimum else 'large'}; use {minimum} or more"
            )
        return value

    return parse


def device(text: str) -> torch.device:
    """Return the device that ``text`` names: the CPU, or a CUDA device that there is."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not supported; use cpu, cuda or cuda:N")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise argparse.ArgumentTypeError("this machine has no CUDA device that PyTorch can use; use cpu")
        if found.index is not None and found.index >= count:
            raise argparse.ArgumentTypeError(f"{text!r}: the devices are cuda:0 to cuda:{count - 1}")
    return found
