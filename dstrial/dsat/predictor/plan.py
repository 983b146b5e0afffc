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
from dstrial.dsat.space import Space, Structure
from dstrial.engine.dryrun.values import DryRunResult

PROBABILITY = 0.98  # a configuration fits if its probability to fit is at least this
MAX_ROWS = 10  # of a printed plan

_NUM_BEST = 3  # configurations of which a plan shows variations
_LARGEST_FREE = 1024  # largest micro batch to consider if the global batch may vary
_COUNTED_AT = 4  # micro batch size for which FLOPs and tokens of a record are computed
_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """The prediction for one configuration, with the fastest micro batch that fits.

    If no micro batch fits, the prediction is for the smallest one.
    """

    candidate: Candidate
    description: str
    num_slots: int  # number of devices
    fits: bool  # into the memory of a device, with the probability ``PROBABILITY``
    margin_bytes: float  # free on each device with that probability; negative if missing
    memory_bytes: float  # median of what each device needs, with driver and fragmentation
    host_bytes: float  # of each rank's tensors in host memory
    throughput: float  # median of the records per second of all ranks
    tokens_per_s: float | None  # None if records have no tokens
    mfu: float | None  # FLOP/s of the model / published FLOP/s of the devices; None if unknown

    def epoch(self, epoch_records: int, price: float | None) -> tuple[float | None, float | None]:
        """Return (hours, cost) of an epoch, each None if unknown.

        ``epoch_records`` is the number of records of an epoch, 0 if unknown. ``price`` is that of one device for an hour; None
        if unknown.
        """
        hours = epoch_records / self.throughput / 3600 if epoch_records else None
        return hours, None if hours is None or price is None else hours * price * self.num_slots

    def cells(self, epoch_records: int, price: float | None) -> tuple[str, ...]:
        """Return the texts of a table's row, in the order of ``columns``."""
        hours, cost = self.epoch(epoch_records, price)
        rate = self.throughput if self.tokens_per_s is None else self.tokens_per_s
        margin = self.margin_bytes / _GIB
        speed = (
            f"{rate:,.4g}" if rate < 1e4 else f"{rate:,.0f}",
            "" if self.mfu is None else f"{100 * self.mfu:.0f} %",
            "" if hours is None else f"{hours:,.3g}",
            "" if cost is None else f"{cost:,.2f}",
        )
        return (
            str(self.num_slots),
            self.description,
            *(speed if self.fits else ("", "", "", "")),
            f"{self.memory_bytes / _GIB:.1f}",
            f"{margin:.1f} left" if self.fits else f"lacks {-margin:.1f}",
            f"{self.host_bytes / _GIB:.1f}",
        )


