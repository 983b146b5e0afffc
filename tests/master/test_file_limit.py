"""Open file limit (RLIMIT_NOFILE) of the master and its trials."""

from __future__ import annotations

import contextlib
import http.client
import resource
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_limit_is_raised_and_restored_for_children(
    soft: int, hard: int, connections: int, raised: int, of_child: int
) -> None:
    command = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", _CODE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(connections), str(raised), str(of_child)]


@pytest.mark.parametrize("limit", [16, 24, 32, 64])
def test_up_with_low_file_limit_is_refused(tmp_path: Path, limit: int) -> None:
    command = ["-m", "dstrial.cli", "up", "--state-dir", str(tmp_path), "--port", "0"]
    ended = subprocess.run(
        ["prlimit", f"--nofile={limit}", sys.executable, *command], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 1
    assert f"may open {limit} files (ulimit -Hn); expected at least 160 for a master" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_master_without_free_descriptors_answers_503(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        client, pid = master.client(), master.record.pid
        headers = {"Authorization": f"Bearer {new_token(master.record, 'determined')}"}
        held = http.client.HTTPConnection("127.0.0.1", master.record.port, timeout=60)
        with contextlib.closing(held):
            held.request("GET", "/health")
            assert held.getresponse().read()
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            # More than 3 files are open already, so the master can open no further one.
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
            held.request("GET", "/api/v1/master/logs", headers=headers)
            answer = held.getresponse()
            text = answer.read().decode()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert (answer.status, "cannot open more files" in text) == (503, True), text
        assert client.get("/health")["status"] == "up"
