"""The file of ``--space``: which values of which keys are tried besides those of the knobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.documents import read_yaml
from dstrial.config.findings import render
from dstrial.dsat.candidate import HYPERPARAMETERS
from dstrial.dsat.knobs import ZERO
from dstrial.errors import ConfigError, ConfigProblem

_NOT_IN_A_FILE = {
    "train_batch_size": "Pass --train-batch-size for another global batch, or --free-batch to let it change.",
    "train_micro_batch_size_per_gpu": "Remove it: every micro batch that divides the global batch is tried anyway.",
    "gradient_accumulation_steps": "Remove it: it follows from the global batch and the micro batch.",
    f"{ZERO}.stage": "Pass --zero-stages, with the stages to try.",
}
"""What a file of ``--space`` cannot name -> what to do instead."""


def read_space(path: Path, hyperparameters: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read ``--space FILE``: a YAML or JSON mapping of dotted paths to lists of values.

    Args:
        path: the file.
        hyperparameters: of the experiment; a path that begins with ``hyperparameters.`` must be one of them.

    Raises:
        ConfigError: with all problems of the file.
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
