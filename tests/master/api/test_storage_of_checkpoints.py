"""Checkpoint reports and downloads with missing storage."""

from __future__ import annotations

import resource
import uuid
from pathlib import Path
from typing import Any

import pytest
from serving import Master

pytestmark = pytest.mark.process


def report(name: str) -> dict[str, Any]:
    return {
        "uuid": name,
        "taskId": "1.request",
        "allocationId": "1.request.1",
        "resources": {"a": "1"},
        "metadata": {"steps_completed": 4},
        "state": "STATE_COMPLETED",
    }


def storage_of(master: Master, root: Path) -> None:
    """Create ``root`` and set it as the checkpoint storage of experiment 1."""
    root.mkdir()
    sql = "UPDATE experiments SET config = json_set(config, '$.checkpoint_storage.host_path', ?) WHERE id = 1"
    master.change(sql, str(root))
    assert master.services.storages.secure({"type": "shared_fs", "host_path": str(root)}) == root


def resources() -> dict[str, int]:
    """Return descriptors, threads and memory (MiB) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "MiB": pages * resource.getpagesize() >> 20,
    }


def test_checkpoint_reports_leak_no_resources(fresh_master: Master, tmp_path: Path) -> None:
    storage_of(fresh_master, tmp_path / "storage")

    def reported(count: int) -> dict[str, int]:
        for _ in range(count):
            answer = fresh_master.send(
                "POST", "/api/v1/checkpoints", report(str(uuid.uuid4())), token="trial-1"
            )
            assert answer.status == 200, answer.content
        return resources()

    before, after = reported(200), reported(2000)
    allowed = {"descriptors": 8, "threads": 4, "MiB": 40}  # a leaked reader has 2 descriptors and 0.2 MiB
    assert {name: after[name] - before[name] <= most for name, most in allowed.items()} == dict.fromkeys(
        allowed, True
    ), (before, after)


def test_checkpoint_report_requires_existing_storage(fresh_master: Master, tmp_path: Path) -> None:
    root, name = tmp_path / "storage", str(uuid.uuid4())
    storage_of(fresh_master, root)

    root.rename(tmp_path / "away")
    refused = fresh_master.send("POST", "/api/v1/checkpoints", report(name), token="trial-1")
    assert refused.status == 409
    assert f"checkpoint storage {root} is gone: no directory" in refused.error
    assert fresh_master.rows("SELECT uuid FROM checkpoints WHERE uuid = ?", name) == []

    (tmp_path / "away").rename(root)
    taken = fresh_master.send("POST", "/api/v1/checkpoints", report(name), token="trial-1")
    assert taken.status == 200, taken.content
    assert len(fresh_master.rows("SELECT uuid FROM checkpoints WHERE uuid = ?", name)) == 1


def test_download_of_deleted_bucket_checkpoint_is_404(fresh_master: Master) -> None:
    uuid_, storage = fresh_master.checkpoints[1], '{"type": "s3", "bucket": "b"}'
    fresh_master.change(
        "UPDATE experiments SET config = json_set(config, '$.checkpoint_storage', json(?))", storage
    )
    fresh_master.change("UPDATE checkpoints SET state = 'DELETED' WHERE uuid = ?", uuid_)
    answer = fresh_master.send("GET", f"/checkpoints/{uuid_}", token="determined")
    assert answer.status == 404
    assert "has no files any more" in answer.error
