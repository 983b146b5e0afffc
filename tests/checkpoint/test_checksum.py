"""Manifest signatures: only manifests written by this account count as its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrial.checkpoint.checksum import CHECKSUM_KEY, key_path, with_checksum
from dstrial.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    hash_files,
    is_own_manifest,
    read_manifest,
    write_manifest,
)


@pytest.fixture(autouse=True)
def _own_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "account"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "weights").write_bytes(b"abc")
    write_manifest(path, Manifest.build(steps_completed=1, layouts=[], files=hash_files(path, ["weights"])))
    return path


def test_manifest_of_same_account_is_own(checkpoint: Path) -> None:
    assert is_own_manifest(checkpoint)
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert read_manifest(checkpoint).steps_completed == 1


def test_edited_manifest_with_new_checksum_is_not_own(checkpoint: Path) -> None:
    values = json.loads((checkpoint / MANIFEST_NAME).read_text())
    values["steps_completed"] = 2
    del values[CHECKSUM_KEY]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(with_checksum(values)))

    assert read_manifest(checkpoint).steps_completed == 2
    assert not is_own_manifest(checkpoint)


def test_manifest_of_other_account_is_not_own(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    assert not is_own_manifest(checkpoint)
    write_manifest(checkpoint, read_manifest(checkpoint))
    assert is_own_manifest(checkpoint)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "account"))
    assert not is_own_manifest(checkpoint)


def test_signing_key_readable_by_others_is_ignored(checkpoint: Path) -> None:
    key_path().chmod(0o644)

    assert not is_own_manifest(checkpoint)
    write_manifest(checkpoint, read_manifest(checkpoint))
    assert "signature" not in json.loads((checkpoint / MANIFEST_NAME).read_text())


def test_write_manifest_succeeds_without_key_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))

    write_manifest(checkpoint, read_manifest(checkpoint))

    assert read_manifest(checkpoint).steps_completed == 1
    assert not is_own_manifest(checkpoint)


def test_missing_or_malformed_manifest_is_not_own(tmp_path: Path) -> None:
    assert not is_own_manifest(tmp_path)
    for text in ("", "[1]", '{"signature": 3}', '{"signature": "é"}'):
        (tmp_path / MANIFEST_NAME).write_text(text)
        assert not is_own_manifest(tmp_path)
