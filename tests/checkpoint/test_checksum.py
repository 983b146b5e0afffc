"""A manifest of this account's is known as such; one that anybody could have made is not."""

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


def test_what_this_account_has_written_is_its_own(checkpoint: Path) -> None:
    assert is_own_manifest(checkpoint)
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert read_manifest(checkpoint).steps_completed == 1


def test_a_changed_manifest_is_not_whatever_its_seal_says(checkpoint: Path) -> None:
    values = json.loads((checkpoint / MANIFEST_NAME).read_text())
    values["steps_completed"] = 2
    del values[CHECKSUM_KEY]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(with_checksum(values)))

    assert read_manifest(checkpoint).steps_completed == 2
    assert not is_own_manifest(checkpoint)


def test_another_account_does_not_take_it_for_its_own(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    assert not is_own_manifest(checkpoint)
    write_manifest(checkpoint, read_manifest(checkpoint))
    assert is_own_manifest(checkpoint)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "account"))
    assert not is_own_manifest(checkpoint)


def test_a_secret_that_others_can_read_is_none(checkpoint: Path) -> None:
    key_path().chmod(0o644)

    assert not is_own_manifest(checkpoint)
    write_manifest(checkpoint, read_manifest(checkpoint))
    assert "signature" not in json.loads((checkpoint / MANIFEST_NAME).read_text())


def test_an_account_without_a_place_for_a_secret_writes_checkpoints_all_the_same(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))

    write_manifest(checkpoint, read_manifest(checkpoint))

    assert read_manifest(checkpoint).steps_completed == 1
    assert not is_own_manifest(checkpoint)


def test_what_is_no_manifest_is_nobodys(tmp_path: Path) -> None:
    assert not is_own_manifest(tmp_path)
    for text in ("", "[1]", '{"signature": 3}', '{"signature": "é"}'):
        (tmp_path / MANIFEST_NAME).write_text(text)
        assert not is_own_manifest(tmp_path)
