"""Features for predictions, from dry runs or the first measurement. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.hardware import Machine, unknown_machine
from dstrial.dsat.predictor.memory import peak_parts
from dstrial.dsat.predictor.memory_learner import MemoryPoint
from dstrial.dsat.predictor.profiles import ModelInfo, PredictInputs, closed_form
from dstrial.dsat.predictor.step_parts import step_parts
from dstrial.dsat.predictor.step_time import TimePoint
from dstrial.dsat.predictor.zero_features import ZeroFeatures
from dstrial.dsat.space.space import Structure
from dstrial.engine.dryrun.values import DryRunResult


class Features:
    """Says where a configuration's time and memory go, before any correction."""

    def __init__(self, groups: ConfigGroups, inputs: PredictInputs) -> None:
        self._config_groups, self._inputs = groups, inputs
        self.info: ModelInfo | None = None
        self.machine: Machine | None = inputs.machine
        self._flops_per_record = 0.0
        self._unknown_machine = unknown_machine(groups.space.replicas, is_cpu=inputs.is_cpu)
        self._formulas: dict[tuple[Any, ...], DryRunResult] = {}
        self._views: dict[tuple[int, tuple[tuple[str, Any], ...], bool], _View] = {}
        self._times: dict[Candidate, TimePoint | None] = {}
        self._memories: dict[Candidate, MemoryPoint | None] = {}

    @property
    def num_params(self) -> float | None:
        """Parameters of the model; None if unknown."""
        run = next(iter(self._inputs.runs.values()), None)
        if run is not None:
            return run.parameters
        return None if self.info is None else self.info.num_params

    def learn(self, measured: Measured, candidate: Candidate) -> bool:
        """Take model and machine from the first measurement; say whether points changed."""
        is_news = False
        machine = Machine.from_metrics(measured.metrics)
        if machine is not None and self.machine is None:
            self.machine, is_news = machine, True
        if self.info is None:
            self.info = ModelInfo.from_measured(measured)
            flops, latency = measured.value("FLOPS_per_gpu"), measured.value("latency")
            batch = candidate.batch
            if flops is not None and latency is not None:
                self._flops_per_record = flops * latency / 1e6 / (batch.accumulation * batch.micro_batch_size)
            is_news = is_news or self.info is not None
        if is_news:
            self._formulas.clear()
            self._views.clear()
            self._times.clear()
            self._memories.clear()
        return is_news

    def run(self, candidate: Candidate) -> DryRunResult | None:
        """Return the dry run, else a formula of the first measurement; None before that."""
        return self._view(candidate).run

    def time_point(self, candidate: Candidate) -> TimePoint | None:
        """Return where a configuration's time goes; None if nothing is known of it."""
        if candidate not in self._times:
            self._times[candidate] = self._new_time_point(candidate)
        return self._times[candidate]

    def memory_point(self, candidate: Candidate) -> MemoryPoint | None:
        """Return where a configuration's memory goes; None if nothing is known of it."""
        if candidate not in self._memories:
            self._memories[candidate] = self._new_memory_point(candidate)
        return self._memories[candidate]

    # ---- machinery -------------------------------------------------------------------------------

    def _new_time_point(self, candidate: Candidate) -> TimePoint | None:
        view, batch = self._view(candidate), candidate.batch
        if view.run is None:
            return None
        parts = step_parts(
            view.run,
            self.machine or self._unknown_machine,
            view.setup,
            view.ran,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
        )
        return TimePoint(parts, view.group, view.settings, batch.micro_batch_size, view.extras)

    def _new_memory_point(self, candidate: Candidate) -> MemoryPoint | None:
        view, micro_batch_size = self._view(candidate), candidate.batch.micro_batch_size
        if view.run is None or not view.run.device.phases:
            return None
        return MemoryPoint(
            tuple(peak_parts(view.run, view.setup, view.ran, micro_batch_size)),
            view.group,
            view.settings,
            view.extras,
            is_formula=view.is_formula,
            is_scattered=view.setup.stage > 0 and not view.setup.is_contiguous,
            micro_batch_size=micro_batch_size,
        )

    def _view(self, candidate: Candidate) -> _View:
        """Return what all micro batches of a structure share that do or do not accumulate."""
        key = candidate.stage, candidate.settings, candidate.batch.accumulation > 1
        if key not in self._views:
            self._views[key] = self._new_view(
                Structure(candidate.stage, candidate.settings), is_accumulating=key[-1]
            )
        return self._views[key]

    def _new_view(self, structure: Structure, *, is_accumulating: bool) -> _View:
        groups = self._config_groups
        setup = ran = groups.setup(structure)
        run = self._inputs.runs.get(groups.run_key(structure, is_accumulating=is_accumulating))
        is_formula = run is None
        if run is not None:
            ran = groups.setup(groups.dry_run_representative(structure, is_accumulating=is_accumulating))
        elif self.info is not None:
            run = self._formula(self.info, setup, is_accumulating=is_accumulating)
        return _View(
            run,
            setup,
            ran,
            groups.group(structure),
            groups.changed(structure),
            groups.unknown_settings(structure),
            is_formula=is_formula,
        )

    def _formula(self, info: ModelInfo, setup: ZeroFeatures, *, is_accumulating: bool) -> DryRunResult:
        if (setup, is_accumulating) not in self._formulas:
            self._formulas[setup, is_accumulating] = closed_form(
                info, setup, flops_per_record=self._flops_per_record, is_accumulating=is_accumulating
            )
        return self._formulas[setup, is_accumulating]


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """What is known of a structure, whatever its micro batch."""

    run: DryRunResult | None
    setup: ZeroFeatures
    ran: ZeroFeatures  # of the structure that was dry-run for it; a formula is of the structure itself
    group: tuple[Any, ...]
    settings: tuple[tuple[str, Any], ...]
    extras: tuple[tuple[str, Any], ...]
    is_formula: bool
