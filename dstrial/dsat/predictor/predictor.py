"""Predict time and memory of configurations, and learn from each trial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import METRICS_TO_MAXIMIZE, FailureKind, Measured, Outcome
from dstrial.dsat.predictor.config_groups import ConfigGroups, structure_of
from dstrial.dsat.predictor.features import PHASES, peak_parts, step_parts
from dstrial.dsat.predictor.hardware import Machine, unknown_machine
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.models import (
    DeviceMemory,
    MemoryModel,
    MemoryPrediction,
    Point,
    StepModel,
    TimePrediction,
    Timing,
)
from dstrial.dsat.space import Space
from dstrial.engine.dryrun.values import DryRunResult

_UNKNOWN_NOISE = 0.01  # relative standard deviation of a measurement without a confidence interval
_MAX_SPREAD = 0.15  # limit of the log cost's standard deviation in confidence bounds and expected gains


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time, memory and cost of a configuration.

    The cost is what the search minimizes: seconds per record, or the seconds that the metric names.
    """

    candidate: Candidate
    time: TimePrediction  # of a step, or of the phase that the metric names
    memory: MemoryPrediction | None  # None if unknown
    probability_to_fit: float  # into the device's memory; 1 if its size is unknown
    cost: float  # at the median time

    def lower_confidence_bound(self, num_stds: float) -> float:
        """Return the cost at ``num_stds`` standard deviations below its median."""
        return self.cost * math.exp(-num_stds * min(self.time.log_std, _MAX_SPREAD))

    def expected_improvement(self, cost: float) -> float:
        """Return the expected relative gain over ``cost``; a higher cost counts as gain 0.

        Source: expected improvement (Jones, Schonlau and Welch 1998), on the logarithm.
        """
        ahead, log_std = math.log(cost / self.cost), min(self.time.log_std, _MAX_SPREAD)
        score = ahead / log_std
        density = math.exp(-0.5 * score * score) / math.sqrt(2 * math.pi)
        return ahead * 0.5 * math.erfc(-score / math.sqrt(2)) + log_std * density


