"""Inputs of predictions: requests for dry runs, and their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.predictor.hardware import Machine
from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult

UNDESCRIBED = "nothing"  # ``PredictInputs.described_by`` if no dry run succeeded
NUM_BATCHES = 4  # a dry run uses the largest of this many first batches of the training loader

_COUNTED_AT = 4  # micro batch size at which FLOPs of a record are counted
# Classes that run a trial or a script in a dry run.
_TRIAL = "dstrial.dsat.rank.workloads:TrialWorkload"
_SCRIPT = "dstrial.dsat.rank.workloads:ScriptWorkload"


def dry_run_request(
    code: str | Sequence[str],
    context_dir: Path,
    hparams: Mapping[str, Any],
    *,
    world_size: int,
    exp_conf: Mapping[str, Any] | None = None,
    num_batches: int = NUM_BATCHES,
    sample_batch: Path | None = None,
    trusts_code: bool = False,
    num_stages: int = 1,
    stage: int = 0,
) -> DryRunRequest:
    """Return a request to dry-run a trial or a script.

    Args:
        code: ``module:Class`` of a trial, or the command line of a script, which runs until its engine gets the first batch.
        context_dir: directory of the model definition.
        hparams: hyperparameters that the code reads.
        world_size: number of virtual ranks.
        exp_conf: experiment config that the code reads.
        num_batches: number of first batches of a trial's loader, of which the largest is used.
        sample_batch: file of a batch to use instead; for a script, a file of its engine call's arguments.
        trusts_code: load ``sample_batch`` even if it holds other classes than tensors, which may execute code.
        num_stages: pipeline stages of a trial; 1 for none.
        stage: the pipeline stage to dry-run.
    """
    directory = str(context_dir.resolve())
    options: dict[str, Any] = {
        "hparams": dict(hparams),
        "exp_conf": None if exp_conf is None else dict(exp_conf),
        "sample_batch": None if sample_batch is None else str(sample_batch.resolve()),
        "trusts_code": trusts_code,
    }
    if isinstance(code, str):
        options |= {
            "trial": code,
            "context_dir": directory,
            "num_batches": num_batches,
            "num_stages": num_stages,
        }
    else:
        options["words"] = list(code)
    return DryRunRequest(
        workload=_TRIAL if isinstance(code, str) else _SCRIPT,
        options=options,
        rank=stage * (world_size // num_stages),
        world_size=world_size,
        module_paths=(directory,),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PredictInputs:
    """Inputs of method ``predict``: dry runs, machine and device memory."""

    runs: Mapping[str, DryRunResult] = dataclasses.field(default_factory=dict)  # by ``ConfigGroups.run_key``
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> why there is no run
    machine: Machine | None = None  # None to learn it from the first measurement
    capacity_bytes: float | None = None  # of one device; None to learn it from a measurement
    is_cpu: bool = False
    described_by: str = UNDESCRIBED  # what the dry runs used: ``fake tensors`` or ``one real batch``
    notes: tuple[str, ...] = ()  # lines for the user

    @property
    def flops_per_record(self) -> float | None:
        """FLOPs per record on one rank, from the first dry run; None without a dry run."""
        run = next(iter(self.runs.values()), None)
        return None if run is None else run.flops.model.at(_COUNTED_AT) / _COUNTED_AT

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        runs = {key: run.to_json() for key, run in self.runs.items()}
        machine = None if self.machine is None else dataclasses.asdict(self.machine)
        return {**fields, "runs": runs, "machine": machine, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PredictInputs:
        machine = value["machine"]
        known = {field.name: value[field.name] for field in dataclasses.fields(cls)}
        runs = {key: DryRunResult.from_json(run) for key, run in value["runs"].items()}
        machine = None if machine is None else Machine.from_json(machine)
        return cls(**{**known, "runs": runs, "machine": machine, "notes": tuple(value["notes"])})
