"""The batch of a search as numbers, where a config says "auto". Pure.

Hugging Face's Trainer and Accelerate fill in what is ``"auto"`` or missing when they train; a search has to know it before.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from dstrial.config import ExperimentConfig
from dstrial.config.auto_values import DEFAULT_MICRO_BATCH, SIZE_FLAGS, Filler
from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Findings
from dstrial.config.experiment_config.script_source import find_script
from dstrial.errors import ConfigError, ConfigProblem

_TOTAL, _MICRO, _ = BATCH_KEYS
_SECTION = "training_arguments"


def with_batch_sizes(experiment: ExperimentConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a DeepSpeed config with numeric batch sizes, and what was assumed.

    A Trainer's sizes are those of its entrypoint's flags, else of hyperparameters called alike (also below
    ``training_arguments``), else the Trainer's defaults, of which a warning tells. What the config gives as a number wins, as in
    ``get_hf_args_with_overwrites``.

    Args:
        experiment: that names a DeepSpeed config, checked.

    Returns:
        The merged config, shared with nothing where it was changed, and warnings as whole sentences.

    Raises:
        ConfigError: only the script knows the sizes; the message says what to write, and where.
    """
    source = experiment.deepspeed
    assert source is not None
    sizes = {key: source.merged.get(key) for key in BATCH_KEYS}
    filler = _filler(experiment)
    if filler is None or all(value not in (None, AUTO) for value in sizes.values()):
        return source.merged, ()
    findings = Findings(source.lines, source.label)
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


def _filler(experiment: ExperimentConfig) -> Filler | None:
    given = experiment.entrypoint
    words = shlex.split(given) if isinstance(given, str) else list(given or [])
    return Filler.of(find_script(words, experiment.context_dir))


def _with_arguments(
    filler: Filler, experiment: ExperimentConfig, sizes: Mapping[str, Any], findings: Findings
) -> tuple[Filler, tuple[str, ...]]:
    """Return the Trainer with every size that is said anywhere among its arguments.

    Raises:
        ConfigError: a size is said in a way that cannot be read.
    """
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
    return Filler(filler.name, filler.is_trainer, arguments), tuple(warnings)


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
