"""Read an experiment's DeepSpeed configs, with overwrites and line numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dstrial.config.diagnostics import OVERRIDE_LABEL, Diagnostics, KeyPath, Lines, dotted, locate, render
from dstrial.config.documents import Document, read_json
from dstrial.config.dotted_keys import leaves
from dstrial.config.merge import merge_deepspeed
from dstrial.errors import ConfigError

# Hyperparameters: the config of the main engine, and changes of it.
MAIN_KEY = "deepspeed_config"
OVERWRITE_KEY = "overwrite_deepspeed_args"


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedSource:
    """A DeepSpeed config as given, with overwrites merged and without defaults."""

    path: Path | None  # None if the config is a mapping in the experiment config
    label: str  # the config's name in messages
    merged: dict[str, Any]  # the config with `overwrite_deepspeed_args` applied
    lines: dict[KeyPath, str]  # `file:line` of every key of `merged`
    overwritten: frozenset[KeyPath]  # paths whose value comes from `overwrite_deepspeed_args`

    def is_overwritten(self, path: KeyPath) -> bool:
        """Return whether the value at ``path`` comes from ``overwrite_deepspeed_args``."""
        return any(path[:length] in self.overwritten for length in range(1, len(path) + 1))


def other_configs(hyperparameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys ``<engine>_deepspeed_config``, one per additional engine."""
    return tuple(key for key in hyperparameters if key.endswith(f"_{MAIN_KEY}"))


def read_deepspeed(
    key: str,
    hyperparameters: Mapping[str, Any],
    context_dir: Path,
    lines: Lines,
    label: str,
    findings: Diagnostics,
) -> DeepSpeedSource | None:
    """Return one DeepSpeed config of an experiment.

    ``overwrite_deepspeed_args`` is merged into the main engine's config only. Returns None if the hyperparameter ``key`` is
    missing, or if its value cannot be read; the latter is recorded as a problem.

    Args:
        key: hyperparameter with the config, or with the path of its file.
        hyperparameters: all hyperparameters of the experiment config.
        context_dir: directory to which the path is relative.
        lines: ``file:line`` of each key of the experiment config.
        label: name of the experiment config in messages.
        findings: collects problems.
    """
    overwrite = hyperparameters.get(OVERWRITE_KEY) if key == MAIN_KEY else None
    overwrite_key = f"hyperparameters.{OVERWRITE_KEY}"
    if hyperparameters.get(key) is None:
        if overwrite:
            fix = "Add hyperparameters.deepspeed_config with the path of a DeepSpeed JSON file."
            findings.problem(overwrite_key, "given without deepspeed_config", "something to overwrite", fix)
        return None
    base = _read_base(key, hyperparameters[key], context_dir, lines, label, findings)
    if base is None:
        return None
    if not isinstance(overwrite, Mapping):
        if overwrite is not None:
            fix = "Write a mapping with DeepSpeed's keys."
            findings.problem(overwrite_key, render(overwrite), "a mapping", fix)
        overwrite = {}
    overwritten = frozenset(path for path, _ in leaves(overwrite) if path)
    return DeepSpeedSource(
        path=None if isinstance(hyperparameters[key], Mapping) else context_dir / hyperparameters[key],
        label=base.label,
        merged=merge_deepspeed(base.value, overwrite),
        lines=_merged_lines(base.lines, overwritten, lines, label),
        overwritten=overwritten,
    )


def _read_base(
    key: str, given: Any, context_dir: Path, lines: Lines, label: str, findings: Diagnostics
) -> Document | None:
    """Return a DeepSpeed config without overwrites; None if a problem was recorded."""
    where = f"hyperparameters.{key}"
    if isinstance(given, Mapping):
        return Document(label, dict(given), _below(lines, ("hyperparameters", key)))
    if not isinstance(given, str):
        fix = "Write the path of a DeepSpeed JSON file, relative to the context directory."
        findings.problem(where, render(given), "a path or a mapping", fix)
        return None
    path = context_dir / given
    file_label = os.path.normpath(path)
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in context_dir.glob("*.json"))) or "no JSON file"
        fix = f"Correct the path, which is relative to the context directory (which has: {found})."
        findings.problem(
            where, f"{render(given)}, and {file_label} does not exist", "an existing JSON file", fix
        )
        return None
    try:
        document = read_json(path, file_label)
    except ConfigError as error:
        findings.problems.extend(error.problems)
        return None
    if not isinstance(document.value, dict):
        fix = "Put the settings between braces."
        findings.problem(where, f"a file that holds {render(document.value)}", "a JSON object in it", fix)
        return None
    return document


def _merged_lines(
    base_lines: Lines, overwritten: Iterable[KeyPath], lines: Lines, label: str
) -> dict[KeyPath, str]:
    """Return the ``file:line`` of each key of a DeepSpeed config with overwrites.

    ``base_lines`` has the lines of the DeepSpeed config without overwrites, ``lines`` those of the experiment config.
    ``overwritten`` lists the paths whose values are overwritten. ``label`` is used for overwrites without a line.
    """
    overwrite_lines = _below(lines, ("hyperparameters", OVERWRITE_KEY))
    merged_lines = dict(base_lines)
    for leaf in overwritten:
        for length in range(1, len(leaf) + 1):
            if leaf[:length] not in merged_lines or length == len(leaf):
                merged_lines[leaf[:length]] = locate(overwrite_lines, leaf[:length], label)
    return merged_lines


def deepspeed_configs(hyperparameters: Mapping[str, Any], context_dir: Path) -> list[dict[str, Any]]:
    """Return a trial's DeepSpeed configs, with overwrites in the first one.

    The first config is ``deepspeed_config``. Configs that cannot be read are left out.
    """
    ignored = Diagnostics({}, "")
    found = [
        read_deepspeed(key, hyperparameters, context_dir, {}, "", ignored)
        for key in (MAIN_KEY, *other_configs(hyperparameters))
    ]
    return [source.merged for source in found if source is not None]


def _below(lines: Lines, prefix: KeyPath) -> dict[KeyPath, str]:
    """Return path below ``prefix`` -> ``file:line``, for each key below ``prefix``."""
    inside = {path[len(prefix) :]: line for path, line in lines.items() if path[: len(prefix)] == prefix}
    inside.setdefault((), locate(lines, prefix, ""))
    # A value from the command line has no line, so its message needs the whole key.
    whole_key = f"{OVERRIDE_LABEL}: {dotted(prefix)}"
    inside = {path: whole_key if line == OVERRIDE_LABEL else line for path, line in inside.items()}
    # A constant may be written as {type: const, val: …}. The constant's keys are then one level deeper.
    for path, line in [*inside.items()]:
        if "val" in path:
            inside.setdefault(tuple(part for part in path if part != "val"), line)
    return inside
