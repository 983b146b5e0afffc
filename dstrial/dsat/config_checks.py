"""Check what a search was asked for: flags, experiment, the file of ``--space``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import ExperimentConfig
from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.diagnostics import render
from dstrial.config.documents import read_yaml
from dstrial.config.experiment_config.entrypoint import trial_spec
from dstrial.dsat.core.candidate import HYPERPARAMETERS
from dstrial.dsat.flags import SearchFlags
from dstrial.dsat.methods import METHODS
from dstrial.dsat.space.knobs import ZERO
from dstrial.dsat.space.space import Space
from dstrial.errors import ConfigError, ConfigProblem

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
    "sample_batch": 1,
}

_NOT_IN_A_FILE = {
    "train_batch_size": "Pass --train-batch-size for another global batch, or --free-batch to let it change.",
    "train_micro_batch_size_per_gpu": "Remove it: every micro batch that divides the global batch is tried anyway.",
    "gradient_accumulation_steps": "Remove it: it follows from the global batch and the micro batch.",
    f"{ZERO}.stage": "Pass --zero-stages, with the stages to try.",
}
"""What a file of ``--space`` cannot name -> what to do instead."""


def flag_problems(flags: SearchFlags) -> list[ConfigProblem]:
    """Return problems of the flags, whatever the experiment is."""
    problems = []
    own = METHODS[flags.search_method].flags
    least_of = {**_AT_LEAST, **{flag.dest: flag.least for flag in own if flag.least is not None}}
    values = {**{name: getattr(flags, name) for name in _AT_LEAST}, **flags.own}
    for name, least in least_of.items():
        value = values[name]
        if isinstance(value, (int, float)) and value < least:
            flag = "--" + name.replace("_", "-")
            problems.append(
                ConfigProblem(flag, str(value), f"at least {least}", f"Set it to {least} or more.")
            )
    positive = {
        flag.dest: flags.own[flag.dest] for flag in own if flag.least is None and flag.kind is not bool
    }
    for name, number in {**positive, "measure_seconds": flags.measure_seconds}.items():
        if number is not None and number <= 0:
            flag = "--" + name.replace("_", "-")
            problems.append(
                ConfigProblem(flag, str(number), "a number above 0", "Set it to 1.0, for example.")
            )
    if flags.start_profile_step > flags.end_profile_step:
        problems.append(
            ConfigProblem(
                "--start-profile-step",
                str(flags.start_profile_step),
                f"at most --end-profile-step ({flags.end_profile_step})",
                "Lower it, or raise --end-profile-step.",
            )
        )
    if flags.free_batch and flags.train_batch_size is not None:
        fix = "Give one of the two."
        problems.append(
            ConfigProblem("--free-batch", "given with --train-batch-size", "only one of them", fix)
        )
    sample = flags.sample_batch
    if isinstance(sample, str) and not Path(sample).is_file():
        fix = "Write one with torch.save(batch, 'batch.pt')."
        problems.append(
            ConfigProblem("--sample-batch", sample, "a number of batches, or the file of one", fix)
        )
    for path in flags.include:
        if not Path(path).exists():
            problems.append(
                ConfigProblem("--include", str(path), "an existing file or directory", "Correct the path.")
            )
    return problems


def experiment_problems(flags: SearchFlags, experiment: ExperimentConfig) -> list[ConfigProblem]:
    """Return why an experiment cannot be searched, or not with these flags."""
    problems = []
    where = str(experiment.path)
    if experiment.deepspeed is None:
        fix = "Add deepspeed_config: ds_config.json, and read it in the training code from there."
        problems.append(
            ConfigProblem(
                f"{where}: hyperparameters.{MAIN_KEY}", "not given", "the path of a DeepSpeed JSON file", fix
            )
        )
    if isinstance(flags.sample_batch, int) and trial_spec(experiment.entrypoint) is None:
        problems.append(
            ConfigProblem(
                "--sample-batch",
                f"{flags.sample_batch}, and a script has no loader that could be asked for so many batches",
                "the file of a batch",
                "Write what its engine is called with by torch.save, or leave --sample-batch out.",
            )
        )
    slots = max(experiment.slots_per_trial, 1)
    if flags.max_slots is not None and flags.max_slots < slots:
        problems.append(
            ConfigProblem(
                "--max-slots",
                str(flags.max_slots),
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


def values_refused(flags: SearchFlags, space: Space) -> tuple[list[ConfigProblem], list[str]]:
    """Report ``--space`` paths without a legal value; warn of single illegal values."""
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    for path, values in space.extra.items():
        reasons = {
            repr(value): reason
            for value in values
            if (reason := space.rejection_reason(path, value)) is not None
        }
        if len(reasons) == len(values):
            reason = next(iter(reasons.values()))
            stages = ", ".join(str(stage) for stage in space.stages)
            problems.append(
                ConfigProblem(
                    f"{flags.space}: {path}",
                    f"[{', '.join(reasons)}]",
                    f"at least one value that can be tried in ZeRO stage {stages}",
                    f"Correct or remove it. Of the first it is said: {reason}",
                )
            )
        else:
            warnings += [
                f"{flags.space}: {path}: {value} is never tried: {reason}"
                for value, reason in reasons.items()
            ]
    return problems, warnings


def accepted(flags: SearchFlags) -> list[str]:
    """Return warnings about flags without effect, or that change the training."""
    warnings = []
    instead = {
        "search_runner_config": f"pool, labels, workspace and project of what it submits are those of {flags.config_path}",
        "max_search_runner_restarts": "the same command goes on with it, however often it was ended",
    }
    for name, text in instead.items():
        if name in flags.given:
            flag = "--" + name.replace("_", "-")
            warnings.append(
                f"{flag} is accepted and has no effect: the search runs in this process, not in a trial; {text}"
            )
    if flags.free_batch:
        warnings.append(
            "--free-batch lets the global batch change with the micro batch: what is learned per step changes, and the "
            "learning rate must be chosen anew for the batch that is found"
        )
    return warnings


def _named_in_entrypoint(experiment: ExperimentConfig) -> list[str]:
    """Return the file after ``--deepspeed`` or ``--deepspeed_config``, none if bare."""
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


def read_space(path: Path, hyperparameters: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read ``--space FILE``: YAML or JSON, dotted paths to lists of values.

    A path that begins with ``hyperparameters.`` must name one of ``hyperparameters``.
    """
    problems: list[ConfigProblem] = []
    try:
        given = read_yaml(path, str(path)).value
    except ConfigError as error:
        found = [
            ConfigProblem("--space", f"{one.where}, which is {one.got}", one.expected, one.fix)
            for one in error.problems
        ]
        raise ConfigError(found) from error
    if not isinstance(given, Mapping):
        fix = "Write zero_optimization.sub_group_size: [1e8, 1e9], for example."
        raise ConfigError([ConfigProblem(f"{path}", render(given), "a mapping of paths to lists", fix)])
    result: dict[str, tuple[Any, ...]] = {}
    for key, values in given.items():
        name = str(key)
        if name in _NOT_IN_A_FILE:
            problems.append(
                ConfigProblem(
                    f"{path}: {name}",
                    "a path",
                    "one that dsat does not choose by itself",
                    _NOT_IN_A_FILE[name],
                )
            )
            continue
        if not isinstance(values, list) or not values:
            problems.append(
                ConfigProblem(
                    f"{path}: {name}", render(values), "a list with at least one value", "List the values."
                )
            )
            continue
        hyperparameter = name.removeprefix(HYPERPARAMETERS)
        if name != hyperparameter and hyperparameter.split(".")[0] not in hyperparameters:
            fix = f"Add {hyperparameter} to the hyperparameters of the experiment, and read it in the trial."
            problems.append(ConfigProblem(f"{path}: {name}", "no hyperparameter", "a declared one", fix))
            continue
        result[name] = tuple(_whole(value) for value in values)
    if problems:
        raise ConfigError(problems)
    return result


def _whole(value: Any) -> Any:
    """YAML reads 1e9 as a float, and what is quoted as text; sizes are integers."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1000 else value
