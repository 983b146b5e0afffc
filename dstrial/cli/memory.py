"""``dstrial memory``: predict a model's memory by dry run, or show a run's memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.cli.experiment_arguments import Entrypoint, parse_entrypoint
from dstrial.cli.streams import text_table
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.config.parallel_dims import CONFIG_KEYS, config_sizes
from dstrial.errors import ConfigError, DstrialError, LaunchError
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.local.run_directory import RunDirectory
from dstrial.telemetry.summary import memory_rows

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.dsat.predictor.model_memory import Placement
    from dstrial.engine.dryrun.values import DryRunRequest

_GIB = 2**30
_DEFAULT_SLOTS = "1,4,8"
_DEFAULT_DEVICE_GIB = 80.0
_DEADLINE_S = 900.0
_NUM_PARALLEL = 2
_MEASURE = "Train some batches, and read what the run has measured by `dstrial memory RUN_DIR`."


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "memory",
        help="predict a model's memory, and whether it needs several devices",
        description="Predict the memory of one device, or of one device per pipeline stage: parameters, gradients, optimizer, "
        "activations and buffers. The command trains one step as one rank of N simulated ranks, on tensors without memory, and "
        "needs no accelerator. For the directory of a run, the command also shows the run's measured memory.",
    )
    parser.add_argument(
        "experiment", metavar="EXPERIMENT", help="experiment config (YAML), or directory of a run"
    )
    parser.add_argument(
        "context_dir",
        metavar="CONTEXT_DIR",
        nargs="?",
        help="model definition directory (default: ., or that of the run)",
    )
    parser.add_argument(
        "--slots",
        metavar="N,…",
        help=f"numbers of devices to predict for (default: {_DEFAULT_SLOTS}, or that of the run)",
    )
    parser.add_argument(
        "--device-gib",
        type=float,
        default=_DEFAULT_DEVICE_GIB,
        metavar="GIB",
        help="memory of one device in GiB (default: 80)",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value of the config; repeatable",
    )
    parser.add_argument(
        "--deadline", type=float, default=_DEADLINE_S, metavar="S", help="time limit in seconds"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print predicted or measured memory; return 1 if nothing could be predicted."""
    if Path(args.experiment).is_dir():
        return _show_run(args, RunDirectory.open(args.experiment))
    return _show_prediction(args)


def _show_prediction(args: argparse.Namespace) -> int:
    from dstrial.dsat.predictor.model_memory import answer, table, table_unit

    began_s = time.monotonic()
    numbers = _slots(_DEFAULT_SLOTS if args.slots is None else args.slots)
    settings_text = _settings_text(_load(args, None))
    capacity_bytes = args.device_gib * _GIB
    planned = [one for num_slots in numbers for one in _planned_runs(args, num_slots)]
    placements = _run_planned(planned, args.deadline, capacity_bytes)
    lines = answer(placements, capacity_bytes, settings_text)
    seconds = time.monotonic() - began_s
    if args.as_json:
        rows = [
            {
                "slots": one.num_slots,
                "stage": one.stage,
                "problem": one.problem,
                **one.parts(),
                "needs": None if one.need is None else one.need.median_bytes,
                "fits": one.fits(capacity_bytes),
                "largest": one.largest(),
            }
            for one in placements
        ]
        sys.stdout.write(json.dumps({"answer": lines, "devices": rows, "seconds": seconds}, indent=2) + "\n")
    else:
        header, *cells = table(placements, capacity_bytes)
        sys.stdout.write("\n".join([*lines, "", text_table(header, cells, right=range(len(header)))]))
        sys.stdout.writelines(
            f"{one.num_slots} device(s): {one.problem}\n" for one in placements if one.problem
        )
        alike = "the ranks of a stage" if any(one.stage is not None for one in placements) else "all ranks"
        sys.stdout.write(
            f"{table_unit(placements)} of one device, {alike} alike; predicted in {seconds:.0f} s\n"
        )
        notes = dict.fromkeys(note for one in placements for note in one.notes)
        sys.stdout.writelines(f"{note}\n" for note in notes)
    return 0 if any(one.run is not None for one in placements) else 1


