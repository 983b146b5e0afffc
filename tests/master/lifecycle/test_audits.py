"""In what rows and storages can differ, and what of it a repair may change."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dstrial.checkpoint.completion_marker import MARKER_NAME, write_marker
from dstrial.checkpoint.manifest import MANIFEST_NAME
from dstrial.checkpoint.storage_identity import claim_identity
from dstrial.master.lifecycle.checkpoint_audit import audit, compare
from dstrial.master.store.storages import StoredFiles

UUIDS = [f"0f4f1f9e-8f0a-4c3e-9a53-{number:012d}" for number in range(9)]
FILES = {"model/": 0, "model/weights": 1000, "state.json": 1, "a": 1, "b": 1}


def row(root: Path, uuid: str = UUIDS[0], state: str = "COMPLETED", **changes: Any) -> StoredFiles:
    config = {"checkpoint_storage": {"type": "shared_fs", "host_path": str(root)}}
    fields = {
        "resources": json.dumps(FILES),
        "manifest_sha256": None,
        "config": json.dumps(config),
        **changes,
    }
    return StoredFiles(uuid=uuid, experiment_id=1, trial_id=2, state=state, steps=3, **fields)


def write(root: Path, uuid: str, files: Mapping[str, int] = FILES) -> Path:
    for name, size in files.items():
        if not name.endswith("/"):
            path = root / uuid / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
    return root / uuid


@pytest.mark.parametrize(
    ("state", "found", "kind", "text"),
    [
        ("COMPLETED", {"model/weights": 1000, "state.json": 1, "a": 1, "b": 1, "more": 5}, None, ""),
        ("COMPLETED", None, "missing", "no directory; expected 4 files, 1,003 bytes"),
        ("PARTIALLY_DELETED", None, "missing", "no directory"),
        ("COMPLETED", {"a": 1}, "incomplete", "without model/weights, state.json, b; expected 4 files"),
        ("COMPLETED", {}, "incomplete", "without model/weights, state.json, a and 1 more"),
        (
            "COMPLETED",
            {"model/weights": 999, "state.json": 1, "a": 1, "b": 1},
            "other size",
            "model/weights (the first 999 bytes; expected 1,000)",
        ),
        ("DELETED", None, None, ""),
        ("DELETED", {"a": 1}, "not deleted", "1 files; expected none"),
        ("ERROR", None, None, ""),
    ],
)
def test_a_row_and_a_directory_are_compared(
    state: str, found: dict[str, int] | None, kind: str | None, text: str
) -> None:
    findings = compare(row(Path("/storage"), state=state), found, "/storage")

    assert [finding.kind for finding in findings] == ([] if kind is None else [kind])
    for finding in findings:
        assert text in str(finding)
        assert finding.is_repairable == (kind in ("missing", "incomplete"))


def test_a_storage_is_audited_with_its_marks_manifests_and_what_nobody_has_registered(tmp_path: Path) -> None:
    known = claim_identity(tmp_path, "cluster")
    whole, marked, changed, gone, nobodys, begun = UUIDS[:6]
    write_marker(write(tmp_path, whole), {"uuid": whole})
    (write(tmp_path, marked) / MARKER_NAME).write_text("{}x")
    (write(tmp_path, changed) / MANIFEST_NAME).write_text("{}")
    write(tmp_path, nobodys, {"half": 500})
    write(tmp_path, begun, {"half": 500})
    (tmp_path / UUIDS[8] / "tensorboard").mkdir(parents=True)
    rows = [
        row(tmp_path, whole),
        row(tmp_path, marked),
        row(tmp_path, changed, manifest_sha256="f" * 64),
        row(tmp_path, gone),
        row(tmp_path, UUIDS[7], config='{"checkpoint_storage": {"type": "s3", "bucket": "b"}}'),
    ]

    report = audit(rows, [known], {begun})

    assert [(finding.kind, finding.uuid) for finding in report.findings] == [
        ("damaged mark", marked),
        ("other manifest", changed),
        ("missing", gone),
        ("unknown", nobodys),
    ]
    assert "500 bytes" in str(report.findings[-1])
    assert (report.num_checkpoints, report.num_elsewhere, report.num_bytes) == (5, 1, 5 * 1003)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_storage_that_is_gone_is_one_finding(tmp_path: Path, *, is_known: bool) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    known = [claim_identity(root, "cluster")] if is_known else []
    root.rename(tmp_path / "away")
    root.mkdir()

    report = audit([row(root, uuid) for uuid in UUIDS], known, set())

    [finding] = report.findings
    assert finding.kind == "storage gone"
    assert not finding.is_repairable
    assert "expected the storage with 9 checkpoints" in str(finding)


def test_a_storage_that_never_answers_is_told_and_the_others_are_looked_at(tmp_path: Path) -> None:
    hanging, answering = tmp_path / "hanging", tmp_path / "answering"
    for root in (hanging, answering):
        root.mkdir()
    known = [claim_identity(root, "c") for root in (hanging, answering)]
    write(answering, UUIDS[1])
    identity = next(hanging.iterdir())
    identity.unlink()
    os.mkfifo(identity)  # Whoever opens it waits, as for a network file system whose server is away.

    report = audit([row(hanging), row(answering, UUIDS[1])], known, (), timeout_s=0.5)

    (finding,) = report.findings
    assert finding.kind == "storage gone"
    assert "no answer within 0.5 s" in str(finding)
    assert report.storages == (str(hanging), str(answering))
    os.close(os.open(identity, os.O_WRONLY))  # lets the look go on
