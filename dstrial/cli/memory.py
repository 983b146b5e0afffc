"""``dstrial memory``: predict a model's memory by a dry run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.experiment_arguments import add_experiment_arguments, parse_entrypoint
from dstrial.cli.streams import print_json, text_table
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.config.parallel_dims import CONFIG_KEYS, config_sizes
from dstrial.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.dsat.predictor.model_memory import Placement
    from dstrial.engine.dryrun.values import DryRunRequest

_GIB = 2**30
_NUM_PARALLEL = 2  # dry runs at the same time
_MEASURE = "Train some batches: the summary of `dstrial run` shows the measured memory."


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "memory",
        description="Predict the memory of one device, or of one device per pipeline stage: parameters, gradients, optimizer, "
        "activations and buffers. The command trains one step as one rank of N simulated ranks, on tensors without memory, and "
        "needs no accelerator.",
    )
    add_experiment_arguments(parser)
    parser.add_argument(
        "--slots",
        metavar="N,…",
        default="1,4,8",
        help="numbers of devices to predict for (default: %(default)s)",
    )
    parser.add_argument(
        "--device-gib",
        type=float,
        default=80.0,
        metavar="GIB",
        help="memory of one device in GiB (default: 80)",
    )

    parser.add_argument("--deadline", type=float, default=900.0, metavar="S", help="time limit in seconds")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print the predicted memory; return 0 if any prediction succeeded, else 1."""
    from dstrial.dsat.predictor.model_memory import answer, table, table_unit

    began_s = time.monotonic()
    settings_text = _settings_text(_load(args, None))
    capacity_bytes = args.device_gib * _GIB
    planned = [one for num_slots in _slots(args.slots) for one in _planned_runs(args, num_slots)]
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
        print_json({"answer": lines, "devices": rows, "seconds": seconds})
    else:
        header, *cells = table(placements, capacity_bytes)
        sys.stdout.write("\n".join([*lines, "", text_table(header, cells, right=range(len(header)))]))
        problems = [f"{one.num_slots} device(s): {one.problem}" for one in placements if one.problem]
        unit = f"{table_unit(placements)} of one device; predicted in {seconds:.0f} s"
        notes = dict.fromkeys(note for one in placements for note in one.notes)
        sys.stdout.writelines(f"{line}\n" for line in (*problems, unit, *notes))
    return 0 if any(one.run is not None for one in placements) else 1


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
        args.experiment, args.context_dir, args.config, require_entrypoint=True, slots=num_slots
    )


def _settings_text(experiment: ExperimentConfig) -> str:
    effective = {} if experiment.deepspeed_check is None else experiment.deepspeed_check.effective
    stage = (effective.get("zero_optimization") or {}).get("stage", 0)
    kinds = [kind for kind in ("bf16", "fp16") if (effective.get(kind) or {}).get("enabled")]
    return f"ZeRO stage {stage} and {kinds[0] if kinds else 'float32'}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    """A prediction to make: a model, or one pipeline stage, on a number of devices."""

    placement: Placement
    experiment: ExperimentConfig | None  # None if the placement has a problem


def _planned_runs(args: argparse.Namespace, num_slots: int) -> list[_Planned]:
    """Return the predictions for ``num_slots`` devices, one per pipeline stage.

    If the config is invalid for this number of devices, the only item has the problem.
    """
    from dstrial.dsat.predictor.model_memory import Placement

    try:
        experiment = _load(args, num_slots)
    except ConfigError as error:
        return [_Planned(Placement(num_slots, 0, None, str(error.problems[0])), None)]
    _require_dry_runnable(experiment)
    checked = experiment.deepspeed_check
    size = 0 if checked is None or checked.batch is None else checked.batch.train_micro_batch_size_per_gpu
    stages = [None] if experiment.sizes.pp == 1 else range(experiment.sizes.pp)
    return [_Planned(Placement(num_slots, size, None, stage=stage), experiment) for stage in stages]


def _run_planned(planned: Sequence[_Planned], deadline_s: float, capacity_bytes: float) -> list[Placement]:
    """Make each dry run that ``planned`` needs; return a result for each prediction.

    Predictions for one pipeline stage share a dry run. ``deadline_s`` limits all dry runs together. ``capacity_bytes`` is one
    device's memory.
    """
    from dstrial.engine.dryrun.process import dry_runs

    requests: dict[int | None, DryRunRequest] = {}
    for one in planned:
        if one.experiment is not None and one.placement.stage not in requests:
            requests[one.placement.stage] = _request(one.placement, one.experiment)
    found = dry_runs([*requests.values()], deadline_s=deadline_s, num_parallel=_NUM_PARALLEL)
    answers = dict(zip(requests, found, strict=True))
    return [
        one.placement
        if one.experiment is None
        else _with_result(one.placement, one.experiment, answers[one.placement.stage], capacity_bytes)
        for one in planned
    ]


def _request(placement: Placement, experiment: ExperimentConfig) -> DryRunRequest:
    from dstrial.dsat.predictor.inputs import dry_run_request

    entrypoint = parse_entrypoint(experiment.entrypoint, str(experiment.path))
    return dry_run_request(
        entrypoint.trial or _python_words(entrypoint.words),
        Path(experiment.context_dir),
        experiment.hyperparameters,
        world_size=placement.num_slots,
        exp_conf=experiment.raw,
        num_stages=experiment.sizes.pp,
        stage=placement.stage or 0,
    )


def _with_result(
    placement: Placement, experiment: ExperimentConfig, found: object, capacity_bytes: float
) -> Placement:
    from dstrial.dsat.predictor.closed_form import zero_run
    from dstrial.dsat.predictor.features import ZeroFeatures
    from dstrial.dsat.predictor.plan import needed_memory
    from dstrial.engine.dryrun.values import ModelTrace

    if not isinstance(found, ModelTrace):
        return dataclasses.replace(placement, problem=f"{str(found).splitlines()[0]} {_MEASURE}")
    checked = experiment.deepspeed_check
    assert experiment.deepspeed is not None  # ensured by _require_dry_runnable()
    width = 2 if found.state_bytes["parameters"] <= 3 * found.parameters else 4
    zero = ZeroFeatures.from_config(
        experiment.deepspeed.merged if checked is None else checked.effective,
        replicas=placement.num_slots // experiment.sizes.pp,
        bytes_per_value=width,
    )
    batch = None if checked is None else checked.batch
    accumulates = batch is not None and batch.gradient_accumulation_steps > 1
    run = zero_run(found, zero, is_accumulating=accumulates or placement.stage is not None)
    size = placement.micro_batch_size or found.num_records
    need = needed_memory(run, zero, size, capacity_bytes)
    return dataclasses.replace(placement, run=run, micro_batch_size=size, need=need, notes=found.notes)


def _require_dry_runnable(experiment: ExperimentConfig) -> None:
    entrypoint = parse_entrypoint(experiment.entrypoint, str(experiment.path))
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
            f"{where}; expected a trial class or a Python script. Write `python3 -m dstrial.launch SCRIPT …`. {_MEASURE}"
        )


def _python_words(words: Sequence[str]) -> list[str]:
    """Return the script or ``-m`` module of a command, and all words after it.

    The interpreter is stripped. [] is returned if the command starts neither a Python script nor a module.
    """
    is_interpreter = bool(words) and Path(words[0]).name.startswith("python")
    rest = list(words[1:] if is_interpreter else words)
    is_script = bool(rest) and (rest[0].endswith(".py") or (is_interpreter and rest[0] == "-m"))
    return rest if is_script else []
