"""Configs and commands of a search's trials and of the final, full training."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.config.documents import yaml_text
from dstrial.config.secrets import SecretNames, secrets_in
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.candidate import Candidate, layered
from dstrial.dsat.core.outcome import smaller_is_better
from dstrial.dsat.methods import PREDICT
from dstrial.file_writes import replace_file
from dstrial.local.script_variables import AROUND_FIT_KEY, BENCHMARK_KEY, MEASURING_KEY, SETTINGS_KEY

# Modules that entrypoints and commands name.
_SCRIPT_MODULE = "dstrial.dsat.rank.standalone_script"
_SEARCH_MODULE = "dstrial.dsat.search_trial"
_LAUNCHER = "dstrial.launch"
_LAUNCH_MODULES = (_LAUNCHER, "determined.launch.deepspeed", "determined.launch.torch_distributed")
_AROUND_FIT = "dstrial.dsat.rank.context:around_fit"
_MAX_STEPS = 10_000  # least length of the training of a script, in batches
_MAX_BATCHES = 1_000_000  # length of the training of a trial class; it ends when enough steps are measured
_BENCHMARKED_TRIALS = 2  # first trials that measure the machine's speed; two, because the first may fail
# Keys of an experiment config that matter only to a full training.
_TRAINING_KEYS = (
    "min_validation_period",
    "min_checkpoint_period",
    "checkpoint_policy",
    "perform_initial_validation",
    "records_per_epoch",
    "profiling",
)


@dataclasses.dataclass(frozen=True, slots=True)
class TrialSpec:
    """What a backend needs to start a trial: config, hyperparameters and label."""

    trial_id: int
    config: dict[str, Any]
    hparams: dict[str, Any]  # plain values, without ``type: const``
    label: str  # unique per trial and search, to find the trial again


def measuring_spec(settings: SearchConfig, candidate: Candidate, trial_id: int, search_id: str) -> TrialSpec:
    """Return the spec of a trial that measures ``candidate`` and is never restarted."""
    flags = settings.flags
    num_batches = _MAX_BATCHES if settings.trial else max(flags.end_profile_step + 1, _MAX_STEPS)
    measuring: dict[str, Any] = {
        "first_step": flags.start_profile_step,
        "min_steps": flags.end_profile_step + 1,
        "max_s": flags.measure_seconds,
        "num_batches": num_batches,
    }
    if settings.method == PREDICT and trial_id <= _BENCHMARKED_TRIALS:
        measuring[BENCHMARK_KEY] = True
    hparams = {
        **_hyperparameters(settings, candidate),
        MEASURING_KEY: True,
        AROUND_FIT_KEY: _AROUND_FIT,
        SETTINGS_KEY: measuring,
    }
    entrypoint = settings.experiment.entrypoint
    if settings.trial is not None:
        entrypoint = f"python3 -m {_LAUNCHER} --trial {settings.trial}"
    label = f"dsat-{search_id}-{trial_id}"
    config = {
        **measured_config(settings),
        **_single_experiment(
            settings, label, f"dsat trial {trial_id}", settings.space.describe(candidate), num_batches
        ),
        "entrypoint": entrypoint,
        "hyperparameters": hparams,
    }
    return TrialSpec(
        trial_id,
        _with_pipeline_stages(config, settings, candidate),
        _plain_hyperparameters(settings, hparams),
        label,
    )


def search_config(settings: SearchConfig, search_id: str) -> TrialSpec:
    """Return the spec of the one trial that runs a whole search.

    The user's ``max_restarts`` limits the restarts of this trial. The measurements that run inside it are never restarted.
    """
    label = f"dsat-{search_id}-search"
    does = "measures one configuration after the other"
    single = _single_experiment(settings, label, "dsat search", does, settings.options.max_trials)
    del single["max_restarts"]
    config = {**measured_config(settings), **single, "entrypoint": f"python3 -m {_SEARCH_MODULE}"}
    return TrialSpec(0, config, {}, label)


def measured_config(settings: SearchConfig) -> dict[str, Any]:
    """Return the user's experiment config without ``_TRAINING_KEYS``."""
    return {key: value for key, value in copy.deepcopy(settings.written).items() if key not in _TRAINING_KEYS}


