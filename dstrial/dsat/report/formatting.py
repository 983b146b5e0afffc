"""Format numbers for people: amounts, times and percentages."""

from __future__ import annotations

from collections.abc import Mapping

_RATES = {
    "end_to_end_throughput": "end to end (all steps, with the data loader)",
    "throughput": "by the median step",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def amount(value: float) -> str:
    """Return a number with four digits, and an SI prefix if large: ``1.234 G``."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / (1e3 if prefix == 'k' else size):.4g} {prefix}"
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """Return a time in s, ms or µs, with three digits."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def share(value: float, *, signed: bool = False) -> str:
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def format_duration(seconds: float) -> str:
    """Format seconds as ``1h05m``, ``3m20s`` or ``12s``."""
    whole = max(round(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"


def rates(metrics: Mapping[str, float]) -> str:
    """Return a text with the measured throughputs; empty if none was measured."""
    return ", ".join(
        f"{amount(metrics[name])} {meaning}" for name, meaning in _RATES.items() if metrics.get(name)
    )
