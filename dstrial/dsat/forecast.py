"""What configurations would measure: time and memory of each as distributions, learned from every outcome. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.candidate import Candidate
from dstrial.dsat.ceilings import ModelInfo
from dstrial.dsat.inputs import PredictInputs, closed_form
from dstrial.dsat.machine import Machine, unknown_machine
from dstrial.dsat.memory_model import DeviceMemory, MemoryModel, MemoryPrediction, Observation
from dstrial.dsat.outcome import METRICS_TO_MAXIMIZE, Failure, FailureKind, Measured, Outcome
from dstrial.dsat.space import Space, Structure
from dstrial.dsat.step_parts import PARTS, StepParts, step_parts
from dstrial.dsat.structures import Structures
from dstrial.dsat.time_model import TimeModel, TimePoint, TimePrediction, Timing
from dstrial.engine.dryrun.values import DryRunResult

_SHARES = {"forward": 1 / 3, "backward": 2 / 3}
_OF_PASSES = ("compute", "unfilled", "overhead")
_USABLE_CACHE = 0.5
"""Share of what the allocator holds beyond tensors that it cannot give to others; assumed."""
_UNKNOWN_NOISE = 0.01
_TOLD_SHARE, _LEAST_SCALE, _MOST_SCALE = 0.2, 0.3, 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What one configuration would measure.

    Attributes:
        candidate: which.
        time: seconds of a step (of its forward or backward pass, if that is searched for).
        memory: peak on a device; None if nothing is known of it.
        probability_to_fit: 1 where nothing limits memory.
        cost: seconds per record at the median, or per step where a metric is a time.
        cost_spread: standard deviation of its logarithm.
    """

    candidate: Candidate
    time: TimePrediction
    memory: MemoryPrediction | None
    probability_to_fit: float
    cost: float
    cost_spread: float

    def bound(self, num_spreads: float) -> float:
        """Return a cost that the configuration stays above, but for what lies so many spreads below its median."""
        return self.cost * math.exp(-num_spreads * self.cost_spread)


