"""Experiment configs of measuring trials, and of the full experiment. Pure."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrial.config.dotted_keys import nested
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.candidate import Candidate, layered
from dstrial.dsat.methods import METHODS
from dstrial.local.script_variables import AROUND_FIT_KEY, BENCHMARK_KEY, MEASURING_KEY, SETTINGS_KEY

_MEASURING_MODULE = "dstrial.dsat.rank"
_SCRIPT_MODULE = "dstrial.dsat.rank.standalone_script"
_RANKS_MODULE = "dstrial.dsat.rank.rank_server"
_SEARCH_MODULE = "dstrial.dsat.search_trial"
_LAUNCHER = "dstrial.launch"
_LAUNCH_MODULES = (
    _LAUNCHER,
    "determined.launch.deepspeed",
    "determined.launch.torch_distributed",
)
_AROUND_FIT = "dstrial.dsat.rank.context:around_fit"
RESULTS_DIRECTORY = "dsat_results"  # in the context of the experiment that keeps them
RESULTS_EXPERIMENT: Mapping[str, Any] = MappingProxyType(
    {
        "searcher": {"name": "single", "max_length": {"batches": 1}},
        "max_restarts": 0,
        "resources": {"slots_per_trial": 0},
        "entrypoint": "python3 -m dstrial.dsat.keep_results",
    }
)
"""The experiment whose checkpoint holds the results of launched trials."""
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
    """A measuring trial that is to be started."""

    trial_id: int
    config: dict[str, Any]
    hparams: dict[str, Any]  # as a trial reads them
    label: str  # unique per trial and search; finds the trial again
    # hyperparameters and metrics of the best so far
    best: tuple[dict[str, Any], dict[str, float]] | None = None


def measuring_spec(settings: SearchConfig, candidate: Candidate, trial_id: int, search_id: str) -> TrialSpec:
    """Return the ``single`` experiment without restarts that measures a candidate."""
    hparams = _hyperparameters(settings, candidate)
    flags = settings.flags
    hparams[MEASURING_KEY] = True
    hparams[AROUND_FIT_KEY] = _AROUND_FIT
    num_batches = max(flags.end_profile_step + 1, _LONGEST_STEPS)
    hparams[SETTINGS_KEY] = {
        "first_step": flags.start_profile_step,
        "min_steps": flags.end_profile_step + 1,
        "max_s": flags.measure_seconds,
        "num_batches": num_batches,
    }
    if METHODS[settings.method].predicts and trial_id <= _BENCHMARKED:
        hparams[SETTINGS_KEY][BENCHMARK_KEY] = True
    label = f"dsat-{search_id}-{trial_id}"
    config = {
        **measured_config(settings),
        **_single(settings, label, f"dsat trial {trial_id}", settings.space.describe(candidate), num_batches),
        "entrypoint": _measuring_entrypoint(settings),
        "hyperparameters": hparams,
    }
    config = _with_stages(config, settings, candidate)
    return TrialSpec(trial_id, config, _concrete(settings, hparams), label)


def search_config(settings: SearchConfig, search_id: str) -> TrialSpec:
    """Return the ``single`` experiment whose trial is a search.

    It keeps the user's ``max_restarts``, which only a trial that ends as a whole uses up: ranks are started again within it.
    """
    label = f"dsat-{search_id}-search"
    does = "measures one configuration after the other"
    single = _single(settings, label, "dsat search", does, settings.options.max_trials)
    del single["max_restarts"]
    config = {**measured_config(settings), **single, "entrypoint": f"python3 -m {_SEARCH_MODULE}"}
    return TrialSpec(0, config, {}, label)


def results_config(settings: SearchConfig, search_id: str) -> TrialSpec:
    """Return the ``single`` experiment without slots whose checkpoint keeps results."""
    written = copy.deepcopy(settings.written)
    label = f"dsat-{search_id}-results"
    names = ("checkpoint_storage", "project", "workspace", "environment", "bind_mounts")
    single = _single(settings, label, "dsat results", "keeps the results of the search in a checkpoint", 1)
    config = {
        **{name: written[name] for name in names if name in written},
        **RESULTS_EXPERIMENT,
        **single,
        "searcher": {**RESULTS_EXPERIMENT["searcher"], **single["searcher"]},
    }
    return TrialSpec(0, config, {}, label)


def measured_config(settings: SearchConfig) -> dict[str, Any]:
    """Return the experiment without what only a training has."""
    config = copy.deepcopy(settings.written)
    for key in _OF_TRAINING:
        config.pop(key, None)
    return config


def _single(settings: SearchConfig, label: str, name: str, does: str, num_batches: int) -> dict[str, Any]:
    """Return the fields that all ``single`` experiments of a search have."""
    return {
        "name": f"{settings.experiment.name} ({name})",
        "description": f"dsat {settings.method}: {does}"[:200],
        "labels": sorted({*(str(one) for one in settings.written.get("labels") or []), "dsat", label}),
        "searcher": {
            "name": "single",
            "metric": settings.flags.metric,
            "smaller_is_better": settings.smaller_is_better,
            "max_length": {"batches": num_batches},
        },
        "max_restarts": 0,
    }


def ranks_command(settings: SearchConfig, config_path: str | None, python: str) -> list[str]:
    """Return what launches ranks that live on; in a trial its cluster says how many."""
    assert settings.trial is not None
    where = [] if config_path is None else ["--config", config_path, "--context-dir", "."]
    slots = [] if config_path is None else ["--slots", str(settings.num_slots)]
    launch = [python, "-m", _LAUNCHER, *slots, *where]
    return [*launch, "-m", _RANKS_MODULE, "--trial", settings.trial, *where]


def full_config(settings: SearchConfig, candidate: Candidate) -> dict[str, Any]:
    """Return the experiment config with the best configuration, without autotuning."""
    config = copy.deepcopy(settings.written)
    config["hyperparameters"] = _hyperparameters(settings, candidate)
    return _with_stages(config, settings, candidate)


def _with_stages(config: dict[str, Any], settings: SearchConfig, candidate: Candidate) -> dict[str, Any]:
    """Write a candidate's number of pipeline stages where the experiment has its own."""
    if settings.space.stages_path is None:
        return config
    num_stages = settings.space.sizes_of(candidate).pp
    return layered(config, {"data": {"dstrial": {"pipeline_stages": num_stages}}})


