"""The machines of these tests are separate machines, and nothing of them stays."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from machines import Machines, machines

pytestmark = pytest.mark.process


def _namespaces() -> set[str]:
    return set(
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    )


def test_machines_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    before = _namespaces()
    with machines(2) as two:
        first, second = two[1], two[2]
        assert first.run(["ssh", "host2", "hostname"]).stdout.endswith("host2\n")
        sleeper = second.popen(["sleep", "1000"])
        assert second.find("sleep", "1000") is not None
        assert first.find("sleep", "1000") is None
        assert two.processes() == {"host2": ["sleep 1000"]}
        second.hide(tmp_path)
        (tmp_path / "file").touch()
        assert "file" in first.run(["ls", str(tmp_path)], cwd="/").stdout
        assert "file" not in second.run(["ls", str(tmp_path)], cwd="/").stdout
        second.kill()
        assert sleeper.wait() == 137 or sleeper.returncode == -signal.SIGKILL
        assert "refused" in first.run(["ssh", "host2", "true"]).stdout
    assert _namespaces() == before


def test_a_cut_cable_says_nothing_until_it_is_back() -> None:
    with machines(2) as two:
        words = ["ssh", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2", "host2", "sleep", "100"]
        with two[1].popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as session:
            while two[2].find("sleep", "100") is None:
                time.sleep(0.05)
            two[2].cut()
            assert "not responding" in session.communicate(timeout=20)[0]
        two[2].heal()
        assert two[1].run(["ssh", "host2", "hostname"]).stdout == "host2\n"


def test_keys_and_sshd_can_be_taken_away() -> None:
    with machines(2) as two:
        two[1].run(["ssh", "host2", "true"])
        two[2].refuse_keys()
        assert "Permission denied" in _batch_ssh(two)
        two[2].stop_sshd()
        assert "Connection refused" in _batch_ssh(two)


def _batch_ssh(two: Machines) -> str:
    return two[1].run(["ssh", "-o", "BatchMode=yes", "host2", "true"]).stdout
