"""Measurements of ranks between two reports, and metrics computed from them.

The first batch of a process, which compiles and allocates, is excluded from all times.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Phases of a batch. "stages": communication of a pipeline stage with other stages, including the wait for them.
PHASES = ("forward", "backward", "step", "stages")

# Values of `RankSample.clock`.
HOST_CLOCK = "host clock"
DEVICE_CLOCK = "device events"


@dataclasses.dataclass(frozen=True, slots=True)
class RankSample:
    """Measurements of one rank since the last report."""

    num_batches: int  # number of batches, without the first batch of the process
    seconds: float  # training time of these batches, without validations, checkpoints and reports
    data_wait_s: float | None  # part of ``seconds`` spent waiting for the training loader; None if unknown
    phase_s: Mapping[str, float]  # phase in PHASES -> average seconds per batch
    clock: str  # HOST_CLOCK or DEVICE_CLOCK, by which ``phase_s`` was measured
    num_tokens: int | None  # tokens in the micro batches that this rank has read; None if unknown
    replica: int  # index of the rank's data-parallel replica; ranks of one replica read the same records
    memory_bytes: Mapping[str, int]  # memory counter, or use of memory in the first batch -> bytes
    flops: tuple[float, float] | None = None  # FLOPs per batch on this rank: (total, recomputed in backward)
    flops_unknown: str | None = None  # why the FLOPs are unknown
    learning_rate: float | None = None  # learning rate of the first engine's first parameter group
    gradient_norm: float | None = None  # norm of the newest step's gradients, over all ranks
    memory_found_by: str | None = None  # how the uses of memory were measured; None if they were not

    def pack(self) -> str:
        """Return the sample as JSON text, for ``unpack`` on rank 0."""
        return json.dumps(
            dataclasses.asdict(self), default=float
        )  # `float` converts numbers of other libraries

    @classmethod
    def unpack(cls, packed: str) -> RankSample:
        fields = json.loads(packed)
        flops = fields.pop("flops")
        return cls(**fields, flops=None if flops is None else (flops[0], flops[1]))

    def times_ms(self) -> dict[str, float]:
        """Return average milliseconds per batch; {} if no batch was measured.

        Keys are ``batch_ms`` (the total), ``data_wait_ms`` if known, ``<phase>_ms`` and ``other_ms`` (the rest). The parts may
        sum to more than the total, because the host may wait for data while the device computes.
        """
        if not self.num_batches:
            return {}
        batch_s = self.seconds / self.num_batches
        parts = dict(self.phase_s)
        if self.data_wait_s is not None:
            parts = {"data_wait": self.data_wait_s / self.num_batches, **parts}
        parts["other"] = max(0.0, batch_s - sum(parts.values()))
        return {"batch_ms": 1e3 * batch_s} | {f"{name}_ms": 1e3 * value for name, value in parts.items()}


def report_metrics(
    samples: Sequence[RankSample], num_records: int, num_skipped: int, peak_flops_per_s: float | None
) -> dict[str, Any]:
    """Return the metrics of a telemetry report, over all ranks.

    Times are averaged over the ranks; of memory, the maximum is reported. Key ``ranks`` has a dict: metric of time or memory ->
    list with the values of all ranks.

    Args:
        samples: one sample per rank, in the order of the ranks.
        num_records: number of records, over all replicas, in the batches that the samples measure.
        num_skipped: number of optimizer steps skipped in the run so far.
        peak_flops_per_s: peak FLOP/s of one device; None if unknown.
    """
    times = [sample.times_ms() for sample in samples]
    metrics: dict[str, Any] = {}
    ranks: dict[str, list[float | int | None]] = {}
    for name in _names(times):
        ranks[name] = [found.get(name) for found in times]
        # The mean over all ranks; a phase that a rank does not have counts as 0.
        metrics[name] = statistics.fmean(found.get(name, 0.0) for found in times)
    for name in _names([sample.memory_bytes for sample in samples]):
        ranks[name] = [sample.memory_bytes.get(name) for sample in samples]
        metrics[name] = max(sample.memory_bytes.get(name, 0) for sample in samples)
    first = samples[0]
    if first.memory_found_by is not None:
        metrics["memory_found_by"] = first.memory_found_by
    if first.num_batches:
        metrics["timed_by"] = first.clock
        metrics["records_per_second"] = num_records / first.seconds
        num_tokens = tokens_of(samples)
        if num_tokens is not None:
            metrics["tokens_per_second"] = num_tokens / first.seconds
    metrics |= compute_rates(samples, peak_flops_per_s)
    metrics["skipped_steps"] = num_skipped
    for name, value in (("learning_rate", first.learning_rate), ("gradient_norm", first.gradient_norm)):
        if value is not None:
            metrics[name] = value
    metrics["ranks"] = ranks
    return metrics


def _names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for one in found for name in one))


def tokens_of(samples: Sequence[RankSample]) -> int | None:
    """Return how many tokens all replicas have read; None if unknown for a replica.

    If several ranks of a replica read the same records, these tokens count only once.
    """
    by_replica: dict[int, int | None] = {}
    for sample in samples:
        if sample.num_tokens is not None or sample.replica not in by_replica:
            by_replica[sample.replica] = (
                max(sample.num_tokens or 0, by_replica.get(sample.replica) or 0) or None
            )
    counted = [number for number in by_replica.values() if number is not None]
    return sum(counted) if len(counted) == len(by_replica) else None


def compute_rates(samples: Sequence[RankSample], peak_flops_per_s: float | None) -> dict[str, float]:
    """Return the FLOP rates of one device, averaged over all ranks.

    The result has the TFLOPS of the model (without recomputation) and of the hardware (with recomputation). If the peak is
    known, the result also has the fractions of the peak, MFU and HFU. Return {} if FLOPs are unknown for a rank.
    """
    counted = [sample.flops for sample in samples if sample.flops is not None]
    first = samples[0]
    if len(counted) < len(samples) or not first.num_batches or not sum(total for total, _ in counted):
        return {}
    per_device = first.num_batches / first.seconds / len(samples)
    hardware = sum(total for total, _ in counted) * per_device
    model = hardware - sum(recomputed for _, recomputed in counted) * per_device
    found = {"model_tflops_per_device": model / 1e12, "hardware_tflops_per_device": hardware / 1e12}
    if peak_flops_per_s is not None:
        found |= {"mfu": model / peak_flops_per_s, "hfu": hardware / peak_flops_per_s}
    return found


@dataclasses.dataclass(slots=True)
class RunTotals:
    """Sums over all samples of all ranks since the process start, and newest samples."""

    num_batches: int = 0
    seconds: float = 0.0
    num_records: int = 0
    num_tokens: int | None = 0  # None after a report without a number of tokens
    _part_s: list[dict[str, float]] = dataclasses.field(default_factory=list)  # by rank: phase -> seconds
    _newest: Sequence[RankSample] = ()

    def add(self, samples: Sequence[RankSample], num_records: int) -> None:
        first = samples[0]
        self._newest = samples
        self._part_s = self._part_s or [{} for _ in samples]
        if not first.num_batches:
            return
        self.num_batches += first.num_batches
        self.seconds += first.seconds
        self.num_records += num_records
        tokens = tokens_of(samples)
        self.num_tokens = None if tokens is None or self.num_tokens is None else self.num_tokens + tokens
        for parts, sample in zip(self._part_s, samples, strict=True):
            # A rank's time for "batch" may include its wait for rank 0, which writes reports.
            parts["batch"] = parts.get("batch", 0.0) + sample.seconds
            if sample.data_wait_s is not None:
                parts["data_wait"] = parts.get("data_wait", 0.0) + sample.data_wait_s
            for name, seconds in sample.phase_s.items():
                parts[name] = parts.get(name, 0.0) + seconds * sample.num_batches

    def to_json(self, peak_flops_per_s: float | None) -> dict[str, Any]:
        """Return the content of ``telemetry.json``, the input of ``summary_rows``."""
        document: dict[str, Any] = {"num_batches": self.num_batches, "seconds": self.seconds}
        if self.num_batches:
            document["clock"] = self._newest[0].clock
            document["records_per_second"] = self.num_records / self.seconds
            document["records_per_batch"] = self.num_records / self.num_batches
            if self.num_tokens is not None:
                document["tokens_per_second"] = self.num_tokens / self.seconds
            document["ranks"] = [
                {f"{name}_ms": 1e3 * value / self.num_batches for name, value in parts.items()}
                for parts in self._part_s
            ]
            whole = [
                dataclasses.replace(sample, num_batches=self.num_batches, seconds=self.seconds)
                for sample in self._newest
            ]
            document |= compute_rates(whole, peak_flops_per_s)
        document["memory_bytes"] = [dict(sample.memory_bytes) for sample in self._newest]
        found_by = next((one.memory_found_by for one in self._newest if one.memory_found_by), None)
        if found_by is not None:
            document["memory_found_by"] = found_by
        unknown = next((one.flops_unknown for one in self._newest if one.flops_unknown), None)
        if unknown is not None:
            document["flops_unknown"] = unknown
        if peak_flops_per_s is not None:
            document["peak_flops_per_s"] = peak_flops_per_s
        return document
