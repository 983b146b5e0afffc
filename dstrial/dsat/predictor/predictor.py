"""Predict time and memory as distributions, learned from every outcome. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import METRICS_TO_MAXIMIZE, Failure, FailureKind, Measured, Outcome
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.features import Features
from dstrial.dsat.predictor.hardware import Machine
from dstrial.dsat.predictor.memory import DeviceMemory, MemoryPrediction
from dstrial.dsat.predictor.memory_learner import MemoryLearner, MemoryPoint
from dstrial.dsat.predictor.profiles import ModelInfo, PredictInputs
from dstrial.dsat.predictor.step_parts import PHASES
from dstrial.dsat.predictor.step_time import TimeModel, TimePoint, TimePrediction, Timing
from dstrial.dsat.space.space import Space, Structure

_UNKNOWN_NOISE = 0.01
_ROOM = 0.97
"""Of a device's memory; with less to spare its allocator has to give back and ask anew, which takes long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted measurement."""

    candidate: Candidate
    time: TimePrediction  # of a step, or of the phase that is searched for
    memory: MemoryPrediction | None
    probability_to_fit: float  # 1 where nothing limits memory
    cost: float  # seconds per record at the median, or per step where the metric is a time
    cost_log_std: float  # of its logarithm

    def lower_confidence_bound(self, num_stds: float) -> float:
        """Return the cost that lies so many standard deviations below its median."""
        return self.cost * math.exp(-num_stds * self.cost_log_std)

    def expected_improvement(self, cost: float) -> float:
        """Return by which share it should beat a cost; a worse one would not be taken.

        Source: expected improvement (Jones, Schonlau and Welch 1998), on the logarithm.
        """
        return expected_improvement_of(math.log(cost / self.cost), self.cost_log_std)


def expected_improvement_of(ahead: float, log_std: float) -> float:
    """Return the mean of what lies above zero of a normal distribution."""
    if log_std <= 0:
        return max(ahead, 0.0)
    score = ahead / log_std
    density = math.exp(-0.5 * score * score) / math.sqrt(2 * math.pi)
    return ahead * 0.5 * math.erfc(-score / math.sqrt(2)) + log_std * density


