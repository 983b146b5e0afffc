"""A checkpoint is registered only while the storage it was saved into is there."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from serving import Master

from dstrial.checkpoint.storage_identity import claim_identity
from dstrial.master.store import storages

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


def test_a_checkpoint_is_refused_while_its_storage_is_away_and_taken_when_it_is_back(
    fresh_master: Master, tmp_path: Path
) -> None:
    root, name = tmp_path / "storage", str(uuid.uuid4())
    root.mkdir()
    sql = "UPDATE experiments SET config = json_set(config, '$.checkpoint_storage.host_path', ?) WHERE id = 1"
    fresh_master.change(sql, str(root))
    identity = claim_identity(root, "cluster")
    fresh_master.services.database.write(lambda tx: storages.remember(tx, identity))

    root.rename(tmp_path / "away")
    refused = fresh_master.send("POST", "/api/v1/checkpoints", report(name), token="trial-1")
    assert refused.status == 409
    assert f"checkpoint storage {root} is gone: no directory" in refused.error
    assert fresh_master.rows("SELECT uuid FROM checkpoints WHERE uuid = ?", name) == []

    (tmp_path / "away").rename(root)
    taken = fresh_master.send("POST", "/api/v1/checkpoints", report(name), token="trial-1")
    assert taken.status == 200, taken.content
    assert len(fresh_master.rows("SELECT uuid FROM checkpoints WHERE uuid = ?", name)) == 1
