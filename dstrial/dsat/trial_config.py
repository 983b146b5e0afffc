"""The experiment config of a measuring trial, and of the full experiment with the best configuration. Pure."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.candidate import Candidate, layered
from dstrial.dsat.settings import SearchSettings

_SETTINGS_KEY = "_dsat"
_MEASURING_MODULE = "dstrial.dsat.trial"
_WORKER_MODULE = "dstrial.dsat.worker"
_LAUNCHER = "dstrial.launch"
_LAUNCH_MODULES = (
    _LAUNCHER,
    "determined.launch.deepspeed",
    "determined.launch.torch_distributed",
)
_AROUND_FIT_KEY = "_around_fit"  # dstrial.trainer's, which is not imported for its torch
_AROUND_FIT = "dstrial.dsat.trial.reporting:around_fit"
_LONGEST_STEPS = 1000
_BENCHMARKED = 2  # the second one too, for the first may fail
_OF_TRAINING = (
    "min_validation_period",
    "min_checkpoint_period",
    "checkpoint_policy",
    "scheduling_unit",
    "perform_initial_validation",
    "records_per_epoch",
    "profiling",
)


@dataclasses.dataclass(frozen=True, slots=True)
class TrialSpec:
    """A measuring trial that is to be started.

    Attributes:
        trial_id: the search's number of it.
        config: its experiment config, YAML values.
        hparams: its hyperparameters, as a trial reads them.
        label: unique for this trial of this search, by which it is found again.
        deadline_s: it is ended after so many seconds; None where the driver sees to that itself.
    """

    trial_id: int
    config: dict[str, Any]
    hparams: dict[str, Any]
    label: str
    deadline_s: float | None = None


def measuring_spec(
    settings: SearchSettings, candidate: Candidate, trial_id: int, search_id: str
) -> TrialSpec:
    """Return what is submitted to measure a candidate: one ordinary ``single`` experiment that is never restarted."""
    config = copy.deepcopy(settings.written)
    for key in _OF_TRAINING:
        config.pop(key, None)
    hparams = _hyperparameters(settings, candidate)
    args = settings.args
    hparams["_use_dsat_mode"] = True
    hparams[_AROUND_FIT_KEY] = _AROUND_FIT
    hparams[_SETTINGS_KEY] = {
        "min_steps": args.end_profile_step + 1,
        "max_s": args.measure_seconds,
    }
    if settings.method == "predict" and trial_id <= _BENCHMARKED:
        hparams[_SETTINGS_KEY]["benchmarks_machine"] = True
    label = f"dsat-{search_id}-{trial_id}"
    config |= {
        "name": f"{settings.experiment.name} (dsat trial {trial_id})",
        "description": f"dsat {settings.method}: {settings.space.describe(candidate)}"[:200],
        "labels": sorted({*(str(one) for one in config.get("labels") or []), "dsat", label}),
        "entrypoint": _measuring_entrypoint(settings),
        "hyperparameters": hparams,
        "searcher": {
            "name": "single",
            "metric": args.metric,
            "smaller_is_better": settings.smaller_is_better,
            "max_length": {"batches": max(args.end_profile_step + 1, _LONGEST_STEPS)},
        },
        "max_restarts": 0,
    }
    return TrialSpec(trial_id, config, _concrete(settings, hparams), label)


def worker_config(settings: SearchSettings, worker: int, search_id: str) -> TrialSpec:
    """Return what is submitted to have a living worker: one ordinary ``single`` experiment that is never restarted.

    Args:
        settings: of the search.
        worker: its number, from 1.
        search_id: of the search.
    """
    assert settings.trial is not None
    config = copy.deepcopy(settings.written)
    for key in _OF_TRAINING:
        config.pop(key, None)
    label = f"dsat-{search_id}-worker-{worker}"
    config |= {
        "name": f"{settings.experiment.name} (dsat worker {worker})",
        "description": f"dsat {settings.method}: measures one configuration after the other",
        "labels": sorted({*(str(one) for one in config.get("labels") or []), "dsat", label}),
        "entrypoint": f"python3 -m {_LAUNCHER} -m {_WORKER_MODULE} --trial {settings.trial}",
        "searcher": {
            "name": "single",
            "metric": settings.args.metric,
            "smaller_is_better": settings.smaller_is_better,
            "max_length": {"batches": settings.options.max_trials},
        },
        "max_restarts": 0,
    }
    return TrialSpec(0, config, {}, label)


def worker_command(settings: SearchSettings, config_path: str, mailbox: str, python: str) -> list[str]:
    """Return the command of a worker on this machine, to be started in the context directory."""
    assert settings.trial is not None
    where = ["--config", config_path, "--context-dir", "."]
    launch = [python, "-m", _LAUNCHER, "--slots", str(settings.num_slots), *where]
    return [*launch, "-m", _WORKER_MODULE, "--trial", settings.trial, *where, "--mailbox", mailbox]


def full_config(settings: SearchSettings, candidate: Candidate) -> dict[str, Any]:
    """Return the user's experiment config with the best configuration in it; nothing of autotuning."""
    config = copy.deepcopy(settings.written)
    config["hyperparameters"] = _hyperparameters(settings, candidate)
    return config


def local_command(settings: SearchSettings, config_path: str, python: str) -> list[str]:
    """Return the command that runs a measuring trial on this machine, to be started in the context directory."""
    launch = [python, "-m", _LAUNCHER, "--slots", str(settings.num_slots)]
    if settings.trial is not None:
        launch += ["--config", config_path, "--context-dir", "."]
        where = ["--config", config_path, "--context-dir", "."]
        return [*launch, "-m", _MEASURING_MODULE, "--trial", settings.trial, *where]
    return [*launch, *script_words(settings.experiment.entrypoint)]


def _measuring_entrypoint(settings: SearchSettings) -> Any:
    given = settings.experiment.entrypoint
    if settings.trial is None:
        return given
    return f"python3 -m {_LAUNCHER} -m {_MEASURING_MODULE} --trial {settings.trial}"


def script_words(entrypoint: str | Sequence[str] | None) -> list[str]:
    """Return the script and its arguments, without the interpreter and a launcher before them."""
    words = shlex.split(entrypoint) if isinstance(entrypoint, str) else list(entrypoint or [])
    for idx in range(len(words) - 1):
        if words[idx] == "-m" and words[idx + 1] in _LAUNCH_MODULES:
            rest = words[idx + 2 :]
            if "--" in rest:
                return rest[rest.index("--") + 1 :]
            while rest and rest[0].startswith("--") and rest[0] != "-m":
                rest = rest[1 if "=" in rest[0] else 2 :]
            return rest
    return words


def _hyperparameters(settings: SearchSettings, candidate: Candidate) -> dict[str, Any]:
    hparams = dict(copy.deepcopy(settings.written.get("hyperparameters") or {}))
    hparams = layered(hparams, candidate.hyperparameters())
    before = hparams.get("overwrite_deepspeed_args") or {}
    hparams["overwrite_deepspeed_args"] = layered(before, candidate.overwrite())
    return hparams


def _concrete(settings: SearchSettings, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as a trial reads them: constants that are written ``{type: const}`` as their values."""
    values = copy.deepcopy(settings.experiment.hyperparameters)
    return layered(
        values,
        {
            key: value
            for key, value in hparams.items()
            if not (isinstance(value, Mapping) and value.get("type") == "const")
        },
    )
