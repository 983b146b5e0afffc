"""Power loss of a machine: all processes die, and their ids are reused after boot."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import children_of
from namespaces import unshare
from waiting import wait_for

PROGRAM = Path(__file__).with_name("powering.py")
NUM_CUTS = 3


def num_reports(work: Path) -> int:
    """Return the number of stored training reports, 0 if the database is unreadable."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(
            sqlite3.connect(f"file:{work / 'state' / 'master.db'}?mode=ro", uri=True, timeout=10)
        ) as connection,
    ):
        return int(
            connection.execute("SELECT COUNT(*) FROM metrics WHERE group_name = 'training'").fetchone()[0]
        )
    return 0


def has_trained_or_ended(work: Path, before: int, machine: subprocess.Popen[bytes]) -> bool:
    return num_reports(work) >= before + 8 or machine.poll() is not None


@pytest.mark.exhaustive("[async_halving]")
@pytest.mark.process
@pytest.mark.parametrize("seed", [pytest.param(0, id="random search"), pytest.param(4, id="async_halving")])
def test_search_resumes_after_each_power_loss(short_path: Path, seed: int) -> None:
    """Processes that reuse the ids of dead ones are not killed."""
    boot_id = "/proc/sys/kernel/random/boot_id"
    in_namespaces = unshare(
        "--pid", "--fork", "--mount-proc",
        probe=f"echo 99 > /proc/sys/kernel/ns_last_pid; mount --bind {boot_id} {boot_id}",
    )  # fmt: skip
    for name in ("journals", "tmp"):
        (short_path / name).mkdir()
    command = [*in_namespaces, sys.executable, str(PROGRAM), str(short_path), str(seed)]

    for cut in range(NUM_CUTS):
        before, out = num_reports(short_path), short_path / f"start_{cut}.out"
        with out.open("wb") as file:
            machine = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            wait_for(functools.partial(has_trained_or_ended, short_path, before, machine), deadline_s=150)
            assert machine.poll() is None, out.read_text()
        finally:
            for init in children_of(machine.pid):
                os.kill(init, signal.SIGKILL)
            machine.wait()

    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert found["dead strangers"] == []
    assert found["strangers"] >= 2, "no process had the id of the master, or of a supervisor"