class Predictor:
    """Predicts time, memory and cost of configurations; learns from measured ones.

    ``metric`` is the metric that the search optimizes.
    """

    def __init__(self, groups: ConfigGroups, inputs: PredictInputs, metric: str) -> None:
        self.groups = groups
        self.space: Space = groups.space
        self.inputs = inputs
        self._metric = metric
        self._phase = metric if metric in PHASES else None
        self._is_per_record = metric in METRICS_TO_MAXIMIZE
        self.machine: Machine | None = inputs.machine
        self.capacity_bytes = inputs.capacity_bytes
        self.outcomes: list[tuple[Candidate, Outcome]] = []
        self._ran = groups.representatives()  # the structures that were dry-run
        self._points: dict[Candidate, Point | None] = {}
        self._memory = self._new_memory()
        self.time = StepModel()

    @property
    def num_params(self) -> float | None:
        """Number of parameters of the model; None if unknown."""
        run = next(iter(self.inputs.runs.values()), None)
        return None if run is None else run.parameters

    # ---- learning --------------------------------------------------------------------------------

    def learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Learn the outcome of a trial: fit the time model and the memory model again."""
        self.outcomes.append((candidate, outcome))
        if isinstance(outcome, Measured):
            if self.machine is None:
                self.machine = Machine.from_metrics(outcome.metrics)
                self._points.clear()
            # A measured capacity replaces the guess from an out-of-memory error.
            self.capacity_bytes = (
                self.inputs.capacity_bytes or outcome.value("device_memory_bytes") or self.capacity_bytes
            )
        elif outcome.allocated_bytes and outcome.kind is FailureKind.DEVICE_OOM and not self.inputs.is_cpu:
            most = float(outcome.allocated_bytes + (outcome.requested_bytes or 0))
            self.capacity_bytes = self.capacity_bytes or most + DeviceMemory.cuda(most).context_bytes
        self._memory = self._new_memory()
        self.time = StepModel(self._timings(), is_scaled=self.machine is None)

    def fantasize(self, candidates: Sequence[Candidate]) -> StepModel:
        """Return a time model that treats predicted times of ``candidates`` as measured.

        The search uses the model to choose the next trial while ``candidates`` are being measured.
        """
        points, _ = self._with_pressure(
            [point for one in candidates if (point := self._point(one)) is not None]
        )
        if not points:
            return self.time
        supposed = [
            Timing(point, prediction.median_s, _UNKNOWN_NOISE)
            for point, prediction in zip(points, self.time.predict(points), strict=True)
        ]
        return StepModel([*self._timings(), *supposed], is_scaled=self.machine is None)

    # ---- predicting ------------------------------------------------------------------------------

    def predictions(self, candidates: Sequence[Candidate], time: StepModel | None = None) -> list[Prediction]:
        """Return predictions of those ``candidates`` that have a dry run, in their order.

        ``time`` is the time model to use; None means the one that has learned all outcomes.
        """
        known = [(one, point) for one in candidates if (point := self._point(one)) is not None]
        points, memories = self._with_pressure([point for _, point in known])
        times = (time or self.time).predict(points, self._phase)
        result = []
        for (candidate, _), found, memory in zip(known, times, memories, strict=True):
            cost = found.median_s / (candidate.batch.train_batch_size if self._is_per_record else 1)
            limit = self.capacity_bytes
            fits = 1.0 if memory is None or limit is None else memory.probability_to_fit(limit)
            result.append(Prediction(candidate, found, memory, fits, cost))
        return result

    def cost(self, candidate: Candidate, outcome: Outcome | None) -> float | None:
        """Return a measured cost, in the unit of ``Prediction.cost``; None if unmeasured."""
        if not isinstance(outcome, Measured):
            return None
        if self._phase is not None:
            passed = outcome.value(self._metric)
            return None if passed is None else passed / 1e6
        seconds = _step_s(candidate, outcome)
        if seconds is None or not self._is_per_record:
            return seconds
        return seconds / candidate.batch.train_batch_size

    def forecast(self, prediction: Prediction, *, is_guess: bool) -> dict[str, Any]:
        """Return a prediction as JSON values; if ``is_guess`` is true, its times are None."""
        return {
            "step_s": None if is_guess else prediction.time.median_s,
            "spread": None if is_guess else prediction.time.log_std,
            "memory_bytes": None if prediction.memory is None else prediction.memory.median_bytes,
            "probability_to_fit": prediction.probability_to_fit,
        }

    def host_bytes(self, candidate: Candidate) -> float:
        """Return the peak bytes of one rank's tensors in host memory; 0 if unknown."""
        run = self.inputs.runs.get(self._run_key(candidate))
        return 0.0 if run is None else run.host.peak(candidate.batch.micro_batch_size)

    # ---- machinery -------------------------------------------------------------------------------

    def _run_key(self, candidate: Candidate) -> str:
        is_accumulating = candidate.batch.accumulation > 1
        return self.groups.run_key(structure_of(candidate), is_accumulating=is_accumulating)

    def _point(self, candidate: Candidate) -> Point | None:
        if candidate not in self._points:
            key = self._run_key(candidate)
            run = self.inputs.runs.get(key)
            self._points[candidate] = None if run is None else self._new_point(candidate, run, key)
        return self._points[candidate]

    def _new_point(self, candidate: Candidate, run: DryRunResult, key: str) -> Point:
        groups, structure, batch = self.groups, structure_of(candidate), candidate.batch
        setup = groups.setup(structure)
        ran = groups.setup(self._ran[key][0]) if key in self._ran else setup
        parts = step_parts(
            run,
            self.machine or unknown_machine(self.space.replicas, is_cpu=self.inputs.is_cpu),
            setup,
            ran,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
        )
        return Point(
            parts,
            tuple(peak_parts(run, setup, ran, batch.micro_batch_size)),
            groups.group(structure),
            setup.clamped(run.parameters).knobs,
            batch.micro_batch_size,
            groups.unknown_settings(structure),
            is_scattered=setup.stage > 0 and not setup.is_contiguous,
        )

    def _with_pressure(self, points: Sequence[Point]) -> tuple[list[Point], list[MemoryPrediction | None]]:
        """Return (points, predicted memory peaks), both in the order of ``points``.

        The returned points include the time that a configuration loses because memory is nearly full.
        """
        memories, limit = self._memory.predict(points), self.capacity_bytes
        pressed = [
            point
            if memory is None or limit is None
            else dataclasses.replace(point, parts=point.parts.pressed(memory.median_bytes / limit))
            for point, memory in zip(points, memories, strict=True)
        ]
        return pressed, memories

    def _new_memory(self) -> MemoryModel:
        capacity = self.capacity_bytes
        is_host = self.inputs.is_cpu or capacity is None
        model = MemoryModel(DeviceMemory.cpu(capacity) if is_host else DeviceMemory.cuda(capacity or 0.0))
        for candidate, outcome in self.outcomes:
            point = self._point(candidate)
            if point is None or not point.peaks:
                continue
            if isinstance(outcome, Measured):
                named = {name: outcome.value(f"{name}_peak_memory_bytes") for name in PHASES}
                named["all"] = outcome.value("peak_memory_bytes")
                phases = {name: value for name, value in named.items() if value}
                if phases:
                    model.measured(point, phases, outcome.value("peak_reserved_bytes"))
            elif outcome.kind is FailureKind.DEVICE_OOM and capacity is not None:
                model.ran_out(point, outcome.phase or "")
        return model

    def _timings(self) -> list[Timing]:
        found = []
        for candidate, outcome in self.outcomes:
            if not isinstance(outcome, Measured):
                continue
            point, seconds = self._point(candidate), _step_s(candidate, outcome)
            if point is None or seconds is None:
                continue
            half_width = outcome.value("half_width")
            noise = _UNKNOWN_NOISE if half_width is None else max(half_width / 1.96, 0.002)
            phases = {name: value / 1e6 for name in PHASES if (value := outcome.value(name))}
            found.append(Timing(self._with_pressure([point])[0][0], seconds, noise, phases))
        return found


def _step_s(candidate: Candidate, measured: Measured) -> float | None:
    latency, throughput = measured.value("latency"), measured.value("throughput")
    if latency is not None:
        return latency / 1e6
    return None if not throughput else candidate.batch.train_batch_size / throughput
