"""Find the origin of each value in an experiment's config and DeepSpeed configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.deepspeed_rules.check import CheckResult, ExplainedValue, explain
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import KeyPath, dotted, locate
from dstrial.config.documents import Document
from dstrial.config.dotted_keys import leaves
from dstrial.config.secrets import SecretNames, masked

LABEL = "experiment config"
TEMPLATE_ORIGIN = "template"
DEFAULT_ORIGIN = "default"


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
        ConfigValue(dotted(path), value, _origin(path, submitted, template))
        for path, value in leaves(effective, ())
    ]


def _origin(path: KeyPath, submitted: Document, template: Mapping[str, Any] | None) -> str:
    if _is_given(submitted.value, path):
        return locate(submitted.lines, path, submitted.label)
    return TEMPLATE_ORIGIN if template is not None and _is_given(template, path) else DEFAULT_ORIGIN


def _is_given(config: Any, path: KeyPath) -> bool:
    """Return whether a config has a value at ``path``, or a short form of a parent."""
    for part in path:
        if not isinstance(config, Mapping):
            return True  # such as max_length: 100
        if config.get(part) is None:
            return False
        config = config[part]
    return True


def explained_rows(
    source: DeepSpeedSource, checked: CheckResult, names: SecretNames
) -> tuple[ExplainedValue, ...]:
    """Return the settings of a DeepSpeed config with their origins, secrets masked."""
    return explain(source, dataclasses.replace(checked, effective=masked(checked.effective, names)))