def local_command(settings: SearchConfig, config_path: str, python: str) -> list[str]:
    if settings.trial is None:
        return local_training_command(settings, config_path, python)
    where = ["--config", config_path, "--context-dir", "."]
    launch = [python, "-m", _LAUNCHER, "--slots", str(settings.num_slots), *where]
    return [*launch, "-m", _MEASURING_MODULE, "--trial", settings.trial, *where]


def local_training_command(settings: SearchConfig, config_path: str, python: str) -> list[str]:
    launch = [python, "-m", _LAUNCHER, "--slots", str(settings.num_slots)]
    launch += ["--config", config_path, "--context-dir", "."]
    if settings.trial is not None:
        return [*launch, "--trial", settings.trial]
    words = python_words(settings.experiment.entrypoint)
    is_python = words[0] == "-m" or words[0].endswith(".py")
    return [*launch, *(["-m", _SCRIPT_MODULE] if is_python else []), *words]


def _measuring_entrypoint(settings: SearchConfig) -> Any:
    given = settings.experiment.entrypoint
    if settings.trial is None:
        return given
    return f"python3 -m {_LAUNCHER} -m {_MEASURING_MODULE} --trial {settings.trial}"


def script_words(entrypoint: str | Sequence[str] | None) -> list[str]:
    """Return the script and its arguments, without interpreter and launcher."""
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


def python_words(entrypoint: str | Sequence[str] | None) -> list[str]:
    """Return the script or ``-m MODULE``, and its arguments, without ``python``."""
    words = script_words(entrypoint)
    return words[1:] if len(words) > 1 and Path(words[0]).name.startswith("python") else words


def _hyperparameters(settings: SearchConfig, candidate: Candidate) -> dict[str, Any]:
    hparams = dict(copy.deepcopy(settings.written.get("hyperparameters") or {}))
    hparams = layered(hparams, candidate.hyperparameters())
    # A dotted key beside the candidate's nested one would be the same value twice.
    before = nested(hparams.get("overwrite_deepspeed_args") or {})
    hparams["overwrite_deepspeed_args"] = layered(before, candidate.overwrite())
    return hparams


def _concrete(settings: SearchConfig, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as a trial reads them: ``{type: const}`` as its value."""
    values = copy.deepcopy(settings.experiment.hyperparameters)
    return layered(
        values,
        {
            key: value
            for key, value in hparams.items()
            if not (isinstance(value, Mapping) and value.get("type") == "const")
        },
    )
