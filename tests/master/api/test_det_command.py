"""The unmodified ``det`` command against the routes of the cluster and its users."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from det_here import DetHere
from serving import NUM_SLOTS, Master

pytestmark = pytest.mark.process


def test_users_slots_agents_jobs_and_tasks_are_listed(served: Master, tmp_path: Path) -> None:
    det = DetHere(served.address, "determined", served.tokens["determined"], tmp_path)
    assert "You are logged in as user 'determined'" in det.ok("user", "whoami")
    listed = det.ok("user", "list")
    assert all(name in listed for name in ("admin", "determined", "other"))
    slots = json.loads(det.ok("slot", "list", "--json"))
    assert [slot["allocation_id"] for slot in slots] == ["1.request.1", "2.request.1", "FREE", "FREE"]
    (agent,) = json.loads(det.ok("agent", "list", "--json"))
    assert (agent["num_slots"], agent["enabled"]) == (NUM_SLOTS, True)
    jobs = list(csv.DictReader(io.StringIO(det.ok("job", "list", "--csv"))))
    columns = ("ID", "Priority", "Slots (acquired/needed)")
    assert [tuple(job[name] for name in columns) for job in jobs] == [
        ("job-1", "42", "1/1"),
        ("job-2", "42", "1/1"),
    ]
    tasks = list(csv.DictReader(io.StringIO(det.ok("task", "list", "--csv"))))
    assert [(task["Task ID"], task["Slots Needed"]) for task in tasks] == [
        ("1.request", "1"),
        ("2.request", "1"),
    ]
    assert "not offered by the embedded master" in det.refused("shell", "start")
    assert "no administrator" in det.refused("user", "create", "new", "--password", "Password-1")


def test_slots_jobs_and_the_masters_log_are_changed(
    fresh_master: Master, det: DetHere, tmp_path: Path
) -> None:
    admin = DetHere(fresh_master.address, "admin", fresh_master.tokens["admin"], tmp_path / "admin")
    assert "Disabled slot 3" in admin.ok("slot", "disable", fresh_master.services.agent_id, "3")
    assert fresh_master.rows("SELECT slot_id FROM disabled_slots") == [{"slot_id": 3}]
    det.ok("job", "update", "job-2", "--priority", "7")
    assert fresh_master.rows("SELECT priority FROM experiments WHERE id = 2") == [{"priority": 7}]
    (fresh_master.services.state_dir / "master.log").write_text("2026-11-21T02:00:00.123 INFO x: hello\n")
    assert "hello" in det.ok("master", "logs")
    assert "clusterId" in det.ok("master", "info")
    assert "launch_error" in admin.ok("master", "config")
    assert "no administrator" in det.refused("master", "config")
