"""``dstrial checkpoint audit`` beside a real master whose checkpoints were lost, damaged and replaced."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.storage_guard import IDENTITY_NAME
from dstrial.testing.master import MasterForTest, master_for_test

sys.path.insert(0, str(Path(__file__).parents[1] / "master"))
from submitting import TRAIN, config, submit, wait_until

pytestmark = pytest.mark.process

UNKNOWN = "0f4f1f9e-8f0a-4c3e-9a53-1f4b1b8a0f5e"


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterForTest]:
    """A master with five checkpoints in ``storage``."""
    with master_for_test(tmp_path, num_slots=1) as running:
        storage = {"type": "shared_fs", "host_path": str(tmp_path / "storage"), "save_trial_latest": 99}
        experiment_id = submit(
            running, config(hyperparameters={"steps": 10}, checkpoint_storage=storage), TRAIN
        )
        wait_until(running, experiment_id, "COMPLETED")
        yield running


def rows(master: MasterForTest) -> dict[str, str]:
    found = master.client().get("/api/v1/experiments/1/checkpoints")["checkpoints"]
    found.sort(key=lambda one: one["metadata"]["steps_completed"])
    return {one["uuid"]: one["state"].removeprefix("STATE_") for one in found}


def audited(master: MasterForTest, *options: str) -> tuple[int, dict[str, Any]]:
    ended = master.dstrial("checkpoint", "audit", "--json", *options)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_what_is_gone_is_listed_as_deleted_by_a_repair_and_nothing_else_is_touched(
    master: MasterForTest, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    ended = master.dstrial("checkpoint", "audit")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "5 checkpoints in 1 storage" in ended.stdout
    assert ended.stdout.endswith(": all as listed\n")

    first, second, third, *_ = uuids = list(rows(master))
    shutil.rmtree(storage / first)
    (storage / second / "state.json").unlink()
    (storage / third / "state.json").write_text("10000")
    (storage / UNKNOWN).mkdir()
    (storage / UNKNOWN / "half").write_bytes(b"x" * 700)
    ended = master.dstrial("checkpoint", "audit")
    assert ended.returncode == 1
    assert f"checkpoint {first} of trial 1 is missing: no directory; expected " in ended.stdout
    assert f"checkpoint {second} of trial 1 is incomplete: without state.json" in ended.stdout
    assert f"checkpoint {third} of trial 1 is of another size: state.json" in ended.stdout
    assert f"{storage / UNKNOWN} is unknown: 700 bytes" in ended.stdout
    assert "4 differ, 2 of them for `--repair`" in ended.stdout
    assert set(rows(master).values()) == {"COMPLETED"}

    exit_code, found = audited(master, "--repair")
    assert exit_code == 1
    assert sorted(found["repaired"]) == sorted([first, second])
    assert {one["kind"] for one in found["findings"]} == {"other size", "unknown"}
    assert rows(master) == {
        **dict.fromkeys(uuids, "COMPLETED"), first: "DELETED", second: "PARTIALLY_DELETED"
    }  # fmt: skip
    assert (storage / UNKNOWN / "half").exists()
    assert (storage / third / "state.json").read_text() == "10000"


def test_nothing_is_repaired_in_a_storage_that_is_gone_until_somebody_accepts_what_is_there(
    master: MasterForTest, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.rename(tmp_path / "away")
    storage.mkdir()

    exit_code, found = audited(master, "--repair")
    assert exit_code == 1
    assert [(one["kind"], one["storage"]) for one in found["findings"]] == [("storage gone", str(storage))]
    assert set(rows(master).values()) == {"COMPLETED"}
    refused = master.dstrial("checkpoint", "audit", "--accept", str(tmp_path))
    assert refused.returncode == 1
    assert f"{tmp_path} is no storage that the master has used; expected one of: {storage}" in refused.stderr

    exit_code, found = audited(master, "--accept", str(storage), "--repair")
    assert (exit_code, len(found["repaired"])) == (0, 5)
    wait_for(lambda: set(rows(master).values()) == {"DELETED"})
    assert [path.name for path in storage.iterdir()] == [IDENTITY_NAME]


def test_an_audit_needs_no_running_master_and_a_repair_does(master: MasterForTest, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "storage" / next(iter(rows(master))))
    assert master.dstrial("down").returncode == 0

    exit_code, found = audited(master)
    assert (exit_code, [one["kind"] for one in found["findings"]]) == (1, ["missing"])
    refused = master.dstrial("checkpoint", "audit", "--repair")
    assert refused.returncode == 1
    assert "no master runs with state directory" in refused.stderr
