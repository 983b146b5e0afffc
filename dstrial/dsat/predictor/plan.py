"""Predict for ``dsat plan`` which configurations fit, how fast and at which cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions, structure_of
from dstrial.dsat.predictor.features import StepParts, ZeroFeatures, peak_parts
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.models import DeviceMemory, MemoryModel, MemoryPrediction, Point
from dstrial.dsat.predictor.predictor import Predictor
from dstrial.dsat.space.space import Space, Structure
from dstrial.engine.dryrun.values import DryRunResult

PROBABILITY = 0.98  # a configuration fits if its probability to fit is at least this
MAX_ROWS = 10  # of a printed plan

_NUM_BEST = 3
_BAND = 1.28  # standard deviations on each side that contain four of five predictions
_LARGEST_FREE = 1024  # largest micro batch to consider if the global batch may vary
_COUNTED_AT = 4  # micro batch size at which FLOPs and tokens of a record are counted
_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """The prediction of one configuration with the fastest micro batch that fits."""

    candidate: Candidate
    description: str
    num_slots: int
    fits: bool
    largest_micro_batch: int  # largest that fits; 0 if none does
    margin_bytes: float  # left on each device, at ``PROBABILITY``; negative if missing
    memory_bytes: float  # on each device, at the median, with context and fragmentation
    memory_phase: str
    host_bytes: float  # of tensors of each rank
    throughput: float  # records a second of all ranks, at the median
    throughput_low: float  # four of five predictions lie between low and high
    throughput_high: float
    tokens_per_s: float | None  # None if records have no tokens
    mfu: float | None  # FLOPs of the model / published FLOPs of the devices; None if unknown
    parts: Mapping[str, float]  # seconds of each part of a step

    def epoch_hours(self, epoch_records: int) -> float | None:
        """Return the hours of one epoch; None if its number of records is unknown."""
        return epoch_records / self.throughput / 3600 if epoch_records else None

    def cells(self, epoch_records: int, price: float | None) -> tuple[str, ...]:
        """Return table cells in the order of ``columns``; ``price`` is per device-hour."""
        hours = self.epoch_hours(epoch_records)
        rate = self.throughput if self.tokens_per_s is None else self.tokens_per_s
        room = (
            f"{self.margin_bytes / _GIB:.1f} left" if self.fits else f"lacks {-self.margin_bytes / _GIB:.1f}"
        )
        speed = (
            f"{rate:,.4g}" if rate < 1e4 else f"{rate:,.0f}",
            "" if self.mfu is None else f"{100 * self.mfu:.0f} %",
            "" if hours is None else f"{hours:,.3g}",
            "" if hours is None or price is None else f"{hours * price * self.num_slots:,.2f}",
        )
        return (
            str(self.num_slots),
            self.description,
            *(speed if self.fits else ("", "", "", "")),
            f"{self.memory_bytes / _GIB:.1f}",
            room,
            f"{self.host_bytes / _GIB:.1f}",
        )


def columns(rows: Sequence[PlanRow]) -> tuple[str, ...]:
    rate = "records/s" if all(row.tokens_per_s is None for row in rows) else "tokens/s"
    return ("slots", "configuration", rate, "MFU", "epoch h", "epoch cost", "GiB", "margin GiB", "host GiB")


@dataclasses.dataclass(frozen=True, slots=True)
class HardwarePlan:
    """The predictions of ``dsat plan`` for hardware that need not be present."""

    rows: tuple[PlanRow, ...]  # those that fit, fastest first; then others, least missing memory first
    best: tuple[PlanRow, ...]  # the fastest three of all structures
    num_params: float
    notes: tuple[str, ...]

    def shown(self, number: int) -> list[PlanRow]:
        """Return at most ``number`` rows.

        Configurations that fit come first, from fast to slow; then the others, by ascending missing memory.
        """
        rows = {row.description: row for row in (*self.best, *self.rows)}.values()
        return sorted(rows, key=lambda row: (not row.fits, -row.throughput if row.fits else 0.0))[:number]


def make_plan(
    space: Space, inputs: PredictInputs, *, num_slots: int = 1, peak_flops_per_s: float | None = None
) -> HardwarePlan:
    """Predict one configuration of each group, and variations of the three best.

    ``peak_flops_per_s`` is the device's published rate, for MFU; None if unknown.
    """
    groups = ConfigGroups(space)
    predictor = Predictor(groups, inputs, "throughput")
    facts = num_slots, peak_flops_per_s
    rows = [row for one in groups.bases() if (row := _row(predictor, one, *facts)) is not None]
    rows.sort(key=lambda row: (not row.fits, -row.throughput if row.fits else -row.margin_bytes))
    best = [row for row in rows if row.fits][:_NUM_BEST]
    near = [
        found
        for row in best
        for neighbour in groups.moves(structure_of(row.candidate), predictor.num_params)
        if (found := _row(predictor, neighbour, *facts)) is not None and found.fits
    ]
    # Configurations with equal predictions are one proposal.
    chosen: dict[float, PlanRow] = {}
    for row in sorted([*best, *near], key=lambda row: -row.throughput):
        chosen.setdefault(round(row.throughput, 6), row)
    notes = [*inputs.notes]
    if inputs.failures:
        notes.append(f"{len(inputs.failures)} kinds of graphs could not be dry-run and are left out")
    num_params = predictor.num_params or 0.0
    return HardwarePlan(tuple(rows), tuple(list(chosen.values())[:_NUM_BEST]), num_params, tuple(notes))


def _row(
    predictor: Predictor, structure: Structure, num_slots: int, peak_flops_per_s: float | None
) -> PlanRow | None:
    """Return the prediction with the fastest micro batch that fits, else the smallest."""
    space = predictor.space
    largest = _LARGEST_FREE if space.batch_size_grid.is_free else None
    candidates = [space.candidate(structure, position) for position in positions(space, largest)]
    predictions = predictor.predictions(candidates)
    if not predictions:
        return None
    fitting = [one for one in predictions if one.probability_to_fit >= PROBABILITY]
    chosen = min(fitting, key=lambda one: one.cost) if fitting else predictions[0]
    candidate, memory = chosen.candidate, chosen.memory
    assert memory is not None
    margin = predictor.margin_bytes(candidate, PROBABILITY)
    run = next(iter(predictor.inputs.runs.values()))
    flops = run.flops.model.at(_COUNTED_AT) / _COUNTED_AT / chosen.cost
    return PlanRow(
        candidate=candidate,
        description=space.describe(candidate),
        num_slots=num_slots,
        fits=bool(fitting),
        largest_micro_batch=max((one.candidate.batch.micro_batch_size for one in fitting), default=0),
        margin_bytes=float("inf") if margin is None else margin,
        memory_bytes=memory.median_bytes,
        memory_phase=memory.phase,
        host_bytes=predictor.host_bytes(candidate),
        throughput=1 / chosen.cost,
        throughput_low=1 / chosen.lower_confidence_bound(-_BAND),
        throughput_high=1 / chosen.lower_confidence_bound(_BAND),
        tokens_per_s=None if run.tokens is None else run.tokens.at(_COUNTED_AT) / _COUNTED_AT / chosen.cost,
        mfu=None if peak_flops_per_s is None else flops / (num_slots * peak_flops_per_s),
        parts=predictor.parts(candidate),
    )


def needed_memory(
    run: DryRunResult, zero: ZeroFeatures, micro_batch_size: int, capacity_bytes: float
) -> MemoryPrediction:
    """Return the memory that a configuration needs on a device, as in ``dsat plan``."""
    point = Point(
        StepParts(()),  # its time is not predicted
        tuple(peak_parts(run, zero, zero, micro_batch_size)),
        zero.group,
        zero.clamped(run.parameters).knobs,
        micro_batch_size,
        is_scattered=zero.stage > 0 and not zero.is_contiguous,
    )
    (found,) = MemoryModel(DeviceMemory.cuda(capacity_bytes)).predict([point])
    assert found is not None  # a dry run has phases
    return found


def headline(plans: Mapping[int, HardwarePlan], device: str, device_bytes: float) -> str:
    """Return one sentence that says on how many devices the model fits.

    ``plans`` maps numbers of devices to plans.
    """
    where = f"{device} ({device_bytes / _GIB:.4g} GiB)"
    num_params = max((plan.num_params for plan in plans.values()), default=0.0)
    number = f"{num_params / 1e9:.3g} B" if num_params >= 1e8 else f"{num_params:,.0f}"
    rows = [row for plan in plans.values() for row in plan.rows]
    if not rows:
        return f"{number} parameters on {where}: nothing could be predicted"
    fitting = [str(slots) for slots, plan in plans.items() if any(row.fits for row in plan.rows)]
    if fitting:
        return f"{number} parameters fit on {', '.join(fitting)} x {where}"
    missing = -max(row.margin_bytes for row in rows) / _GIB
    asked = ", ".join(map(str, plans))
    least = f"the least hungry configuration lacks {missing:.3g} GiB on each device"
    return f"{number} parameters do not fit on {asked} x {where}: {least}"


def to_json(plan: HardwarePlan, epoch_records: int, price: float | None) -> dict[str, Any]:
    def rows(found: Sequence[PlanRow]) -> list[dict[str, Any]]:
        result = []
        for row in found:
            hours = row.epoch_hours(epoch_records)
            cost = None if hours is None or price is None else hours * price * row.num_slots
            values = {**dataclasses.asdict(row), "candidate": row.candidate.to_json()}
            result.append({**values, "epoch_hours": hours, "epoch_cost": cost})
        return result

    return {"rows": rows(plan.rows), "best": rows(plan.best)}