def _show_run(args: argparse.Namespace, run: RunDirectory) -> int:
    """Print a run's measured memory beside a new prediction for the same config."""
    telemetry = read_json(run.telemetry_path) or {}
    ranks = telemetry.get("memory_bytes") or []
    if not memory_rows(ranks):
        raise LaunchError(
            f"{run.path} has no measured parts of memory in telemetry.json; expected a run that has reported once with "
            "data.dstrial.telemetry on. Train some batches, or give the experiment config to have it predicted."
        )
    args.experiment = str(run.experiment_config_path)
    args.context_dir = args.context_dir or run.read_record().context_dir
    (num_slots,) = _slots(str(len(ranks)) if args.slots is None else args.slots)[:1]
    stages, problem = _predict_stages(run, _planned_runs(args, num_slots), args.deadline)
    if args.as_json:
        document = {"ranks": ranks, "predicted": stages, "problem": problem}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    rows = memory_rows(ranks, stages, shows_all=True)
    sys.stdout.writelines(f"{name:<15}{text}\n" for name, text in rows)
    sys.stdout.write(f"measured by {telemetry.get('memory_found_by')}; each part at its largest\n")
    if problem:
        sys.stdout.write(f"nothing is predicted: {problem}\n")
    return 0


def predict_run(run: RunDirectory, experiment: ExperimentConfig, num_slots: int) -> str | None:
    """Predict a run's memory by dry run, and store the result in the run directory.

    Returns None, or the text of the problem that prevented the prediction.
    """
    try:
        return _predict_stages(run, _planned_of(experiment, num_slots))[1]
    except DstrialError as error:
        return str(error)


def _predict_stages(
    run: RunDirectory,
    planned: Sequence[_Planned],
    deadline_s: float = _DEADLINE_S,
) -> tuple[list[dict[str, float]], str | None]:
    """Run the dry runs, store the result, and return (result, first problem or None).

    The result has one mapping, part of memory -> bytes, per pipeline stage; [] if a dry run failed.
    """
    placements = _run_planned(planned, deadline_s)
    found = [one.largest() for one in placements]
    stages = found if found and all(found) else []
    if stages:
        write_json_atomically(run.memory_path, {"stages": stages, "found_by": "dry run"}, sync=False)
    return stages, next((one.problem for one in placements if one.problem), None)