def full_config(settings: SearchConfig, candidate: Candidate) -> dict[str, Any]:
    """Return the user's experiment config with the settings of ``candidate``."""
    config = copy.deepcopy(settings.written)
    config["hyperparameters"] = _hyperparameters(settings, candidate)
    return _with_pipeline_stages(config, settings, candidate)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write an experiment config; if it contains secrets, only the owner can read it."""
    replace_file(path, yaml_text(config), is_private=bool(secrets_in(config, SecretNames())))


def _single_experiment(
    settings: SearchConfig, label: str, name: str, does: str, num_batches: int
) -> dict[str, Any]:
    return {
        "name": f"{settings.experiment.name} ({name})",
        "description": f"dsat {settings.method}: {does}"[:200],
        "labels": sorted({*(str(one) for one in settings.written.get("labels") or []), "dsat", label}),
        "searcher": {
            "name": "single",
            "metric": settings.flags.metric,
            "smaller_is_better": smaller_is_better(settings.flags.metric),
            "max_length": {"batches": num_batches},
        },
        "max_restarts": 0,
    }


def _with_pipeline_stages(
    config: dict[str, Any], settings: SearchConfig, candidate: Candidate
) -> dict[str, Any]:
    if settings.space.stages_path is None:
        return config
    num_stages = settings.space.sizes_of(candidate).pp
    return layered(config, {"data": {"dstrial": {"pipeline_stages": num_stages}}})


def training_command(settings: SearchConfig, config_path: str, python: str) -> list[str]:
    """Return the command that trains or measures an experiment on this machine.

    ``config_path`` is the path of the experiment config; ``python`` is that of the interpreter.
    """
    launch = [python, "-m", _LAUNCHER, "--slots", str(settings.num_slots)]
    launch += ["--config", config_path, "--context-dir", "."]
    if settings.trial is not None:
        return [*launch, "--trial", settings.trial]
    words = python_words(settings.experiment.entrypoint)
    is_python = words[0] == "-m" or words[0].endswith(".py")
    return [*launch, *(["-m", _SCRIPT_MODULE] if is_python else []), *words]


def python_words(entrypoint: str | Sequence[str] | None) -> list[str]:
    """Return an entrypoint's script and its arguments, without Python and launcher."""
    words = shlex.split(entrypoint) if isinstance(entrypoint, str) else list(entrypoint or [])
    for idx in range(len(words) - 1):
        if words[idx] == "-m" and words[idx + 1] in _LAUNCH_MODULES:
            words = words[idx + 2 :]
            if "--" in words:
                words = words[words.index("--") + 1 :]
                break
            while words and words[0].startswith("--"):
                words = words[1 if "=" in words[0] else 2 :]
            break
    return words[1:] if len(words) > 1 and Path(words[0]).name.startswith("python") else words


def _hyperparameters(settings: SearchConfig, candidate: Candidate) -> dict[str, Any]:
    hparams = dict(copy.deepcopy(settings.written.get("hyperparameters") or {}))
    hparams = layered(hparams, candidate.hyperparameters())
    before = hparams.get("overwrite_deepspeed_args") or {}
    hparams["overwrite_deepspeed_args"] = layered(before, candidate.overwrite())
    return hparams


def _plain_hyperparameters(settings: SearchConfig, hparams: Mapping[str, Any]) -> dict[str, Any]:
    given = {
        key: value
        for key, value in hparams.items()
        if not (isinstance(value, Mapping) and value.get("type") == "const")
    }
    return layered(copy.deepcopy(settings.experiment.hyperparameters), given)
