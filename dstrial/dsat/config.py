"""Read and check what a search was asked for, all problems at once."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import ExperimentConfig, load_experiment
from dstrial.config.experiment_config.entrypoint import trial_spec
from dstrial.config.parsing.documents import read_yaml
from dstrial.dsat.batch_sizes import with_batch_sizes
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
from dstrial.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class SearchSettings:
    """A search that may be run.

    Attributes:
        method: its name.
        flags: of the command line.
        experiment: the user's experiment.
        written: the experiment config as it is written, YAML values.
        space: what is searched.
        options: of the method.
        output: absolute directory of the search, before ``--fresh`` is considered.
        fingerprint: of everything that decides what is searched; equal for a command that may resume.
        warnings: doubtful things, as whole sentences.
    """

    method: str
    flags: SearchFlags
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
        return smaller_is_better(self.flags.metric)


def read_settings(flags: SearchFlags) -> SearchSettings:
    """Read and check everything that a command line names.

    Raises:
        ConfigError: with all problems.
    """
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
    return SearchSettings(
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


def with_parallel(settings: SearchSettings, num_parallel: int) -> SearchSettings:
    """Return the settings for as many trials at the same time as there is room for."""
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
