"""A short table of where memory went; pure.

It is measured by rank, and predicted where a dry run has said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")
"""Columns; ``peak`` is that of tensors on the device, in which the parts need not be at their largest all at once."""

_MIB = 2**20
_NOTABLE_BYTES = 100 * _MIB

# DeepSpeed's usual bucket is of 500 million numbers, however small the model.
_BUFFERS = (
    "  buffers",
    "mostly DeepSpeed's for messages: as large as zero_optimization.reduce_bucket_size says, used or not",
)
_KEY_OF = {**{part: f"{part}_bytes" for part in PARTS}, "peak": "tensors_peak_bytes"}


def parts_of(counters: Mapping[str, Any]) -> dict[str, float]:
    """Return bytes by part of what a rank has told.

    Empty where it has not measured them.
    """
    found = {part: counters.get(key) for part, key in _KEY_OF.items()}
    if found["parameters"] is None:
        return {}
    return {part: float(value) for part, value in found.items() if value is not None}


def stage_of(rank: int, num_ranks: int, predicted: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return what was predicted for a rank: that of its stage, or of all ranks alike."""
    return predicted[rank * len(predicted) // num_ranks]


def memory_rows(
    ranks: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, float]] = (),
    *,
    shows_all: bool = False,
) -> list[tuple[str, str]]:
    """Return name and text of each line; none where nothing was measured.

    Args:
        ranks: counters by rank, as samples have them.
        predicted: bytes by part of each stage, of one stage without a pipeline; empty where nothing was predicted.
        shows_all: whether every rank is shown, and not just rank 0 and the one that has most.
    """
    measured = {rank: found for rank, one in enumerate(ranks) if (found := parts_of(one))}
    if not measured:
        return []
    worst = max(measured, key=lambda rank: _weight(measured[rank]))
    chosen = list(measured) if shows_all else sorted({min(measured), worst})
    columns = [part for part in PARTS if any(part in measured[rank] for rank in chosen)]
    rows: list[tuple[str, list[str]]] = [("memory, MiB", columns)]
    for rank in chosen:
        name = f"  rank {rank}" + (", most" if rank == worst and len(measured) > 1 else "")
        rows.append((name, [_cell(measured[rank].get(part)) for part in columns]))
        if predicted:
            said = stage_of(rank, len(ranks), predicted)
            rows.append(("    predicted", [_cell(said.get(part)) for part in columns]))
    shown = [measured[rank] for rank in chosen]
    widths = [max(len(cells[idx]) for _, cells in rows) for idx in range(len(columns))]
    table = [
        (name, "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        for name, cells in rows
    ]
    return [*table, _BUFFERS] if any(map(_is_mostly_buffers, shown)) else table


def _is_mostly_buffers(parts: Mapping[str, float]) -> bool:
    others = sum(size for part, size in parts.items() if part not in ("buffers", "peak"))
    return parts.get("buffers", 0.0) > max(others, _NOTABLE_BYTES)


def _weight(parts: Mapping[str, float]) -> float:
    return parts.get("peak") or sum(parts.values())


def _cell(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "?"
    mib = num_bytes / _MIB
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"
