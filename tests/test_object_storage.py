"""External checkpoint storage: config, addresses, credentials."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dstrial.checkpoint.completion_marker import write_marker
from dstrial.config.experiment_config.storage import checked_storage
from dstrial.errors import ConfigError
from dstrial.object_storage import (
    STORAGE_KEY,
    address_of,
    external_storage,
    location_of,
    recorded_storage,
    without_credentials,
)

S3 = {"type": "s3", "bucket": "b", "prefix": "/p", "access_key": "AK", "secret_key": "SK"}


def test_external_storage_returns_given_fields_of_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**S3, "secret_key": "********", "endpoint_url": None, "save_trial_best": 1, "host_path": None}
    assert external_storage({"checkpoint_storage": given}) == {
        "type": "s3",
        "bucket": "b",
        "prefix": "/p",
        "access_key": "AK",
    }
    monkeypatch.chdir(tmp_path)
    relative = {"checkpoint_storage": {"type": "directory", "container_path": "ck"}}
    assert external_storage(relative) == {"type": "directory", "container_path": str(tmp_path / "ck")}
    for config in (None, {}, {"checkpoint_storage": {"type": "shared_fs", "host_path": "/x"}}):
        assert external_storage(config) is None


def test_address_and_location_have_no_credentials() -> None:
    assert address_of(S3, "uuid") == "s3://b/p/uuid"
    assert (
        address_of({"type": "azure", "container": "c", "account_url": "https://a"})
        == "azure://c at https://a"
    )
    assert location_of(S3) == {"type": "s3", "bucket": "b", "prefix": "/p"}
    shown = without_credentials({"name": "x", "checkpoint_storage": S3})
    assert shown == {
        "name": "x",
        "checkpoint_storage": {**S3, "access_key": "********", "secret_key": "********"},
    }
    assert without_credentials(None) is None


def test_recorded_storage_combines_marker_and_credentials(tmp_path: Path) -> None:
    record, other = tmp_path / "a", tmp_path / "b"
    for path in (record, other):
        path.mkdir()
    assert recorded_storage(record) is None
    write_marker(record, {STORAGE_KEY: location_of(S3)})
    write_marker(other, {STORAGE_KEY: {"type": "directory", "container_path": str(tmp_path)}})
    assert recorded_storage(record, {**S3, "bucket": "of now"}) == S3
    assert recorded_storage(record, {"type": "gcs", "bucket": "g"}) == location_of(S3)
    assert recorded_storage(record, {**S3, "endpoint_url": "https://mine"}) == location_of(
        S3
    )  # another server
    assert recorded_storage(other) is None  # the storage is the directory itself


@pytest.mark.parametrize(
    ("storage", "requirement"),
    [
        ({"type": "s3", "bucket": "b"}, "boto3"),
        ({"type": "gcs", "bucket": "b"}, "google-cloud-storage"),
        ({"type": "azure", "container": "c", "connection_string": "s"}, "azure-storage-blob"),
    ],
)
def test_missing_client_library_is_config_error(
    storage: dict[str, str], requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=f"pip install {requirement}"):
        checked_storage(storage, "the storage")
