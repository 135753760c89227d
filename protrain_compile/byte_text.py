"""Bytes as people write them: "20GiB", and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from protrain_compile.errors import OptionError

_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_size(value: int | str, argument: str) -> int:
    """Return the bytes that ``value`` stands for: an int, or text such as "20GiB", "512 MB" or "1.5TiB".

    Args:
        value: What the user passed.
        argument: The argument's name, for the message.

    Raises:
        OptionError: If it is not a positive size; the message names the argument and the units.
    """
    size = _size_of_text(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise OptionError(
            f"{argument}={value!r}: give a positive number of bytes, or text such as '20GiB' ({', '.join(_UNITS)})"
        )
    return size


def _size_of_text(text: str) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if not match:
        return None
    units = {name.lower(): factor for name, factor in _UNITS.items()} | {"": 1}
    factor = units.get(match[2].lower())
    return None if factor is None else int(float(match[1]) * factor)


def format_size(size_bytes: int) -> str:
    """Return bytes as people read them: "20.00 GiB", "512.0 MiB", "1.5 KiB"."""
    return _text(size_bytes, round)


def format_needed(size_bytes: int) -> str:
    """Return bytes that are needed, rounded up: what the text says, passed as a budget, is enough."""
    return _text(size_bytes, math.ceil)


def _text(size_bytes: int, whole: Callable[[float], int]) -> str:
    for unit, digits in (("GiB", 2), ("MiB", 1), ("KiB", 1)):
        if size_bytes >= _UNITS[unit]:
            return f"{whole(size_bytes / _UNITS[unit] * 10**digits) / 10**digits:.{digits}f} {unit}"
    return f"{size_bytes} B"
