"""Predict for ``dsat plan`` what fits, and is fastest, on other hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions, structure_of
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.predictor import Predictor
from dstrial.dsat.space.space import Space, Structure

PROBABILITY = 0.98  # a configuration fits if its probability to fit is at least this

_NUM_BEST = 3
_BAND = 1.28  # standard deviations on each side that contain four of five predictions
_LARGEST_FREE = 1024  # micro batch that is considered with a free batch
_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """The prediction of one configuration, with its fastest micro batch that fits."""

    candidate: Candidate
    description: str
    fits: bool
    largest_micro_batch: int  # that fits; 0 if none does
    margin_bytes: float  # left on each device, at ``PROBABILITY``; negative if missing
    memory_bytes: float  # on each device, at the median
    memory_phase: str
    host_bytes: float  # of tensors of each rank
    throughput: float  # records a second of all ranks, at the median
    throughput_low: float  # four of five predictions lie between low and high
    throughput_high: float
    parts: dict[str, float]  # seconds of each part of a step

    def cells(self) -> tuple[str, ...]:
        """Return table cells: configuration, verdict, memory, host, rate, micro batch."""
        margin = self.margin_bytes / _GIB
        rate = f"{self.throughput:.4g} ({self.throughput_low:.3g} to {self.throughput_high:.3g})"
        return (
            self.description,
            f"fits, {margin:.1f} GiB left" if self.fits else f"lacks {-margin:.1f} GiB",
            f"{self.memory_bytes / _GIB:.1f} in {self.memory_phase}",
            f"{self.host_bytes / _GIB:.1f}",
            rate if self.fits else "",
            str(self.largest_micro_batch or ""),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class HardwarePlan:
    """The predictions of ``dsat plan`` for hardware that this machine need not have."""

    rows: tuple[PlanRow, ...]  # fitting ones, the fastest first; then the others by missing memory
    best: tuple[PlanRow, ...]  # the fastest three of all structures
    num_params: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        def rows(found: Iterable[PlanRow]) -> list[dict[str, Any]]:
            return [{**dataclasses.asdict(row), "candidate": row.candidate.to_json()} for row in found]

        return {
            "is_measured": False,
            "num_params": self.num_params,
            "rows": rows(self.rows),
            "best": rows(self.best),
            "notes": list(self.notes),
        }


def make_plan(space: Space, inputs: PredictInputs) -> HardwarePlan:
    groups = ConfigGroups(space)
    predictor = Predictor(groups, inputs, "throughput")
    rows = [row for one in groups.bases() if (row := _row(predictor, one)) is not None]
    rows.sort(key=lambda row: (not row.fits, -row.throughput if row.fits else -row.margin_bytes))
    best = [row for row in rows if row.fits][:_NUM_BEST]
    near = [
        found
        for row in best
        for neighbour in groups.moves(structure_of(row.candidate), predictor.num_params)
        if (found := _row(predictor, neighbour)) is not None and found.fits
    ]
    # Configurations with equal predictions are one proposal.
    chosen: dict[float, PlanRow] = {}
    for row in sorted([*best, *near], key=lambda row: -row.throughput):
        chosen.setdefault(round(row.throughput, 6), row)
    notes = [*inputs.notes]
    if inputs.failures:
        notes.append(f"{len(inputs.failures)} kinds of structures could not be dry-run and are left out")
    num_params = predictor.num_params or 0.0
    return HardwarePlan(tuple(rows), tuple(list(chosen.values())[:_NUM_BEST]), num_params, tuple(notes))


def _row(predictor: Predictor, structure: Structure) -> PlanRow | None:
    """Return the prediction with the fastest fitting micro batch; None if not dry-run."""
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
    return PlanRow(
        candidate=candidate,
        description=space.describe(candidate),
        fits=bool(fitting),
        largest_micro_batch=max((one.candidate.batch.micro_batch_size for one in fitting), default=0),
        margin_bytes=float("inf") if margin is None else margin,
        memory_bytes=memory.median_bytes,
        memory_phase=memory.phase,
        host_bytes=predictor.host_bytes(candidate),
        throughput=1 / chosen.cost,
        throughput_low=1 / chosen.lower_confidence_bound(-_BAND),
        throughput_high=1 / chosen.lower_confidence_bound(_BAND),
        parts=predictor.parts(candidate),
    )


def headline(plan: HardwarePlan, num_slots: int, device: str, device_bytes: float) -> str:
    """Return one sentence that says whether the model fits the planned hardware."""
    where = f"{num_slots} x {device} ({device_bytes / _GIB:.4g} GiB)"
    is_large = plan.num_params >= 1e8
    number = f"{plan.num_params / 1e9:.3g} B" if is_large else f"{plan.num_params:,.0f}"
    num_fitting = sum(row.fits for row in plan.rows)
    if not plan.rows:
        return f"{number} parameters on {where}: nothing could be predicted"
    if num_fitting:
        verdict = f"fit on {where} in {num_fitting} of {len(plan.rows)} kinds of configurations"
        return f"{number} parameters {verdict}"
    missing = -max(row.margin_bytes for row in plan.rows) / _GIB
    return f"{number} parameters do not fit on {where}: the least hungry configuration lacks {missing:.3g} GiB on each device"
