"""``dsat plan``: what fits and is fastest elsewhere, without measuring. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.predictor import Prediction, Predictor
from dstrial.dsat.space.space import Space, Structure

PROBABILITY = 0.98
"""How probable it has to be that something fits."""

_NUM_BEST = 3
_BAND = 1.28


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """One structure on the planned hardware, with its fastest micro batch that fits."""

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

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "candidate": self.candidate.to_json()}


@dataclasses.dataclass(frozen=True, slots=True)
class HardwarePlan:
    """Predictions for hardware that is not at hand."""

    rows: tuple[PlanRow, ...]  # what fits first, the fastest first, then by missing memory
    best: tuple[PlanRow, ...]  # the fastest three of all structures
    num_params: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "is_measured": False,
            "num_params": self.num_params,
            "rows": [row.to_json() for row in self.rows],
            "best": [row.to_json() for row in self.best],
            "notes": list(self.notes),
        }


def make_plan(space: Space, inputs: PredictInputs) -> HardwarePlan:
    groups = ConfigGroups(space)
    predictor = Predictor(groups, inputs, "throughput")
    rows = [row for one in groups.bases() if (row := _row(predictor, one)) is not None]
    rows.sort(key=lambda row: (not row.fits, -row.throughput if row.fits else -row.margin_bytes))
    best = [row for row in rows if row.fits][:_NUM_BEST]
    near: list[PlanRow] = list(best)
    for row in best:
        structure = Structure(row.candidate.stage, row.candidate.settings)
        for neighbour in groups.moves(structure, predictor.num_params):
            found = _row(predictor, neighbour)
            if found is not None and found.fits:
                near.append(found)
    near.sort(key=lambda row: -row.throughput)
    # Configurations with equal predictions are one proposal.
    chosen: dict[float, PlanRow] = {}
    for row in [*near[:1], *near]:
        chosen.setdefault(round(row.throughput, 6), row)
    notes = [*inputs.notes]
    if inputs.failures:
        notes.append(f"{len(inputs.failures)} kinds of structures could not be dry-run and are left out")
    return HardwarePlan(
        tuple(rows), tuple(list(chosen.values())[:_NUM_BEST]), predictor.num_params or 0.0, tuple(notes)
    )


def _row(predictor: Predictor, structure: Structure) -> PlanRow | None:
    """Return the prediction for a structure; None if it was not dry-run."""
    space = predictor.space
    forecasts = predictor.predictions(
        [space.candidate(structure, position) for position in positions(space, _largest(space))]
    )
    if not forecasts:
        return None
    fitting = [one for one in forecasts if one.probability_to_fit >= PROBABILITY]
    chosen = min(fitting, key=lambda one: one.cost) if fitting else forecasts[0]
    largest = max((one.candidate.batch.micro_batch_size for one in fitting), default=0)
    return _as_row(predictor, chosen, is_fitting=bool(fitting), largest=largest)


def _as_row(predictor: Predictor, forecast: Prediction, *, is_fitting: bool, largest: int) -> PlanRow:
    candidate, memory = forecast.candidate, forecast.memory
    assert memory is not None
    margin = predictor.margin_bytes(candidate, PROBABILITY)
    return PlanRow(
        candidate=candidate,
        description=predictor.space.describe(candidate),
        fits=is_fitting,
        largest_micro_batch=largest,
        margin_bytes=float("inf") if margin is None else margin,
        memory_bytes=memory.median_bytes,
        memory_phase=memory.phase,
        host_bytes=predictor.host_bytes(candidate),
        throughput=1 / forecast.cost,
        throughput_low=1 / forecast.lower_confidence_bound(-_BAND),
        throughput_high=1 / forecast.lower_confidence_bound(_BAND),
        parts=predictor.parts(candidate),
    )


def _largest(space: Space) -> int | None:
    return 1024 if space.batch_size_grid.is_free else None


def headline(plan: HardwarePlan, num_slots: int, device: str, device_bytes: float) -> str:
    """Return whether the model fits, in one sentence."""
    where = f"{num_slots} x {device} ({device_bytes / 2**30:.4g} GiB)"
    params = (
        f"{plan.num_params / 1e9:.3g} B parameters"
        if plan.num_params >= 1e8
        else f"{plan.num_params:,.0f} parameters"
    )
    fitting = [row for row in plan.rows if row.fits]
    if not fitting:
        least = max(plan.rows, key=lambda row: row.margin_bytes, default=None)
        if least is None:
            return f"{params} on {where}: nothing could be predicted"
        missing = -least.margin_bytes / 2**30
        return f"{params} do not fit on {where}: the least hungry configuration lacks {missing:.3g} GiB on each device"
    return f"{params} fit on {where} in {len(fitting)} of {len(plan.rows)} kinds of configurations"


def table_rows(rows: Sequence[PlanRow]) -> list[tuple[str, ...]]:
    """Return cells: configuration, verdict, margin, memory, throughput, micro batch."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        margin = row.margin_bytes / 2**30
        verdict = f"fits, {margin:.1f} GiB left" if row.fits else f"lacks {-margin:.1f} GiB"
        rate = f"{row.throughput:.4g} ({row.throughput_low:.3g} to {row.throughput_high:.3g})"
        found.append(
            (
                row.description,
                verdict,
                f"{row.memory_bytes / 2**30:.1f} in {row.memory_phase}",
                f"{row.host_bytes / 2**30:.1f}",
                rate if row.fits else "",
                str(row.largest_micro_batch or ""),
            )
        )
    return found