class Forecaster:
    """Predicts, and learns from outcomes; the same outcomes in the same order give the same predictions.

    Args:
        structures: of the space that is searched.
        inputs: dry runs and machine.
        metric: the searched metric.
    """

    def __init__(self, structures: Structures, inputs: PredictInputs, metric: str) -> None:
        self.structures = structures
        self.space: Space = structures.space
        self.inputs = inputs
        self.info: ModelInfo | None = None
        self._metric = metric
        self._flops_per_record = 0.0
        self._machine = inputs.machine
        self.memory = MemoryModel(self._device_memory(inputs.capacity_bytes, inputs.is_cpu))
        self._measured: list[tuple[Candidate, float, float]] = []
        self._seen_memory: list[tuple[Candidate, float, bool]] = []
        self._runs: dict[tuple[Structure, bool], DryRunResult] = {}
        self._points: dict[Candidate, TimePoint] = {}
        self.time = TimeModel()

    # ---- learning --------------------------------------------------------------------------------

    def learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take how a measurement ended."""
        if isinstance(outcome, Failure):
            if outcome.kind is FailureKind.DEVICE_OOM:
                self._learn_out_of_memory(candidate, outcome)
            return
        self._learn_machine(candidate, outcome)
        self._learn_memory(candidate, outcome)
        seconds = self._seconds(candidate, outcome)
        if seconds is None or self._run(candidate) is None:
            return
        half_width = outcome.value("half_width")
        noise = _UNKNOWN_NOISE if half_width is None else half_width / 1.96
        self._measured.append((candidate, seconds, noise))
        self.time = TimeModel([Timing(self.point(one), took, spread) for one, took, spread in self._measured])

    def supposing(self, candidates: Sequence[Candidate]) -> TimeModel:
        """Return the times' model as if some configurations had measured what is predicted of them."""
        if not candidates:
            return self.time
        known = [Timing(self.point(one), took, spread) for one, took, spread in self._measured]
        points = [self.point(one) for one in candidates if self._run(one) is not None]
        known += [
            Timing(point, prediction.median_s, _UNKNOWN_NOISE)
            for point, prediction in zip(points, self.time.predict(points), strict=True)
        ]
        return TimeModel(known)

    # ---- predicting ------------------------------------------------------------------------------

    def can_predict(self, structure: Structure) -> bool:
        """Say whether anything is known of a structure."""
        return any(
            self._run(self.space.candidate(structure, position)) is not None
            for position in (0, self.space.ladder.last)
        )

    def forecasts(self, candidates: Sequence[Candidate], time: TimeModel | None = None) -> list[Forecast]:
        """Return what is predicted of configurations; those of which nothing is known are left out."""
        known = [one for one in candidates if self._run(one) is not None]
        predicted = (time or self.time).predict([self.point(one) for one in known])
        result = []
        for candidate, prediction in zip(known, predicted, strict=True):
            memory = self._memory_of(candidate)
            capacity = self.memory.device.capacity_bytes
            fits = 1.0
            if memory is not None and capacity is not None:
                fits = memory.probability_to_fit(capacity)
                if self._proved_too_large(memory):
                    fits = min(fits, 0.5)
            records = candidate.batch.train_batch_size if self._metric in METRICS_TO_MAXIMIZE else 1
            result.append(
                Forecast(
                    candidate, prediction, memory, fits, prediction.median_s / records, prediction.spread
                )
            )
        return result

    def cost(self, candidate: Candidate, outcome: Outcome) -> float | None:
        """Return the measured cost, comparable with a forecast's; None if it was not measured."""
        if not isinstance(outcome, Measured):
            return None
        seconds = self._seconds(candidate, outcome)
        if seconds is None:
            return None
        records = candidate.batch.train_batch_size if self._metric in METRICS_TO_MAXIMIZE else 1
        return seconds / records

    def explain(self, forecast: Forecast) -> dict[str, Any]:
        """Return a forecast as JSON values, with where its time goes and what each phase needs."""
        memory = forecast.memory
        result: dict[str, Any] = {
            "median_s": forecast.time.median_s,
            "spread": forecast.time.spread,
            "parts": self.time.parts(self.point(forecast.candidate)),
            "probability_to_fit": forecast.probability_to_fit,
        }
        if memory is not None:
            result |= {
                "memory_median_bytes": memory.median_bytes,
                "memory_spread": memory.spread,
                "memory_phase": memory.phase,
                "phase_bytes": dict(memory.phase_bytes),
            }
        return result

    def margin_bytes(self, candidate: Candidate, probability: float = 0.98) -> float | None:
        """Return the bytes left over on a device at a probability, negative for what is missing; None if unknown."""
        memory = self._memory_of(candidate)
        capacity = self.memory.device.capacity_bytes
        return None if memory is None or capacity is None else capacity - memory.quantile(probability)

    def host_bytes(self, candidate: Candidate) -> float:
        """Return the bytes of tensors on the host, of one rank; 0 if unknown."""
        run = self._run(candidate)
        return 0.0 if run is None else run.host.peak(candidate.batch.micro_batch_size)

    @property
    def num_params(self) -> float | None:
        """Parameters of the model; None if unknown."""
        run = next(iter(self.inputs.runs.values()), None)
        if run is not None:
            return run.parameters
        return None if self.info is None else self.info.num_params

    # ---- machinery -------------------------------------------------------------------------------

    def _device_memory(self, capacity_bytes: float | None, is_cpu: bool) -> DeviceMemory:
        if is_cpu or capacity_bytes is None:
            return DeviceMemory.cpu(capacity_bytes)
        known = DeviceMemory.cuda(capacity_bytes)
        return known if self.inputs.runs else known.roughly()

    def _learn_machine(self, candidate: Candidate, measured: Measured) -> None:
        """Take what the first measurements tell about model and machine."""
        machine = Machine.from_metrics(measured.metrics)
        if machine is not None and self._machine is None:
            self._machine = machine
            self._points.clear()
        if self.info is None:
            self.info = ModelInfo.from_measured(measured)
            flops, latency = measured.value("FLOPS_per_gpu"), measured.value("latency")
            batch = candidate.batch
            if flops is not None and latency is not None:
                self._flops_per_record = flops * latency / 1e6 / (batch.accumulation * batch.micro_batch_size)
            self._runs.clear()
            self._points.clear()
        capacity = measured.value("device_memory_bytes")
        if capacity is not None and self.memory.device.capacity_bytes is None:
            device = self._device_memory(capacity, self.inputs.is_cpu)
            self.memory = MemoryModel(device, self.memory.observations)

    def _learn_memory(self, candidate: Candidate, measured: Measured) -> None:
        allocated, memory = measured.value("peak_memory_bytes"), self._memory_of(candidate)
        if allocated is None or memory is None:
            return
        reserved = measured.value("peak_reserved_bytes") or allocated
        needed = allocated + (1 - _USABLE_CACHE) * max(reserved - allocated, 0.0)
        self._observe(candidate, memory, needed + self.memory.device.context_bytes, is_out_of_memory=False)

    def _learn_out_of_memory(self, candidate: Candidate, failure: Failure) -> None:
        if self.memory.device.capacity_bytes is None and failure.allocated_bytes:
            most = failure.allocated_bytes + (failure.requested_bytes or 0)
            self.memory = MemoryModel(
                self._device_memory(most + DeviceMemory.cuda(most).context_bytes, self.inputs.is_cpu)
            )
        memory, capacity = self._memory_of(candidate), self.memory.device.capacity_bytes
        if memory is not None and capacity is not None:
            self._observe(candidate, memory, capacity, is_out_of_memory=True)

    def _observe(
        self, candidate: Candidate, memory: MemoryPrediction, num_bytes: float, *, is_out_of_memory: bool
    ) -> None:
        self._seen_memory.append((candidate, num_bytes, is_out_of_memory))
        if not self.inputs.runs:
            self._learn_activations(candidate, num_bytes, is_out_of_memory=is_out_of_memory)
            self.memory = MemoryModel(self.memory.device)
            known = self._seen_memory
        else:
            known = self._seen_memory[-1:]
        for one, needed, is_censored in known:
            predicted = self._memory_of(one) or memory
            self.memory = self.memory.observe(
                Observation(self._name(one), predicted.tensor_bytes, needed, is_censored)
            )

    def _learn_activations(self, candidate: Candidate, num_bytes: float, *, is_out_of_memory: bool) -> None:
        """Correct, where nothing was dry-run, what a record needs; what forward keeps says little where it is recomputed."""
        run = self._run(candidate)
        if run is None or self.info is None or not self.info.activation_bytes:
            return
        size = candidate.batch.micro_batch_size
        fixed = run.device.peak(0)
        grown = run.device.peak(size) - fixed
        left = (num_bytes - self.memory.device.context_bytes) / math.exp(self.memory.device.waste) - fixed
        # Of a record that is a small share of all, the rest's uncertainty says more than the record.
        if grown <= 0 or left < _TOLD_SHARE * num_bytes or (is_out_of_memory and left <= grown):
            return
        scale = min(max(left / grown, _LEAST_SCALE), _MOST_SCALE)
        self.info = dataclasses.replace(self.info, activation_bytes=self.info.activation_bytes * scale)
        self._runs.clear()
        self._points.clear()

    def _proved_too_large(self, memory: MemoryPrediction) -> bool:
        """Say whether less than this ran out of memory, and nothing of this size has run."""
        seen = self.memory.observations
        failed = min((one.predicted_bytes for one in seen if one.is_out_of_memory), default=None)
        ran = max((one.predicted_bytes for one in seen if not one.is_out_of_memory), default=0.0)
        return failed is not None and max(failed, ran) <= memory.tensor_bytes

    @staticmethod
    def _name(candidate: Candidate) -> str:
        return repr((candidate.stage, candidate.settings))

    def _memory_of(self, candidate: Candidate) -> MemoryPrediction | None:
        run = self._run(candidate)
        if run is None:
            return None
        structure = _structure(candidate)
        is_accumulating = candidate.batch.accumulation > 1
        ran = self.structures.ran(structure, is_accumulating=is_accumulating)
        # What was not dry-run was computed for this structure itself.
        form = (
            self.structures.device_form(run, structure, ran)
            if self._key(candidate) in self.inputs.runs
            else run.device
        )
        return self.memory.predict(form, candidate.batch.micro_batch_size, self._name(candidate))

    def _key(self, candidate: Candidate) -> str:
        return self.structures.run_key(
            _structure(candidate), is_accumulating=candidate.batch.accumulation > 1
        )

    def _run(self, candidate: Candidate) -> DryRunResult | None:
        """Return the dry run of a configuration, or what the first measurement tells instead; None before that."""
        known = self.inputs.runs.get(self._key(candidate))
        if known is not None or self.info is None:
            return known
        structure, is_accumulating = _structure(candidate), candidate.batch.accumulation > 1
        key = (structure, is_accumulating)
        if key not in self._runs:
            self._runs[key] = closed_form(
                self.info,
                self.structures.setup(structure),
                flops_per_record=self._flops_per_record,
                is_accumulating=is_accumulating,
            )
        return self._runs[key]

    def point(self, candidate: Candidate) -> TimePoint:
        """Return where a configuration's time goes, before any correction; it has to be known to ``forecasts``."""
        if candidate not in self._points:
            self._points[candidate] = self._new_point(candidate)
        return self._points[candidate]

    def _new_point(self, candidate: Candidate) -> TimePoint:
        run = self._run(candidate)
        assert run is not None
        structure, batch = _structure(candidate), candidate.batch
        setup = self.structures.setup(structure)
        ran = setup
        if self._key(candidate) in self.inputs.runs:
            is_accumulating = batch.accumulation > 1
            ran = self.structures.setup(self.structures.ran(structure, is_accumulating=is_accumulating))
        machine = self._machine or unknown_machine(self.space.replicas, is_cpu=self.inputs.is_cpu)
        parts = step_parts(
            run,
            machine,
            setup,
            ran,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
        )
        share = _SHARES.get(self._metric)
        if share is not None:
            passes = [share * parts.named()[part] if part in _OF_PASSES else 0.0 for part in PARTS]
            parts = StepParts(tuple(passes))
        return TimePoint(parts, structure.stage, self.structures.changed(structure), batch.micro_batch_size)

    def _seconds(self, candidate: Candidate, measured: Measured) -> float | None:
        if self._metric in _SHARES:
            passed = measured.value(self._metric)
            return None if passed is None else passed / 1e6
        latency, throughput = measured.value("latency"), measured.value("throughput")
        if latency is not None:
            return latency / 1e6
        return None if not throughput else candidate.batch.train_batch_size / throughput


def _structure(candidate: Candidate) -> Structure:
    return Structure(candidate.stage, candidate.settings)
