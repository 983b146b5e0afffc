"""Features of configurations, from which time and memory are predicted. Pure.

They come from dry runs, or from the first measurement.
"""

from __future__ import annotations

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.predictor.config_groups import Structures
from dstrial.dsat.predictor.hardware import Machine, unknown_machine
from dstrial.dsat.predictor.memory import peak_parts
from dstrial.dsat.predictor.memory_formula import ModelInfo
from dstrial.dsat.predictor.memory_learner import MemoryPoint
from dstrial.dsat.predictor.profiles import PredictInputs, closed_form
from dstrial.dsat.predictor.step_parts import step_parts
from dstrial.dsat.predictor.step_time import TimePoint
from dstrial.dsat.predictor.zero_features import Setup
from dstrial.dsat.space.space import Structure
from dstrial.engine.dryrun.values import DryRunResult


class Described:
    """Tells of every configuration where its time and its memory go, before any correction.

    Args:
        structures: of the space that is searched.
        inputs: dry runs and machine.
    """

    def __init__(self, structures: Structures, inputs: PredictInputs) -> None:
        self._structures, self._inputs = structures, inputs
        self.info: ModelInfo | None = None
        self.machine: Machine | None = inputs.machine
        self._flops_per_record = 0.0
        self._formulas: dict[tuple[Structure, bool], DryRunResult] = {}
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
        """Take what the first measurement tells about model and machine; return whether points have changed."""
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
            self._times.clear()
            self._memories.clear()
        return is_news

    def run(self, candidate: Candidate) -> DryRunResult | None:
        """Return the dry run of a configuration, or what the first measurement tells instead; None before that."""
        known = self._inputs.runs.get(self._key(candidate))
        if known is not None or self.info is None:
            return known
        structure, is_accumulating = _structure(candidate), candidate.batch.accumulation > 1
        key = (structure, is_accumulating)
        if key not in self._formulas:
            self._formulas[key] = closed_form(
                self.info,
                self._structures.setup(structure),
                flops_per_record=self._flops_per_record,
                is_accumulating=is_accumulating,
            )
        return self._formulas[key]

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
        run = self.run(candidate)
        if run is None:
            return None
        structures, structure, batch = self._structures, _structure(candidate), candidate.batch
        setup, ran = self._setups(candidate, structure)
        space = structures.space
        machine = self.machine or unknown_machine(space.replicas, is_cpu=self._inputs.is_cpu)
        parts = step_parts(
            run,
            machine,
            setup,
            ran,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
        )
        return TimePoint(
            parts,
            structures.group(structure),
            structures.changed(structure),
            batch.micro_batch_size,
            structures.extras(structure),
        )

    def _new_memory_point(self, candidate: Candidate) -> MemoryPoint | None:
        run = self.run(candidate)
        if run is None or not run.device.phases:
            return None
        structures, structure = self._structures, _structure(candidate)
        setup, ran = self._setups(candidate, structure)
        return MemoryPoint(
            tuple(peak_parts(run, setup, ran, candidate.batch.micro_batch_size)),
            structures.group(structure),
            structures.changed(structure),
            structures.extras(structure),
            is_formula=self._key(candidate) not in self._inputs.runs,
            is_scattered=setup.stage > 0 and not setup.is_contiguous,
            micro_batch_size=candidate.batch.micro_batch_size,
        )

    def _setups(self, candidate: Candidate, structure: Structure) -> tuple[Setup, Setup]:
        """Return what a structure is, and what was dry-run for it; a formula is of the structure itself."""
        setup = self._structures.setup(structure)
        if self._key(candidate) not in self._inputs.runs:
            return setup, setup
        is_accumulating = candidate.batch.accumulation > 1
        return setup, self._structures.setup(self._structures.ran(structure, is_accumulating=is_accumulating))

    def _key(self, candidate: Candidate) -> str:
        return self._structures.run_key(
            _structure(candidate), is_accumulating=candidate.batch.accumulation > 1
        )


def _structure(candidate: Candidate) -> Structure:
    return Structure(candidate.stage, candidate.settings)
