"""Text as bytes: where it comes from, how it is split, and the batches drawn from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from protrain_compile.errors import OptionError

VALIDATION_SHARE = 0.1
"""Part of the text, at its end, that training never sees."""


class Batch(NamedTuple):
    """Byte windows and the same windows one byte later, both (batch, length)."""

    tokens: Tensor
    targets: Tensor


def load_text(path: Path | None) -> bytes:
    """Return the bytes of `path`, or of the documentation topics that come with Python.

    Raises:
        OptionError: If the file cannot be read, or this Python lacks the topics.
    """
    if path is None:
        return _python_topics()
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"argument --text: cannot read {path}: {error.strerror}; give a text file") from error


def _python_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some distributions strip the documentation
        raise OptionError("this Python comes without its documentation topics; give a text with --text FILE") from error
    return "\n\n".join(topics.values()).encode()


def split_text(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """Return the training and the validation part of `text` as byte tensors.

    Raises:
        OptionError: If either part is too short for one window of `length` bytes and its targets.
    """
    cut = len(text) - int(len(text) * VALIDATION_SHARE)
    shorter = min(cut, len(text) - cut)
    if shorter < length + 1:
        needed = math.ceil((length + 1) / VALIDATION_SHARE)
        raise OptionError(
            f"the text has {len(text)} bytes, but --seq {length} needs at least {needed}: "
            "give a longer --text or a smaller --seq"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def batches(data: Tensor, *, count: int, batch: int, length: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield `count` batches of random windows; the same `seed` yields the same batches on any device."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    for _ in range(count):
        starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
        windows = data[starts + offsets].long().to(device)
        yield Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
