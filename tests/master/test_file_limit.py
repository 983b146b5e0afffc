"""How many files the master and its trials may open."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitting import config, submit
from waiting import wait_for

from dstrial.errors import RequestError
from dstrial.master.login import new_token
from dstrial.testing.master import master_for_test

pytestmark = pytest.mark.process

_CODE = """
import resource, subprocess, sys
from dstrial.master import file_limit
print(file_limit.raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
with subprocess.Popen(["sleep", "60"]) as child:
    file_limit.restore_limit(child.pid)
    print(resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0])
    child.kill()
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "raised", "of_child"),
    [
        (1024, 10000, 1984, 4096, 1024),
        (300, 300, 86, 300, 300),
        (32, 160, 16, 160, 32),
        (9000, 9000, 4436, 9000, 9000),
    ],
)
def test_the_limit_is_raised_as_far_as_allowed_and_what_is_started_gets_the_old_one(
    soft: int, hard: int, connections: int, raised: int, of_child: int
) -> None:
    command = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", _CODE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(connections), str(raised), str(of_child)]


@pytest.mark.parametrize("limit", [16, 24, 32, 64])
def test_up_with_few_open_files_is_refused(tmp_path: Path, limit: int) -> None:
    command = ["-m", "dstrial.cli", "up", "--state-dir", str(tmp_path), "--port", "0"]
    ended = subprocess.run(
        ["prlimit", f"--nofile={limit}", sys.executable, *command], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 1
    assert f"may open {limit} files (ulimit -Hn); expected at least 160 for a master" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextlib.contextmanager
def limited(pid: int, num_files: int) -> Iterator[None]:
    """Let a process have so many files, those that it has among them, while the block lasts."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_files, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_master_short_of_files_says_so(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        client, pid = master.client(), master.record.pid
        assert client.get("/health")["status"] == "up"
        with limited(pid, len(list(Path(f"/proc/{pid}/fd").iterdir())) + 5):
            with pytest.raises(RequestError, match=r"the master has .* files open, and its limit is") as told:
                client.get("/health")
            assert told.value.status == 503
            assert "files open" in json.loads(master.dstrial("status", "--json").stdout)["trouble"]
        assert client.get("/health")["status"] == "up"


def test_a_request_without_files_left_is_told_why(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        client = master.client()
        experiment_id = submit(master, config(hyperparameters={"steps": 600, "sleep": 0.1}))
        path = f"/api/v1/experiments/{experiment_id}/checkpoints"
        wait_for(lambda: client.get(path)["checkpoints"], "no checkpoint")
        uuid = client.get(path)["checkpoints"][0]["uuid"]
        headers = {"Authorization": f"Bearer {new_token(master.record, 'determined')}"}
        held = http.client.HTTPConnection("127.0.0.1", master.record.port, timeout=60)
        with contextlib.closing(held):
            held.request("GET", "/health")
            assert held.getresponse().read()
            with limited(master.record.pid, 3):  # It has more, so that it can open none.
                # Whether the storage is there is seen in a file.
                held.request("GET", f"/page/checkpoints/{uuid}/look", headers=headers)
                answer = held.getresponse()
                text = answer.read().decode()
            assert (answer.status, "files open" in text) == (503, True), text
        (trial,) = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
        assert trial["state"] == "STATE_RUNNING"
        assert trial["restarts"] == 0
