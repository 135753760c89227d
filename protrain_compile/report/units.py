"""Numbers as reports show them: three figures and a unit."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """Return ``size`` in bytes with a binary unit, three figures."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{_figures(value, whole=unit == 'B')} {unit}"


def format_ms(ms: float) -> str:
    """Return a time in ms, or in s from one second on, three figures."""
    return f"{_figures(ms / 1000)} s" if ms >= 1000 else f"{_figures(ms)} ms"


def _figures(value: float, *, whole: bool = False) -> str:
    digits = 0 if whole or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"