def columns(rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """Return the headings of the table that ``dsat plan`` prints."""
    rate = "records/s" if all(row.tokens_per_s is None for row in rows) else "tokens/s"
    return ("slots", "configuration", rate, "MFU", "epoch h", "epoch cost", "GiB", "margin GiB", "host GiB")


def make_plan(
    space: Space, inputs: PredictInputs, *, num_slots: int = 1, peak_flops_per_s: float | None = None
) -> list[PlanRow]:
    """Return predictions for configurations of all stages, and variations of the best.

    The result has one row per group of configurations (``ConfigGroups``), and the fastest variations of the three best.
    Configurations that fit come first, from fast to slow; then the others, by ascending missing memory. ``peak_flops_per_s`` is
    the device's published rate, for the MFU; None if unknown.
    """
    groups = ConfigGroups(space)
    predictor = Predictor(groups, inputs, "throughput")

    def rows_of(structures: Sequence[Structure]) -> list[PlanRow]:
        rows = [_row(predictor, one, num_slots, peak_flops_per_s) for one in structures]
        return sorted((row for row in rows if row is not None), key=_order)

    rows = rows_of(groups.bases())
    best = [structure_of(row.candidate) for row in rows[:_NUM_BEST] if row.fits]
    near = [other for one in best for other in groups.moves(one, predictor.num_params)]
    # Configurations with equal predictions are one proposal.
    faster: dict[float, PlanRow] = {}
    for row in rows_of([*best, *near]):
        faster.setdefault(round(row.throughput, 6), row)
    chosen = {row.description: row for row in (*list(faster.values())[:_NUM_BEST], *rows)}
    return sorted(chosen.values(), key=_order)


def _order(row: PlanRow) -> tuple[bool, float]:
    return not row.fits, -row.throughput if row.fits else -row.margin_bytes


def _row(
    predictor: Predictor, structure: Structure, num_slots: int, peak_flops_per_s: float | None
) -> PlanRow | None:
    """Return the prediction for ``structure``; None if it was not dry-run.

    ``structure`` is a configuration without its batch sizes.
    """
    space, capacity = predictor.space, predictor.capacity_bytes
    largest = _LARGEST_FREE if space.batch_size_grid.is_free else None
    candidates = [space.candidate(structure, position) for position in positions(space, largest)]
    predictions = predictor.predictions(candidates)
    if not predictions:
        return None
    fitting = [one for one in predictions if one.probability_to_fit >= PROBABILITY]
    chosen = min(fitting, key=lambda one: one.cost) if fitting else predictions[0]
    memory = chosen.memory
    assert memory is not None
    assert capacity is not None
    run = next(iter(predictor.inputs.runs.values()))
    flops = run.flops.model.at(_COUNTED_AT) / _COUNTED_AT / chosen.cost
    return PlanRow(
        candidate=chosen.candidate,
        description=space.describe(chosen.candidate),
        num_slots=num_slots,
        fits=bool(fitting),
        margin_bytes=capacity - memory.quantile(PROBABILITY),
        memory_bytes=memory.median_bytes,
        host_bytes=predictor.host_bytes(chosen.candidate),
        throughput=1 / chosen.cost,
        tokens_per_s=None if run.tokens is None else run.tokens.at(_COUNTED_AT) / _COUNTED_AT / chosen.cost,
        mfu=None if peak_flops_per_s is None else flops / (num_slots * peak_flops_per_s),
    )


def needed_memory(
    run: DryRunResult, zero: ZeroFeatures, micro_batch_size: int, capacity_bytes: float
) -> MemoryPrediction:
    """Predict the memory that a configuration needs on a GPU, as ``dsat plan`` does.

    ``run`` is a dry run with the ZeRO settings ``zero``; ``capacity_bytes`` is the device's memory.
    """
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


def headline(plans: Mapping[int, Sequence[PlanRow]], num_params: float, where: str) -> str:
    """Return one sentence that says on how many devices the model fits.

    ``plans`` maps numbers of devices to plans; ``where`` names the device and its memory.
    """
    number = f"{num_params / 1e9:.3g} B" if num_params >= 1e8 else f"{num_params:,.0f}"
    fitting = [str(slots) for slots, rows in plans.items() if any(row.fits for row in rows)]
    if fitting:
        return f"{number} parameters fit on {', '.join(fitting)} x {where}"
    missing = min((-row.margin_bytes for rows in plans.values() for row in rows), default=float("inf")) / _GIB
    least = f"the least hungry configuration lacks {missing:.3g} GiB on each device"
    return f"{number} parameters do not fit on {', '.join(map(str, plans))} x {where}: {least}"


def to_json(rows: Sequence[PlanRow], epoch_records: int, price: float | None) -> list[dict[str, Any]]:
    """Return predictions as JSON values, with hours and cost of an epoch.

    ``epoch_records`` and ``price`` are those of :meth:`PlanRow.epoch`.
    """
    found = []
    for row in rows:
        hours, cost = row.epoch(epoch_records, price)
        values = {**dataclasses.asdict(row), "candidate": row.candidate.to_json()}
        found.append({**values, "epoch_hours": hours, "epoch_cost": cost})
    return found
