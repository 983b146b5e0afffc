"""What ``dstrial memory`` has dry-run for an experiment.

That is a trial, each stage of a pipeline, or a script up to its first batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.cli.run_entrypoint import Entrypoint, parse_entrypoint
from dstrial.config import ExperimentConfig
from dstrial.config.dotted_keys import dstrial_section
from dstrial.errors import LaunchError

if TYPE_CHECKING:
    from dstrial.dsat.predictor.model_memory import Placement
    from dstrial.engine.dryrun.values import DryRunRequest

DEADLINE_S = 900.0
NUM_PARALLEL = 2

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def requests_of(
    experiment: ExperimentConfig, num_slots: int, device_bytes: int
) -> list[tuple[Placement, DryRunRequest]]:
    """Return what is to be predicted on so many devices.

    That is one placement, or one for each stage.

    Args:
        experiment: checked for so many slots.
        num_slots: devices.
        device_bytes: memory of one.

    Raises:
        LaunchError: the entrypoint cannot be dry-run.
        ConfigError: there is none.
    """
    from dstrial.dsat.predictor.dry_run_requests import script_request, trial_request
    from dstrial.dsat.predictor.model_memory import Placement

    entrypoint = parse_entrypoint(experiment.entrypoint, str(experiment.path))
    _require_describable(experiment, entrypoint)
    checked = experiment.deepspeed_check
    assert experiment.deepspeed is not None  # it is describable
    batch = None if checked is None else checked.batch
    solved = {} if batch is None else {key: getattr(batch, key) for key in _BATCH_KEYS}
    config = {
        key: value
        for key, value in {**experiment.deepspeed.merged, **solved}.items()
        if not (key in _BATCH_KEYS and value == "auto")
    }
    micro_batch_size = 0 if batch is None else batch.train_micro_batch_size_per_gpu
    context_dir = Path(experiment.context_dir)
    shared: dict[str, Any] = {
        "world_size": num_slots,
        "target": "cuda",
        "exp_conf": experiment.raw,
        "device_bytes": device_bytes,
    }
    if entrypoint.trial is None:
        words = _python_words(entrypoint.words)
        request = script_request(words, context_dir, experiment.hyperparameters, config, **shared)
        return [(Placement(num_slots, micro_batch_size, None), request)]
    num_stages = int(dstrial_section(experiment.raw).get("pipeline_stages") or 1)
    stages = [None] if num_stages == 1 else list(range(num_stages))
    return [
        (
            Placement(num_slots, micro_batch_size, None, stage=stage),
            trial_request(
                entrypoint.trial,
                context_dir,
                experiment.hyperparameters,
                config,
                num_stages=num_stages,
                stage=stage or 0,
                **shared,
            ),
        )
        for stage in stages
    ]


def predicted(
    asked: Sequence[tuple[Placement, DryRunRequest | None]], deadline_s: float = DEADLINE_S
) -> list[Placement]:
    """Dry-run all requests; return their placements, or why there are none.

    The placements come with what was found.
    """
    from dstrial.engine.dryrun.process import dry_runs

    requests = [request for _, request in asked if request is not None]
    found = iter(dry_runs(requests, deadline_s=deadline_s, num_parallel=NUM_PARALLEL))
    return [made if request is None else _placed(made, next(found)) for made, request in asked]


def _placed(made: Placement, found: object) -> Placement:
    from dstrial.engine.dryrun.values import DryRunResult

    if isinstance(found, DryRunResult):
        size = made.micro_batch_size or found.num_records
        return dataclasses.replace(made, run=found, micro_batch_size=size)
    return dataclasses.replace(made, problem=str(found).splitlines()[0])


def _require_describable(experiment: ExperimentConfig, entrypoint: Entrypoint) -> None:
    where = f"{experiment.path}: entrypoint is {experiment.entrypoint!r}"
    checked = experiment.deepspeed_check
    if experiment.deepspeed is None or (entrypoint.trial and (checked is None or checked.batch is None)):
        raise LaunchError(
            f"{where}, without a hyperparameters.deepspeed_config that can be solved; expected one. Name there the file or "
            "the mapping that deepspeed.initialize is given."
        )
    if entrypoint.trial is None and not _python_words(entrypoint.words):
        raise LaunchError(
            f"{where}; expected a trial class or a Python script. A command that starts ranks itself or is no Python program "
            "cannot be dry-run: write `python3 -m dstrial.launch SCRIPT …`, or train with it, and read what the run has measured "
            "by `dstrial memory RUN_DIR`."
        )


def _python_words(words: Sequence[str]) -> list[str]:
    """Return the script or ``-m MODULE``, and its arguments.

    Returns nothing where it is no Python program.
    """
    is_interpreter = bool(words) and Path(words[0]).name.startswith("python")
    rest = list(words[1:] if is_interpreter else words)
    is_script = bool(rest) and (rest[0].endswith(".py") or (is_interpreter and rest[0] == "-m"))
    return rest if is_script else []