class Predictor:
    """Predicts and learns; equal outcomes in equal order give equal predictions."""

    def __init__(self, groups: ConfigGroups, inputs: PredictInputs, metric: str) -> None:
        self.groups = groups
        self.space: Space = groups.space
        self.inputs = inputs
        self._metric = metric
        self._phase = metric if metric in PHASES else None
        self._is_per_record = metric in METRICS_TO_MAXIMIZE
        self.features = Features(groups, inputs)
        self.capacity_bytes = inputs.capacity_bytes
        self.memory = self._new_memory()
        self._measured: list[tuple[Candidate, Measured]] = []
        self._errors: list[tuple[Candidate, Failure]] = []
        self._memories: dict[Candidate, MemoryPrediction | None] = {}
        self.time = TimeModel()

    @property
    def info(self) -> ModelInfo | None:
        """The model according to the first measurement; None before that."""
        return self.features.info

    # ---- learning --------------------------------------------------------------------------------

    def learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take how a measurement ended."""
        self._memories.clear()
        if isinstance(outcome, Failure):
            if outcome.kind is FailureKind.DEVICE_OOM:
                self._errors.append((candidate, outcome))
                if self.capacity_bytes is None and outcome.allocated_bytes and not self.inputs.is_cpu:
                    most = float(outcome.allocated_bytes + (outcome.requested_bytes or 0))
                    self.capacity_bytes = most + DeviceMemory.cuda(most).context_bytes
                    self.memory = self._new_memory()
                    self._learn_memory_again()
                else:
                    self._learn_error(candidate, outcome)
            return
        capacity = outcome.value("device_memory_bytes")
        is_news = self.features.learn(outcome, candidate)
        self._measured.append((candidate, outcome))
        if capacity is not None and self.capacity_bytes is None:
            self.capacity_bytes = capacity
            is_news = True
        if is_news:
            self.memory = self._new_memory()
            self._learn_memory_again()
        else:
            self._learn_memory(candidate, outcome)
        self.time = TimeModel(self._timings())

    def fantasize(self, candidates: Sequence[Candidate]) -> TimeModel:
        """Return the time model as if configurations had measured their predictions."""
        points = [point for one in candidates if (point := self.features.time_point(one)) is not None]
        if not points:
            return self.time
        supposed = [
            Timing(point, prediction.median_s, _UNKNOWN_NOISE)
            for point, prediction in zip(points, self.time.predict(points), strict=True)
        ]
        return TimeModel([*self._timings(), *supposed])

    # ---- predicting ------------------------------------------------------------------------------

    def predictions(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        """Return predictions, without the configurations of which nothing is known."""
        return [self.completed(one) for one in self.times(candidates)]

    def times(self, candidates: Sequence[Candidate], time: TimeModel | None = None) -> list[Prediction]:
        """Return predictions without memory."""
        known, points = [], []
        for one in candidates:
            point = self.features.time_point(one)
            if point is not None:
                known.append(one)
                points.append(point)
        result = []
        for candidate, prediction in zip(
            known, (time or self.time).predict(points, self._phase), strict=True
        ):
            cost = prediction.median_s / (candidate.batch.train_batch_size if self._is_per_record else 1)
            result.append(Prediction(candidate, prediction, None, 1.0, cost, prediction.log_std))
        return result

    def completed(self, forecast: Prediction) -> Prediction:
        memory = self.memory_of(forecast.candidate)
        if memory is None or self.capacity_bytes is None:
            return dataclasses.replace(forecast, memory=memory)
        return dataclasses.replace(
            forecast, memory=memory, probability_to_fit=self.probability_to_fit(forecast.candidate)
        )

    def memory_of(self, candidate: Candidate) -> MemoryPrediction | None:
        """Return the peak of a configuration; None if nothing is known of it."""
        if candidate not in self._memories:
            point = self.features.memory_point(candidate)
            self._memories[candidate] = None if point is None else self.memory.predict(point)
        return self._memories[candidate]

    def probability_to_fit(self, candidate: Candidate) -> float:
        """Return the probability to fit with some room; 1 where nothing limits memory."""
        if self.capacity_bytes is None:
            return 1.0
        memory = self.memory_of(candidate)
        return 1.0 if memory is None else memory.probability_to_fit(_ROOM * self.capacity_bytes)

    def cost(self, candidate: Candidate, outcome: Outcome) -> float | None:
        """Return the measured cost in a forecast's unit; None if it was not measured."""
        if not isinstance(outcome, Measured):
            return None
        if self._phase is not None:
            passed = outcome.value(self._metric)
            return None if passed is None else passed / 1e6
        seconds = _step_s(candidate, outcome)
        if seconds is None or not self._is_per_record:
            return seconds
        return seconds / candidate.batch.train_batch_size

    def explain(self, forecast: Prediction) -> dict[str, Any]:
        """Return a forecast as JSON values, with parts of its time and bytes of phases."""
        memory, point = forecast.memory, self.point(forecast.candidate)
        result: dict[str, Any] = {
            "median_s": forecast.time.median_s,
            "spread": forecast.time.log_std,
            "parts": self.time.parts(point, self._phase),
            "probability_to_fit": forecast.probability_to_fit,
        }
        if memory is not None:
            result |= {
                "memory_median_bytes": memory.median_bytes,
                "memory_spread": memory.log_std,
                "memory_phase": memory.phase,
                "phase_bytes": dict(memory.phase_bytes),
            }
        return result

    def margin_bytes(self, candidate: Candidate, probability: float = 0.98) -> float | None:
        """Return the bytes left at a probability, negative if missing; None if unknown."""
        memory = self.memory_of(candidate)
        if memory is None or self.capacity_bytes is None:
            return None
        return self.capacity_bytes - memory.quantile(probability)

    def host_bytes(self, candidate: Candidate) -> float:
        """Return the bytes of tensors on the host, of one rank; 0 if unknown."""
        run = self.features.run(candidate)
        return 0.0 if run is None else run.host.peak(candidate.batch.micro_batch_size)

    def point(self, candidate: Candidate) -> TimePoint:
        """Return where a configuration's time goes; ``KeyError`` if that is unknown."""
        point = self.features.time_point(candidate)
        if point is None:
            raise KeyError(candidate)
        return point

    @property
    def num_params(self) -> float | None:
        return self.features.num_params

    @property
    def machine(self) -> Machine | None:
        return self.features.machine

    # ---- machinery -------------------------------------------------------------------------------

    def _new_memory(self) -> MemoryLearner:
        capacity, is_formula = self.capacity_bytes, not self.inputs.runs
        if self.inputs.is_cpu or capacity is None:
            return MemoryLearner(DeviceMemory.cpu(capacity), is_formula=is_formula)
        return MemoryLearner(DeviceMemory.cuda(capacity), is_formula=is_formula)

    def _timings(self) -> list[Timing]:
        found = []
        for candidate, measured in self._measured:
            point, seconds = self.features.time_point(candidate), _step_s(candidate, measured)
            if point is None or seconds is None:
                continue
            half_width = measured.value("half_width")
            noise = _UNKNOWN_NOISE if half_width is None else half_width / 1.96
            phases = {name: value / 1e6 for name in PHASES if (value := measured.value(name))}
            found.append(Timing(point, seconds, noise, phases))
        return found

    def _learn_memory_again(self) -> None:
        for candidate, measured in self._measured:
            self._learn_memory(candidate, measured)
        for candidate, failure in self._errors:
            self._learn_error(candidate, failure)

    def _learn_memory(self, candidate: Candidate, measured: Measured) -> None:
        point = self._memory_point(candidate)
        if point is None:
            return
        phases = {name: value for name in PHASES if (value := measured.value(f"{name}_peak_memory_bytes"))}
        whole = measured.value("peak_memory_bytes")
        if whole:
            phases["all"] = whole
        if phases:
            self.memory.measured(point, phases, measured.value("peak_reserved_bytes"))

    def _learn_error(self, candidate: Candidate, failure: Failure) -> None:
        point = self._memory_point(candidate)
        if point is not None and self.capacity_bytes is not None:
            self.memory.ran_out(point, failure.phase or "", self.capacity_bytes)

    def _memory_point(self, candidate: Candidate) -> MemoryPoint | None:
        return self.features.memory_point(candidate)


def _step_s(candidate: Candidate, measured: Measured) -> float | None:
    latency, throughput = measured.value("latency"), measured.value("throughput")
    if latency is not None:
        return latency / 1e6
    return None if not throughput else candidate.batch.train_batch_size / throughput


def structure_of(candidate: Candidate) -> Structure:
    """Return a configuration without its batch."""
    return Structure(candidate.stage, candidate.settings)
