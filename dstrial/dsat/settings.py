"""What a search was asked for, read and checked: all problems of flags and files at once. Starts nothing."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import ExperimentConfig, load_experiment
from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.documents import read_yaml
from dstrial.config.entrypoint import trial_spec
from dstrial.dsat.methods.method import MethodOptions
from dstrial.dsat.outcome import smaller_is_better
from dstrial.dsat.space import Space, read_space
from dstrial.errors import ConfigError, ConfigProblem

_FLAGS_OF_A_RUN = (
    "budget",
    "output",
    "fresh",
    "local",
    "run_full_experiment",
    "given",
    "command",
    "trial_timeout",
    "no_worker",
)
_AT_LEAST = {
    "max_trials": 1,
    "slots": 1,
    "per_machine": 1,
    "max_slots": 1,
    "max_concurrent_trials": 1,
    "end_profile_step": 0,
    "start_profile_step": 0,
    "random_seed": 0,
    "max_search_runner_restarts": 0,
    "train_batch_size": 1,
    "trials_per_random_config": 1,
    "early_stopping": 1,
    "max_rungs": 1,
    "min_binary_search_trials": 1,
    "divisor": 2,
    "asha_early_stopping": 0,
}


@dataclasses.dataclass(frozen=True, slots=True)
class SearchSettings:
    """A search that may be run.

    Attributes:
        method: its name.
        args: the parsed command line.
        experiment: the user's experiment.
        written: the experiment config as it is written, YAML values.
        space: what is searched.
        options: of the method.
        output: absolute directory of the search, before ``--fresh`` is considered.
        fingerprint: of everything that decides what is searched; equal for a command that may resume.
        warnings: doubtful things, as whole sentences.
    """

    method: str
    args: argparse.Namespace
    experiment: ExperimentConfig
    written: dict[str, Any]
    space: Space
    options: MethodOptions
    output: Path
    fingerprint: str
    warnings: tuple[str, ...]

    @property
    def context_dir(self) -> Path:
        """Directory of the model definition."""
        return self.experiment.context_dir

    @property
    def trial(self) -> str | None:
        """``module:Class`` of the entrypoint; None for a script."""
        return trial_spec(self.experiment.entrypoint)

    @property
    def num_slots(self) -> int:
        """Ranks of every trial, at least 1."""
        return max(self.experiment.slots_per_trial, 1)

    @property
    def smaller_is_better(self) -> bool:
        """Which way the metric is compared."""
        return smaller_is_better(self.args.metric)


def read_settings(args: argparse.Namespace) -> SearchSettings:
    """Read and check everything that a command line names.

    Raises:
        ConfigError: with all problems.
    """
    problems = _flag_problems(args)
    path, model_dir = Path(args.config_path), Path(args.model_dir)
    experiment: ExperimentConfig | None = None
    overrides = [] if args.train_batch_size is None else _batch_overrides(args.train_batch_size)
    if getattr(args, "slots", None) is not None:
        overrides.append(f"resources.slots_per_trial={args.slots}")
    try:
        experiment = load_experiment(path, model_dir, overrides, require_entrypoint=True)
    except ConfigError as error:
        problems += error.problems
    extra: dict[str, tuple[Any, ...]] = {}
    space: Space | None = None
    if experiment is not None:
        problems += _experiment_problems(args, experiment)
        try:
            if args.space is not None:
                extra = read_space(Path(args.space), experiment.hyperparameters)
            if experiment.deepspeed is not None:
                space = _space(args, experiment, extra)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    assert experiment is not None
    assert space is not None
    written: dict[str, Any] = copy.deepcopy(read_yaml(path, str(path)).value)
    output = Path(args.output or f"dsat/{_slug(experiment.name)}-{args.search_method}").absolute()
    return SearchSettings(
        method=args.search_method,
        args=args,
        experiment=experiment,
        written=written,
        space=space,
        options=_options(args),
        output=output,
        fingerprint=_fingerprint(args, experiment, extra),
        warnings=(*experiment.warnings, *_accepted(args)),
    )


def with_parallel(settings: SearchSettings, num_parallel: int) -> SearchSettings:
    """Return the settings for as many trials at the same time as there is room for."""
    return dataclasses.replace(
        settings, options=dataclasses.replace(settings.options, num_parallel=num_parallel)
    )


def _flag_problems(args: argparse.Namespace) -> list[ConfigProblem]:
    problems = []
    for name, least in _AT_LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            problems.append(
                ConfigProblem(flag, str(value), f"at least {least}", f"Set it to {least} or more.")
            )
    for name in ("search_range_factor", "measure_seconds"):
        value = getattr(args, name, None)
        if value is not None and value <= 0:
            flag = "--" + name.replace("_", "-")
            problems.append(
                ConfigProblem(flag, str(value), "a number above 0", "Set it to 1.0, for example.")
            )
    if args.start_profile_step > args.end_profile_step:
        problems.append(
            ConfigProblem(
                "--start-profile-step",
                str(args.start_profile_step),
                f"at most --end-profile-step ({args.end_profile_step})",
                "Lower it, or raise --end-profile-step.",
            )
        )
    if args.free_batch and args.train_batch_size is not None:
        fix = "Give one of the two."
        problems.append(
            ConfigProblem("--free-batch", "given with --train-batch-size", "only one of them", fix)
        )
    for path in args.include:
        if not Path(path).exists():
            problems.append(
                ConfigProblem("--include", str(path), "an existing file or directory", "Correct the path.")
            )
    return problems


def _experiment_problems(args: argparse.Namespace, experiment: ExperimentConfig) -> list[ConfigProblem]:
    problems = []
    where = str(experiment.path)
    if experiment.deepspeed is None:
        fix = "Add deepspeed_config: ds_config.json, and read it in the training code from there."
        problems.append(
            ConfigProblem(
                f"{where}: hyperparameters.{MAIN_KEY}", "not given", "the path of a DeepSpeed JSON file", fix
            )
        )
    slots = max(experiment.slots_per_trial, 1)
    if args.max_slots is not None and args.max_slots < slots:
        problems.append(
            ConfigProblem(
                "--max-slots",
                str(args.max_slots),
                f"at least {slots}, the slots_per_trial, without which no trial ever starts",
                f"Set it to {slots} or more.",
            )
        )
    named = experiment.hyperparameters.get(MAIN_KEY)
    for given in _named_in_entrypoint(experiment):
        if isinstance(named, str) and Path(given) != Path(named):
            problems.append(
                ConfigProblem(
                    f"{where}: entrypoint",
                    f"a command with --deepspeed {given}",
                    f"the file of hyperparameters.{MAIN_KEY} ({named}), which dsat changes",
                    "Name the same file in both.",
                )
            )
    return problems


def _named_in_entrypoint(experiment: ExperimentConfig) -> list[str]:
    """Return what follows ``--deepspeed`` and ``--deepspeed_config`` in the entrypoint; nothing for a bare flag."""
    given = experiment.entrypoint
    words = shlex.split(given) if isinstance(given, str) else list(given or [])
    found = []
    for idx, word in enumerate(words):
        flag, separator, value = word.partition("=")
        if flag not in ("--deepspeed", "--deepspeed_config"):
            continue
        if separator:
            found.append(value)
        elif idx + 1 < len(words) and not words[idx + 1].startswith("-"):
            found.append(words[idx + 1])
    return found


def _space(
    args: argparse.Namespace, experiment: ExperimentConfig, extra: Mapping[str, tuple[Any, ...]]
) -> Space:
    assert experiment.deepspeed is not None
    return Space(
        experiment.deepspeed.merged,
        experiment.sizes,
        stages=tuple(args.zero_stages),
        train_batch_size=args.train_batch_size,
        free_batch=args.free_batch,
        extra=extra,
    )


def _batch_overrides(train_batch_size: int) -> list[str]:
    above = "hyperparameters.overwrite_deepspeed_args"
    return [f"{above}.train_batch_size={train_batch_size}", f"{above}.gradient_accumulation_steps=null"]


def _options(args: argparse.Namespace) -> MethodOptions:
    names = {field.name for field in dataclasses.fields(MethodOptions)} - {
        "num_parallel",
        "seed",
        "range_factor",
    }
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return MethodOptions(
        seed=args.random_seed, range_factor=getattr(args, "search_range_factor", 1.0), **given
    )


def _fingerprint(
    args: argparse.Namespace, experiment: ExperimentConfig, extra: Mapping[str, tuple[Any, ...]]
) -> str:
    flags = {name: value for name, value in vars(args).items() if name not in _FLAGS_OF_A_RUN}
    flags["config_path"], flags["model_dir"] = experiment.path.name, experiment.context_dir.resolve().name
    content = [
        flags,
        experiment.raw,
        experiment.deepspeed.merged if experiment.deepspeed else None,
        dict(extra),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _accepted(args: argparse.Namespace) -> list[str]:
    warnings = []
    for name in ("search_runner_config", "max_search_runner_restarts"):
        if name in args.given:
            flag = "--" + name.replace("_", "-")
            warnings.append(
                f"{flag} is accepted and has no effect: the search runs in this process, not in a trial"
            )
    if args.free_batch:
        warnings.append(
            "--free-batch lets the global batch change with the micro batch: what is learned per step changes, and the "
            "learning rate must be chosen anew for the batch that is found"
        )
    return warnings


def _slug(name: str) -> str:
    kept = "".join(char if char.isalnum() or char in "._-" else "-" for char in name)
    return kept.strip("-.")[:80] or "experiment"
