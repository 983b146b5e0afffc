"""Read and check what a search was asked for, all problems at once."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import ExperimentConfig, load_experiment
from dstrial.config.auto_values import DEFAULT_MICRO_BATCH, SIZE_FLAGS, AutoValues
from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics
from dstrial.config.documents import read_yaml
from dstrial.config.experiment_config.entrypoint import trial_spec
from dstrial.config.experiment_config.script_source import find_script
from dstrial.dsat.config_checks import (
    accepted,
    experiment_problems,
    flag_problems,
    read_space,
    values_refused,
)
from dstrial.dsat.core.outcome import smaller_is_better
from dstrial.dsat.flags import SearchFlags
from dstrial.dsat.methods import METHODS
from dstrial.dsat.methods.base import MethodOptions
from dstrial.dsat.space.space import Space
from dstrial.errors import ConfigError, ConfigProblem


@dataclasses.dataclass(frozen=True, slots=True)
class SearchConfig:
    """A search that may be run."""

    method: str
    flags: SearchFlags
    experiment: ExperimentConfig
    written: dict[str, Any]  # the experiment config as written, YAML values
    space: Space
    options: MethodOptions
    output: Path  # absolute, before ``--fresh`` is considered
    fingerprint: str  # of everything that decides what is searched; equal for a command that may resume
    warnings: tuple[str, ...]

    @property
    def context_dir(self) -> Path:
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
        return smaller_is_better(self.flags.metric)


def read_config(flags: SearchFlags) -> SearchConfig:
    """Read and check all that a command line names; raise all problems at once."""
    problems = flag_problems(flags)
    path, model_dir = Path(flags.config_path), Path(flags.model_dir)
    experiment: ExperimentConfig | None = None
    overrides = [] if flags.train_batch_size is None else _batch_overrides(flags.train_batch_size)
    if flags.slots is not None:
        overrides.append(f"resources.slots_per_trial={flags.slots}")
    try:
        experiment = load_experiment(path, model_dir, overrides, require_entrypoint=True)
    except ConfigError as error:
        problems += error.problems
    extra: dict[str, tuple[Any, ...]] = {}
    space: Space | None = None
    assumed: tuple[str, ...] = ()
    doubtful: list[str] = []
    if experiment is not None:
        problems += experiment_problems(flags, experiment)
        try:
            if flags.space is not None:
                extra = read_space(Path(flags.space), experiment.hyperparameters)
            if experiment.deepspeed is not None:
                base, assumed = with_batch_sizes(experiment)
                space = _space(flags, base, experiment, extra)
                refused, doubtful = values_refused(flags, space)
                problems += refused
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    assert experiment is not None
    assert space is not None
    written: dict[str, Any] = copy.deepcopy(read_yaml(path, str(path)).value)
    output = Path(flags.output or f"dsat/{_slug(experiment.name)}-{flags.search_method}").absolute()
    return SearchConfig(
        method=flags.search_method,
        flags=flags,
        experiment=experiment,
        written=written,
        space=space,
        options=_options(flags),
        output=output,
        fingerprint=_fingerprint(flags, experiment, extra),
        warnings=(*experiment.warnings, *assumed, *accepted(flags), *doubtful),
    )


def with_parallel(settings: SearchConfig, num_parallel: int) -> SearchConfig:
    return dataclasses.replace(
        settings, options=dataclasses.replace(settings.options, num_parallel=num_parallel)
    )


def _space(
    flags: SearchFlags,
    base: Mapping[str, Any],
    experiment: ExperimentConfig,
    extra: Mapping[str, tuple[Any, ...]],
) -> Space:
    return Space(
        base,
        experiment.sizes,
        stages=tuple(flags.zero_stages),
        train_batch_size=flags.train_batch_size,
        free_batch=flags.free_batch,
        extra=extra,
        hyperparameters=experiment.hyperparameters,
    )


def _batch_overrides(train_batch_size: int) -> list[str]:
    above = "hyperparameters.overwrite_deepspeed_args"
    return [f"{above}.train_batch_size={train_batch_size}", f"{above}.gradient_accumulation_steps=null"]


def _options(flags: SearchFlags) -> MethodOptions:
    own = {flag.option: flags.own[flag.dest] for flag in METHODS[flags.search_method].flags}
    options = MethodOptions(metric=flags.metric, max_trials=flags.max_trials, seed=flags.random_seed)
    return dataclasses.replace(options, **own)


def _fingerprint(
    flags: SearchFlags, experiment: ExperimentConfig, extra: Mapping[str, tuple[Any, ...]]
) -> str:
    asked = flags.deciding()
    asked["config_path"], asked["model_dir"] = experiment.path.name, experiment.context_dir.resolve().name
    content = [
        asked,
        experiment.raw,
        experiment.deepspeed.merged if experiment.deepspeed else None,
        dict(extra),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _slug(name: str) -> str:
    kept = "".join(char if char.isalnum() or char in "._-" else "-" for char in name)
    return kept.strip("-.")[:80] or "experiment"


_TOTAL, _MICRO, _ = BATCH_KEYS
_SECTION = "training_arguments"


def with_batch_sizes(experiment: ExperimentConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a DeepSpeed config with numeric batch sizes, and what was assumed.

    A Trainer's sizes are those of its entrypoint's flags, else of hyperparameters of the same name (also below
    ``training_arguments``), else the Trainer's defaults, with a warning. A number in the config wins, as in
    ``get_hf_args_with_overwrites``.

    Raises:
        ConfigError: only the script knows the sizes; the message says what to write, and where.
    """
    source = experiment.deepspeed
    assert source is not None
    sizes = {key: source.merged.get(key) for key in BATCH_KEYS}
    filler = _filler(experiment)
    if filler is None or all(value not in (None, AUTO) for value in sizes.values()):
        return source.merged, ()
    findings = Diagnostics(source.lines, source.label)
    warnings: tuple[str, ...] = ()
    if filler.is_trainer:
        filler, warnings = _with_arguments(filler, experiment, sizes, findings)
    solution = filler.solve(sizes, experiment.sizes.dp, {key: findings.place(key) for key in BATCH_KEYS})
    if solution is None:
        problem = ConfigProblem(
            findings.place(_MICRO),
            f'"{AUTO}"' if sizes[_MICRO] == AUTO else "not given",
            "a number, which a search divides: here only the script's DataLoader knows it",
            "Write the batch_size of that DataLoader there, and let the script take its own from "
            "reporter.micro_batch_size(...) of dstrial.integrations.accelerate.Reporter.",
        )
        raise ConfigError([problem])
    return {**source.merged, **{key: getattr(solution, key) for key in BATCH_KEYS}}, warnings


