import dataclasses
import hashlib
import json
import pathlib

import pytest
from sample_layouts import PLAIN_LAYOUT

from dstrial.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    hash_files,
    layouts_of,
    read_manifest,
    write_manifest,
)
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from dstrial.resume.metadata import EngineRecord


@pytest.fixture
def manifest(tmp_path: pathlib.Path) -> Manifest:
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "weights.pt").write_bytes(b"weights" * 1000)
    (tmp_path / "empty").write_bytes(b"")
    files = hash_files(tmp_path, ["model0/weights.pt", "empty"])
    return Manifest.build(steps_completed=7, layouts=[{"world_size": 2}], files=files)


def test_manifest_records_size_and_checksum(manifest: Manifest) -> None:
    assert list(manifest.files) == ["empty", "model0/weights.pt"]
    entry = manifest.files["model0/weights.pt"]
    assert entry == FileEntry(7000, hashlib.sha256(b"weights" * 1000).hexdigest())
    assert manifest.created.endswith("+00:00")


def test_manifest_round_trips_through_file(manifest: Manifest, tmp_path: pathlib.Path) -> None:
    write_manifest(tmp_path, manifest)
    write_manifest(tmp_path, dataclasses.replace(manifest, steps_completed=8))
    assert read_manifest(tmp_path) == dataclasses.replace(manifest, steps_completed=8)
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_read_manifest_without_file_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"has no manifest\.json; expected a checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"a": 3}},
        {"files": {"a": {"bytes": "3", "sha256": "x"}}},
        {"files": {"a": {"bytes": True, "sha256": "x"}}},
        {"files": {"../a": {"bytes": 3, "sha256": "x"}}},
        {"files": {"/a": {"bytes": 3, "sha256": "x"}}},
        {"steps_completed": None},
        {"created": 5},
        {"layouts": {}},
        {"format": "1"},
    ],
    ids=str,
)
def test_manifest_with_invalid_value_is_damaged(
    manifest: Manifest, tmp_path: pathlib.Path, change: dict[str, object]
) -> None:
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**manifest.to_json(), **change}))
    with pytest.raises(CheckpointDamagedError, match="without a usable"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1', b"[]", b"\xff\xfe"])
def test_malformed_manifest_is_damaged(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=MANIFEST_NAME):
        read_manifest(tmp_path)


def test_manifest_of_newer_format_is_rejected(manifest: Manifest, tmp_path: pathlib.Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**manifest.to_json(), "format": FORMAT + 1}))
    with pytest.raises(CheckpointError, match=f"format is {FORMAT + 1}; expected at most {FORMAT}"):
        read_manifest(tmp_path)


def test_unreadable_layout_error_names_checkpoint() -> None:
    manifest = Manifest(1, "", ({"zero_stage": 1},), {})
    with pytest.raises(CheckpointError, match="checkpoint somewhere describes its layout in another form"):
        layouts_of(manifest, "somewhere")


@dataclasses.dataclass(frozen=True)
class LaterRecord(EngineRecord):
    later: int = 1


def test_engine_record_reads_later_field_or_default():
    """A field added by a later release has its default in older manifests."""
    values = PLAIN_LAYOUT.to_json()
    assert LaterRecord.from_layout(values).later == 1
    assert LaterRecord.from_layout(LaterRecord.from_layout({**values, "later": 4}).to_json()).later == 4
