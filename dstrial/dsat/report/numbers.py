"""Numbers as people read them. Pure."""

from __future__ import annotations

from typing import Any

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def amount(value: float) -> str:
    """Return four digits, with a prefix for large numbers."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / (1e3 if prefix == 'k' else size):.4g} {prefix}"
    return f"{value:.4g}"


def gibibytes(value: float) -> str:
    """Return bytes in GiB, or in MiB below one."""
    return f"{value / 2**30:.3g} GiB" if abs(value) >= 2**30 else f"{value / 2**20:.3g} MiB"


def seconds(value: float) -> str:
    """Return seconds, milliseconds or microseconds."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def share(value: float, *, signed: bool = False) -> str:
    """Return a percentage."""
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def setting(value: Any) -> str:
    """Return the value of a knob."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (int, float)) and abs(value) >= 10_000:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)


def knob(path: str) -> str:
    """Return a dotted path without the section that all have."""
    return path.removeprefix("zero_optimization.")
