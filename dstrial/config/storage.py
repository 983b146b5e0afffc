"""Where checkpoints are kept: the section ``checkpoint_storage`` of configs, masters and workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.experiment_check import check_storage
from dstrial.config.experiment_rules import EXPERIMENT
from dstrial.config.findings import Findings
from dstrial.config.keys import Dialect, Section, check_keys
from dstrial.config.limits import check_value

_SAVE_DEFAULTS = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
_FIELDS = {
    "shared_fs": (
        "host_path",
        "storage_path",
        "propagation",
        "container_path",
        "checkpoint_path",
        "tensorboard_path",
    ),
    "directory": ("container_path",),
    "s3": ("bucket", "prefix", "access_key", "secret_key", "endpoint_url"),
    "gcs": ("bucket", "prefix"),
    "azure": ("container", "connection_string", "account_url", "credential"),
}


def complete_storage(storage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a storage that has been checked with every field of its type and Determined's defaults."""
    kind = storage["type"]
    kept = {field: storage.get(field) for field in _FIELDS[kind]}
    saved = {
        field: default if storage.get(field) is None else storage[field]
        for field, default in _SAVE_DEFAULTS.items()
    }
    if kind == "shared_fs" and kept["propagation"] is None:
        kept["propagation"] = "rprivate"
    return {"type": kind, **kept, **saved}


def checked_storage(given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Check a storage that stands by itself, and return what it gives.

    Args:
        given: as a config's ``checkpoint_storage``, its type included.
        label: how error messages call what it belongs to.

    Raises:
        ConfigError: with all problems.
    """
    check_value(given, label)
    findings = Findings({}, label)
    section = Section({"checkpoint_storage": EXPERIMENT.keys["checkpoint_storage"]})
    dialect = Dialect(name=label, null_is_absent=True)
    raw = check_keys(section, {"checkpoint_storage": dict(given)}, dialect, findings)
    if given.get("type") is None:
        findings.problem(
            "checkpoint_storage.type", "not given", "shared_fs or directory", "Write type: shared_fs."
        )
    check_storage(raw, given, findings)
    findings.raise_if_any()
    return {key: value for key, value in raw["checkpoint_storage"].items() if value is not None}


def laid_over(storage: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return a storage with the fields of another below it: all of one of the same type, else how many to save."""
    kind = storage.get("type")
    if kind not in (None, below["type"]):
        below = {key: value for key, value in below.items() if key in _SAVE_DEFAULTS}
    return {**below, **{key: value for key, value in storage.items() if value is not None}}
