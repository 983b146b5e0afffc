"""Find the origin of each value in an experiment's config and DeepSpeed configs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.deepspeed_rules.check import CheckResult, ExplainedValue, explain
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics, KeyPath, dotted, locate
from dstrial.config.documents import Document, read_yaml_text
from dstrial.config.dotted_keys import leaves, value_at
from dstrial.config.experiment_config.config import ExperimentConfig, check_experiment
from dstrial.config.keys import check_keys
from dstrial.config.merge import merge_template
from dstrial.config.schema import DIALECT, EXPERIMENT
from dstrial.config.secrets import SecretNames, masked

LABEL = "experiment config"
TEMPLATE_ORIGIN = "template"
CHANGED_ORIGIN = "changed after it was submitted"
DEFAULT_ORIGIN = "default"
_CHANGEABLE: tuple[KeyPath, ...] = (
    ("name",),
    ("description",),
    ("labels",),
    *(("resources", key) for key in ("max_slots", "priority", "weight")),
    *(("checkpoint_storage", f"save_{key}") for key in ("experiment_best", "trial_best", "trial_latest")),
)
"""Keys that can be changed after an experiment is submitted."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value of an experiment's effective config, and where the value comes from."""

    key: str  # dotted
    value: Any  # JSON value; an empty mapping or a list counts as one value
    origin: str  # `experiment config:LINE`, or one of the origins above


def config_values(
    effective: Mapping[str, Any], submitted: Document, template: Mapping[str, Any] | None
) -> list[ConfigValue]:
    """Return every value of a completed config with its origin, in the config's order.

    Args:
        effective: the completed config, with changes since the submission.
        submitted: the config as the client wrote it.
        template: the template that was merged into the submission; None without one.
    """
    return [
        ConfigValue(dotted(path), value, _origin(path, value, submitted, template))
        for path, value in leaves(effective, ())
    ]


def _origin(path: KeyPath, value: Any, submitted: Document, template: Mapping[str, Any] | None) -> str:
    given, below = _given(submitted.value, path), None if template is None else _given(template, path)
    if path in _CHANGEABLE and _is_changed(path, value, given or below):
        return CHANGED_ORIGIN
    if given is not None:
        return locate(submitted.lines, path, submitted.label)
    return DEFAULT_ORIGIN if below is None else TEMPLATE_ORIGIN


def _is_changed(path: KeyPath, value: Any, given: tuple[Any] | None) -> bool:
    """Return whether a value has changed since the submission.

    ``given`` is a 1-tuple with the submitted value; if it is None, the default is compared instead.
    """
    if given is not None:
        before = given[0]
        return bool(sorted(map(str, before)) != value if isinstance(before, list) else before != value)
    # A missing name is generated, and storages have the master's defaults.
    return path[0] not in ("name", "checkpoint_storage") and bool(
        (value or None) != value_at(_defaults(), path, None)
    )


@functools.cache
def _defaults() -> dict[str, Any]:
    found = check_keys(EXPERIMENT, {}, DIALECT, Diagnostics({}, LABEL))
    return {**found, **{key: found.get(key) or None for key in ("description", "labels")}}


def _given(config: Any, path: KeyPath) -> tuple[Any] | None:
    """Return the value at ``path`` as a 1-tuple; None if not given.

    If a parent is no mapping, but a short form such as ``max_length: 100``, the parent's value is returned.
    """
    for part in path:
        if not isinstance(config, Mapping):
            return (config,)
        if config.get(part) is None:
            return None
        config = config[part]
    return (config,)


def checked_again(
    original: str,
    template: Mapping[str, Any] | None,
    context_dir: Path,
    *,
    has_files: bool,
) -> ExperimentConfig:
    """Check a submitted config again, with its template, to explain its values.

    Args:
        original: the submitted YAML.
        template: values for missing keys; None without a template.
        context_dir: directory of the unpacked model definition.
        has_files: whether to check that the entrypoint's module or script exists.
    """
    document = read_yaml_text(original, LABEL)
    if template is not None and isinstance(document.value, dict):
        document.value.update(merge_template(template, document.value))
    return check_experiment(
        document,
        Path(LABEL),
        context_dir,
        require_concrete=False,
        require_entrypoint=False,
        has_files=has_files,
    )


def explained_rows(
    source: DeepSpeedSource, checked: CheckResult, names: SecretNames
) -> tuple[ExplainedValue, ...]:
    """Return the settings of a DeepSpeed config with their origins, secrets masked."""
    return explain(source, dataclasses.replace(checked, effective=masked(checked.effective, names)))
