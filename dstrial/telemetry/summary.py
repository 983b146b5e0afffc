"""Format the telemetry summary that is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.telemetry.samples import DEVICE_CLOCK

# Metric of the telemetry -> its name in the summary.
_WORDS = {
    "data_wait_ms": "data wait",
    "forward_ms": "forward",
    "backward_ms": "backward",
    "step_ms": "step",
    "stages_ms": "other stages",
}

# Memory counter, and its name in the summary.
_MEMORY = (
    ("device_peak_memory_bytes", "device, peak"),
    ("device_reserved_memory_bytes", "reserved"),
    ("process_peak_memory_bytes", "process, peak"),
)
_SMALLEST_SHARE = 0.005  # a smaller fraction of the time is not shown as "other"

# Counter -> column of the memory table. Each is a maximum, ``peak`` that of all tensors on the device; their times may differ.
_COLUMNS = {
    **{f"{part}_bytes": part for part in ("parameters", "gradients", "optimizer", "activations", "buffers")},
    "tensors_peak_bytes": "peak",
}

_MIB = 2**20


def summary_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the summary as (name, text).

    ``document`` is the result of ``RunTotals.to_json``. Return [] if no batch was measured, because the run had one batch.
    """
    if not document.get("num_batches"):
        return []
    batch_ms = 1e3 * float(document["seconds"]) / float(document["num_batches"])
    ranks: Sequence[Mapping[str, float]] = document["ranks"]
    rows = [("speed", _speed(document, batch_ms)), ("step time", _parts(document, ranks))]
    rows.append(_compute(document))
    if memory := _memory(document["memory_bytes"]):
        rows.append(("memory", memory))
    return rows + memory_rows(document["memory_bytes"])


def _speed(document: Mapping[str, Any], batch_ms: float) -> str:
    rates = [f"{_count(document['records_per_second'])} records/s"]
    if "tokens_per_second" in document:
        rates.append(f"{_count(document['tokens_per_second'])} tokens/s")
    size = _count(document["records_per_batch"])
    return f"{', '.join(rates)}; {batch_ms:.3g} ms per batch of {size} records (without the first batch)"


def _parts(document: Mapping[str, Any], ranks: Sequence[Mapping[str, float]]) -> str:
    whole_ms = sum(parts["batch_ms"] for parts in ranks)
    shares = {
        word: sum(parts.get(name, 0.0) for parts in ranks) / whole_ms
        for name, word in _WORDS.items()
        if any(name in parts for parts in ranks)
    }
    clock = str(document["clock"])
    if clock == DEVICE_CLOCK:
        clock += "; data wait by host clock, may overlap with the device's work"
    rest = 1.0 - sum(shares.values())
    texts = [f"{word} {100 * share:.0f} %" for word, share in shares.items()]
    if rest > _SMALLEST_SHARE:
        texts.append(f"other {100 * rest:.0f} %")
    return f"{', '.join(texts)} (by {clock})"


def _compute(document: Mapping[str, Any]) -> tuple[str, str]:
    model = document.get("model_tflops_per_device")
    if model is None:
        return "compute", f"FLOPs unknown: {document.get('flops_unknown') or 'not counted'}"
    text = f"{_flops(model)} per device, FLOPs counted in the first batch"
    if "mfu" in document:
        peak = _flops(document["peak_flops_per_s"] / 1e12)
        text += f"; MFU {_percent(document['mfu'])} of {peak} (data sheet)"
    hardware = document["hardware_tflops_per_device"]
    return "compute", text + (f"; {_flops(hardware)} with recomputation" if hardware > 1.0001 * model else "")


def _memory(ranks: Sequence[Mapping[str, int]]) -> str:
    texts = []
    for name, words in _MEMORY:
        held = {rank: counters[name] for rank, counters in enumerate(ranks) if name in counters}
        if not held:
            continue
        most = max(held, key=lambda rank: held[rank])
        text = f"{words} {_bytes(held[most])}"
        if len(held) > 1:
            text += f" (rank {most}; least {_bytes(min(held.values()))})"
        texts.append(text)
    return "; ".join(texts)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _flops(tflops: float) -> str:
    for unit, factor in (("TFLOPS", 1.0), ("GFLOPS", 1e3)):
        if tflops * factor >= 0.1:
            return f"{tflops * factor:.3g} {unit}"
    return f"{tflops * 1e6:.3g} MFLOPS"


def _bytes(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def memory_rows(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows of the memory table as (name, text); [] without measured memory.

    ``ranks`` has ``RankSample.memory_bytes`` of each rank. The table shows the first rank whose memory by use was measured, and
    the rank with the highest peak.
    """
    measured = {rank: one for rank, one in enumerate(ranks) if one.get("parameters_bytes") is not None}
    if not measured:
        return []
    worst = max(measured, key=lambda rank: measured[rank].get("tensors_peak_bytes", 0))
    chosen = sorted({min(measured), worst})
    columns = [key for key in _COLUMNS if any(key in measured[rank] for rank in chosen)]
    rows = [("tensors, MiB", [_COLUMNS[key] for key in columns])]
    for rank in chosen:
        name = f"  rank {rank}" + (", most" if rank == worst and len(measured) > 1 else "")
        rows.append((name, [_cell(measured[rank].get(key)) for key in columns]))
    widths = [max(len(cells[idx]) for _, cells in rows) for idx in range(len(columns))]
    return [
        (name, "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        for name, cells in rows
    ]


def _cell(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "?"
    mib = num_bytes / _MIB
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"