def _filler(experiment: ExperimentConfig) -> AutoValues | None:
    given = experiment.entrypoint
    words = shlex.split(given) if isinstance(given, str) else list(given or [])
    return AutoValues.of(find_script(words, experiment.context_dir))


def _with_arguments(
    filler: AutoValues, experiment: ExperimentConfig, sizes: Mapping[str, Any], findings: Diagnostics
) -> tuple[AutoValues, tuple[str, ...]]:
    """Return the Trainer with every size that is given anywhere among its arguments."""
    where = f"{experiment.path}: entrypoint"
    words = filler.arguments.words
    if len(words) == 1 and words[0].endswith((".json", ".yaml", ".yml")):
        flags = " and ".join(f"--{flag}" for flag in SIZE_FLAGS.values())
        problem = ConfigProblem(
            where,
            f"a script with its arguments in {words[0]}",
            f"{flags} where a search can change them",
            f"Write the arguments themselves into the entrypoint, or numbers into {findings.place(_MICRO)}.",
        )
        raise ConfigError([problem])
    arguments, problems, warnings = filler.arguments, [], []
    for key, flag in SIZE_FLAGS.items():
        if sizes[key] not in (None, AUTO):
            continue
        given = arguments.find(flag)
        if given is not None and not _is_size(given.value):
            problems.append(
                ConfigProblem(
                    where,
                    f"a command with --{flag} {given.value}",
                    "a whole number of at least 1 there, which a search divides",
                    f"Write the number, or set {key} in {_name(experiment.deepspeed)}.",
                )
            )
        if given is not None:
            continue
        value = _hyperparameter(experiment.hyperparameters, flag)
        if value is not None:
            arguments = arguments.with_value(flag, str(value))
        elif sizes[_TOTAL] in (None, AUTO):
            default = DEFAULT_MICRO_BATCH if key == _MICRO else 1
            warnings.append(
                f"{findings.place(key)} is left to the Trainer, and the entrypoint has no --{flag}: its default of {default} is "
                f"taken for your own. Where the script sets another one, write --{flag} into the entrypoint"
            )
    if problems:
        raise ConfigError(problems)
    return AutoValues(filler.name, filler.is_trainer, arguments), tuple(warnings)


def _hyperparameter(hyperparameters: Mapping[str, Any], name: str) -> int | None:
    below = hyperparameters.get(_SECTION)
    for values in (hyperparameters, below if isinstance(below, Mapping) else {}):
        value = values.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _is_size(text: str | None) -> bool:
    return text is not None and text.isdecimal() and int(text) > 0


def _name(source: DeepSpeedSource | None) -> str:
    return "the DeepSpeed config" if source is None else source.label
