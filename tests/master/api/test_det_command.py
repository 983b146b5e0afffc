"""The unmodified ``det`` command against the routes of the cluster and its users."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path

import pytest
import warm_start
from serving import NUM_SLOTS, Master

pytestmark = pytest.mark.process


def _det(master: Master, home: Path, *words: str, user: str = "determined", is_failure: bool = False) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DET_")},
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "DET_MASTER": f"localhost:{master.port}",
        "DET_USER": user,
        "DET_USER_TOKEN": master.tokens[user],
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = warm_start.run_command(
        [sys.executable, "-m", "determined.cli", *words],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode != 0) is is_failure, done.stderr
    return done.stderr if is_failure else done.stdout


def test_users_slots_agents_jobs_and_tasks_are_listed(served: Master, tmp_path: Path) -> None:
    assert "You are logged in as user 'determined'" in _det(served, tmp_path, "user", "whoami")
    listed = _det(served, tmp_path, "user", "list")
    assert all(name in listed for name in ("admin", "determined", "other"))
    slots = json.loads(_det(served, tmp_path, "slot", "list", "--json"))
    assert [slot["allocation_id"] for slot in slots] == ["1.request.1", "2.request.1", "FREE", "FREE"]
    (agent,) = json.loads(_det(served, tmp_path, "agent", "list", "--json"))
    assert (agent["num_slots"], agent["enabled"]) == (NUM_SLOTS, True)
    jobs = list(csv.DictReader(io.StringIO(_det(served, tmp_path, "job", "list", "--csv"))))
    assert [(job["ID"], job["Priority"], job["Slots (acquired/needed)"]) for job in jobs] == [
        ("job-1", "42", "1/1"),
        ("job-2", "42", "1/1"),
    ]
    tasks = list(csv.DictReader(io.StringIO(_det(served, tmp_path, "task", "list", "--csv"))))
    assert [(task["Task ID"], task["Slots Needed"]) for task in tasks] == [
        ("1.request", "1"),
        ("2.request", "1"),
    ]


def test_slots_jobs_and_the_masters_log_are_changed(fresh_master: Master, tmp_path: Path) -> None:
    agent_id = fresh_master.services.agent_id
    assert "Disabled slot 3" in _det(fresh_master, tmp_path, "slot", "disable", agent_id, "3", user="admin")
    assert fresh_master.rows("SELECT slot_id FROM disabled_slots") == [{"slot_id": 3}]
    _det(fresh_master, tmp_path, "job", "update", "job-2", "--priority", "7")
    assert fresh_master.rows("SELECT priority FROM experiments WHERE id = 2") == [{"priority": 7}]
    (fresh_master.services.state_dir / "master.log").write_text("2026-11-21T02:00:00.123 INFO x: hello\n")
    assert "hello" in _det(fresh_master, tmp_path, "master", "logs")
    assert "clusterId" in _det(fresh_master, tmp_path, "master", "info")
    assert "launch_error" in _det(fresh_master, tmp_path, "master", "config", user="admin")
    assert "no administrator" in _det(fresh_master, tmp_path, "master", "config", is_failure=True)


def test_what_is_not_offered_says_so(served: Master, tmp_path: Path) -> None:
    text = _det(served, tmp_path, "shell", "start", is_failure=True)
    assert "not offered by the embedded master" in text
    text = _det(served, tmp_path, "user", "create", "new", "--password", "Password-1", is_failure=True)
    assert "no administrator" in text
