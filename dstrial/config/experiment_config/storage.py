"""Check, merge and complete ``checkpoint_storage`` sections."""

from __future__ import annotations

import importlib.util
import urllib.parse
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.documents import check_value
from dstrial.config.keys import Dialect, Section, check_keys
from dstrial.config.schema import EXPERIMENT, STORAGE_REQUIRES

# Number of checkpoints to keep of each kind, if neither config nor master gives one.
_SAVE_DEFAULTS = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
# Storage type -> module of the client library. With dashes for dots it is the package, which Determined 0.38.1 requires.
_CLIENTS = {"s3": "boto3", "gcs": "google.cloud.storage", "azure": "azure.storage.blob"}
# Storage type -> its fields in a complete config, besides the type and the numbers of checkpoints to keep.
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


def check_storage(raw: Mapping[str, Any], given: object, findings: Diagnostics) -> None:
    """Record a problem for each missing or unsafe field of ``checkpoint_storage``.

    ``raw`` is the config with defaults; ``given`` is the section as the user wrote it.
    """
    storage = raw["checkpoint_storage"]
    kind = storage["type"]
    if not isinstance(given, Mapping) or kind is None:
        return
    for field in STORAGE_REQUIRES[kind]:
        if storage[field] is None and field not in given:
            findings.problem(
                f"checkpoint_storage.{field}", "not given", f"a value for {kind}", f"Add {field}."
            )
    _check_kept_within(storage, findings)
    if kind == "azure" and storage["connection_string"] is None and storage["account_url"] is None:
        expected = "account_url, or connection_string"
        findings.problem("checkpoint_storage.account_url", "not given", expected, "Add one of the two.")
    for field, instead in (("endpoint_url", "access_key and secret_key"), ("account_url", "credential")):
        url = urllib.parse.urlsplit(storage[field] or "")
        if url.query or "@" in url.netloc:
            findings.problem(
                f"checkpoint_storage.{field}",
                "a URL with a query or a user",
                "a URL without credentials, because it is logged and stored with each checkpoint",
                f"Write them into {instead}.",
            )
    if kind in _CLIENTS and not _is_installed(_CLIENTS[kind]):
        requirement = _CLIENTS[kind].replace(".", "-")
        findings.problem(
            "checkpoint_storage.type",
            f"{kind}, and the package {requirement} is not installed",
            "a storage whose client library is installed",
            f"Install it with `pip install {requirement}`.",
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that should contain the module
        return False


def _check_kept_within(storage: Mapping[str, Any], findings: Diagnostics) -> None:
    """Record a problem if a field of a storage points outside of the storage.

    Source: Determined 0.38.1 common/storage/shared.py ``_full_storage_path`` (which compares strings, so that ``/data-2``
    counts as a directory below ``/data``) and common/storage/__init__.py ``normalize_prefix``.
    """
    host_path = storage["host_path"]
    for key in ("storage_path", "checkpoint_path", "tensorboard_path", "prefix"):
        inner = PurePosixPath(storage[key] or "")
        is_elsewhere = inner.is_absolute() and host_path is not None and not inner.is_relative_to(host_path)
        if ".." in inner.parts or (key != "prefix" and is_elsewhere):
            findings.problem(
                f"checkpoint_storage.{key}",
                render(storage[key]),
                "a prefix without .." if key == "prefix" else f"a directory below host_path ({host_path})",
                "Write a relative path without .., or change host_path.",
            )


def complete_storage(storage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked storage section with all fields of its type and defaults."""
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
    """Return the non-null fields of a storage section that is not part of a config.

    ``label`` names the section in messages. ConfigError lists all problems.
    """
    check_value(given, label)
    findings = Diagnostics({}, label)
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


def merged_storage(storage: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return a storage section with missing fields filled in from section ``below``.

    If the sections have different storage types, only ``save_…`` fields are filled in.
    """
    kind = storage.get("type")
    if kind not in (None, below["type"]):
        below = {key: value for key, value in below.items() if key in _SAVE_DEFAULTS}
    return {**below, **{key: value for key, value in storage.items() if value is not None}}