def _slots(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise LaunchError(
            f"--slots is {text!r}; expected numbers of devices of at least 1, like 1,4,8. Write them with commas."
        )
    return numbers


def _load(args: argparse.Namespace, num_slots: int | None) -> ExperimentConfig:
    return load_experiment(
        args.experiment, args.context_dir or ".", args.config, require_entrypoint=True, slots=num_slots
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    """A model on a number of devices, and the dry run that predicts its memory."""

    placement: Placement
    request: DryRunRequest | None = None  # None if the placement has a problem
    effective: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # DeepSpeed config with defaults
    replicas: int = 1
    is_accumulating: bool = False


def _planned_runs(args: argparse.Namespace, num_slots: int) -> list[_Planned]:
    from dstrial.dsat.predictor.model_memory import Placement

    try:
        experiment = _load(args, num_slots)
    except ConfigError as error:
        return [_Planned(Placement(num_slots, 0, None, str(error.problems[0])))]
    return _planned_of(experiment, num_slots)


def _settings_text(experiment: ExperimentConfig) -> str:
    checked = experiment.deepspeed_check
    effective = {} if checked is None else checked.effective
    stage = (effective.get("zero_optimization") or {}).get("stage", 0)
    kinds = [kind for kind in ("bf16", "fp16") if (effective.get(kind) or {}).get("enabled")]
    return f"ZeRO stage {stage} and {kinds[0] if kinds else 'float32'}"


def _planned_of(experiment: ExperimentConfig, num_slots: int) -> list[_Planned]:
    """Return one dry run per pipeline stage; a single one if there is no pipeline."""
    from dstrial.dsat.predictor.inputs import dry_run_request
    from dstrial.dsat.predictor.model_memory import Placement

    entrypoint = parse_entrypoint(experiment.entrypoint, str(experiment.path))
    _require_dry_runnable(experiment, entrypoint)
    checked = experiment.deepspeed_check
    assert experiment.deepspeed is not None  # ensured by _require_dry_runnable()
    merged = experiment.deepspeed.merged
    batch = None if checked is None else checked.batch
    num_stages = experiment.sizes.pp
    return [
        _Planned(
            Placement(
                num_slots,
                0 if batch is None else batch.train_micro_batch_size_per_gpu,
                None,
                stage=None if num_stages == 1 else stage,
            ),
            dry_run_request(
                entrypoint.trial or _python_words(entrypoint.words),
                Path(experiment.context_dir),
                experiment.hyperparameters,
                world_size=num_slots,
                exp_conf=experiment.raw,
                num_stages=num_stages,
                stage=stage,
            ),
            merged if checked is None else checked.effective,
            num_slots // num_stages,
            batch is not None and batch.gradient_accumulation_steps > 1,
        )
        for stage in range(num_stages)
    ]


def _run_planned(
    planned: Sequence[_Planned], deadline_s: float = _DEADLINE_S, capacity_bytes: float = math.inf
) -> list[Placement]:
    """Run each stage's dry run once; return predicted memory or problem per model."""
    from dstrial.engine.dryrun.process import dry_runs

    requests: dict[int | None, DryRunRequest] = {}
    for one in planned:
        if one.request is not None:
            requests.setdefault(one.placement.stage, one.request)
    found = dry_runs([*requests.values()], deadline_s=deadline_s, num_parallel=_NUM_PARALLEL)
    answers = dict(zip(requests, found, strict=True))
    return [
        one.placement
        if one.request is None
        else _with_result(one, answers[one.placement.stage], capacity_bytes)
        for one in planned
    ]


def _with_result(planned: _Planned, found: object, capacity_bytes: float) -> Placement:
    from dstrial.dsat.predictor.closed_form import zero_run
    from dstrial.dsat.predictor.features import ZeroFeatures
    from dstrial.dsat.predictor.plan import needed_memory
    from dstrial.engine.dryrun.values import ModelTrace

    placement = planned.placement
    if not isinstance(found, ModelTrace):
        return dataclasses.replace(placement, problem=f"{str(found).splitlines()[0]} {_MEASURE}")
    width = 2 if found.state_bytes["parameters"] <= 3 * found.parameters else 4
    zero = ZeroFeatures.from_config(planned.effective, replicas=planned.replicas, bytes_per_value=width)
    is_accumulating = planned.is_accumulating or placement.stage is not None
    run = zero_run(found, zero, is_accumulating=is_accumulating)
    size = placement.micro_batch_size or found.num_records
    need = needed_memory(run, zero, size, capacity_bytes)
    return dataclasses.replace(placement, run=run, micro_batch_size=size, need=need, notes=found.notes)


def _require_dry_runnable(experiment: ExperimentConfig, entrypoint: Entrypoint) -> None:
    where = f"{experiment.path}: entrypoint is {experiment.entrypoint!r}"
    checked = experiment.deepspeed_check
    if experiment.deepspeed is None or (entrypoint.trial and (checked is None or checked.batch is None)):
        raise LaunchError(
            f"{where}, without a hyperparameters.deepspeed_config that can be solved; expected one. Name there the file or "
            "the mapping that deepspeed.initialize is given."
        )
    sizes = config_sizes(experiment.deepspeed.merged)
    for path, key in CONFIG_KEYS.items():
        if sizes.get(key, 1) > 1:
            raise LaunchError(
                f"{experiment.path}: {path} is {sizes[key]}; expected 1, as a dry run has no groups of tensor- or "
                f"sequence-parallel ranks. {_MEASURE}"
            )
    if entrypoint.trial is None and not _python_words(entrypoint.words):
        raise LaunchError(
            f"{where}; expected a trial class or a Python script. A command that starts ranks itself or is no Python program "
            "cannot be dry-run: write `python3 -m dstrial.launch SCRIPT …`, or train with it, and read what the run has measured "
            "by `dstrial memory RUN_DIR`."
        )


def _python_words(words: Sequence[str]) -> list[str]:
    """Return a command's words from the script or ``-m`` on; [] unless it is Python."""
    is_interpreter = bool(words) and Path(words[0]).name.startswith("python")
    rest = list(words[1:] if is_interpreter else words)
    is_script = bool(rest) and (rest[0].endswith(".py") or (is_interpreter and rest[0] == "-m"))
    return rest if is_script else []
