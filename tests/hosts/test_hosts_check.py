"""``dstrial hosts check`` on simulated machines reports all problems of all hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, Machines, machines

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
_BEGINS = "expected all to be ready, so nothing was started:\n"


@pytest.fixture(scope="module")
def three() -> Iterator[Machines]:
    """Three machines that tests do not change."""
    with machines(3) as made:
        yield made


def _check(
    machine: Machine, directory: Path, hostfile: Path, *flags: str, interface: str = ""
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "dstrial.cli", "hosts", "check", "--hostfile", str(hostfile), *flags]
    environ = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", "GLOO_SOCKET_IFNAME": interface}
    return machine.run(words, cwd=directory, env=environ)


def _table(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """Return the printed table as (host, problem) pairs; the check must have failed."""
    assert done.returncode == 1, done.stdout
    _, found, table = done.stdout.partition(_BEGINS)
    assert found, done.stdout
    rows = [line.split(None, 1) for line in table.splitlines()]
    return [(host, text) for host, text in rows]


def test_hosts_check_prints_table_and_json(three: Machines, tmp_path: Path) -> None:
    hostfile = three.hostfile(tmp_path / "hosts", [1, 2, 1])
    done = _check(three[1], tmp_path, hostfile)
    assert done.returncode == 0, done.stdout
    assert "3 hosts with 4 slots are ready" in done.stdout
    assert "host2  2      CPU      10.77.0.12 (eth0)" in done.stdout
    found = json.loads(_check(three[2], tmp_path, hostfile, "--json", "--include", "host1@host3").stdout)
    assert [(one["host"], one["interface"]) for one in found["hosts"]] == [
        ("host1", "eth0"),
        ("host3", "eth0"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts"], "it leaves nothing"
    assert three.processes() == {}
    wrong = json.loads(_check(three[1], tmp_path, hostfile, "--json", "--python", "/nix/python").stdout)
    assert [one["host"] for one in wrong["problems"]] == ["host1", "host2", "host3"]
    assert not wrong["ready"]
    done = _check(three[1], tmp_path, tmp_path / "hots")
    assert done.returncode == 1
    assert "cannot be read (No such file or directory)" in done.stdout


def test_hosts_check_unreachable_hosts_reported_within_20s(tmp_path: Path) -> None:
    with machines(4) as four:
        four[2].refuse_keys()
        four[3].cut()
        four[4].stop_sshd()
        hostfile = four.hostfile(tmp_path / "hosts")
        hostfile.write_text(hostfile.read_text() + "host9 slots=1\n")
        began_s = time.monotonic()
        rows = _table(_check(four[1], tmp_path, hostfile))
        assert time.monotonic() - began_s < 20  # 6 s on an idle machine
        assert [host for host, _ in rows] == ["host2", "host3", "host4", "host9"]
        told = dict(rows)
        assert "permission denied" in told["host2"]
        assert told["host3"].startswith(("unreachable", "silent"))  # "silent" if this machine is busy
        assert "connection refused" in told["host4"]
        assert "no such name" in told["host9"]


def test_hosts_check_reports_missing_python_and_packages(three: Machines, tmp_path: Path) -> None:
    hostfile = three.hostfile(tmp_path / "hosts")
    rows = _table(_check(three[1], tmp_path, hostfile, "--python", "/nix/python", "--exclude", "host1"))
    assert [(host, text.partition(".")[0]) for host, text in rows] == [
        ("host2", "without Python at /nix/python"),
        ("host3", "without Python at /nix/python"),
    ]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    rows = _table(
        _check(three[1], tmp_path, hostfile, "--python", str(bare / "bin/python"), "--include", "host2")
    )
    assert [text.partition(";")[0] for _, text in rows] == [
        "without torch",
        "without deepspeed",
        "without dstrial",
    ]


def test_hosts_check_reports_unshared_directory_and_broken_network(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with machines(3) as three:
        hostfile = three.hostfile(tmp_path / "hosts")
        three[2].hide(tmp_path / "runs")
        ((host, text),) = _table(_check(three[1], tmp_path, hostfile, "--include", "host1@host2"))
        assert host == "host2"
        assert f"another {tmp_path / 'runs'} than on host1" in text
        assert "DSTRIAL_RUNS_DIR" in text
        three[2].run(["umount", str(tmp_path / "runs")], cwd="/")
        three[2].run(["ip", "route", "add", "unreachable", "10.77.0.13/32"])
        rows = _table(_check(three[1], tmp_path, hostfile, "--include", "host2@host3"))
        assert [host for host, _ in rows] == ["host2", "host3"]
        assert "unable to connect to host3 (10.77.0.13 " in rows[0][1]
        rows = _table(_check(three[1], tmp_path, hostfile, interface="ib0"))
        told = [text.partition(".")[0] for _, text in rows]
        assert told.count("without an IPv4 address on interface ib0 (it has eth0 10") == 3
