"""Faults that a master survives: kills, concurrent commands, full disks, damage."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rows import allocation_request
from submitting import config, experiment, log_of, submit
from waiting import wait_for

from dstrial.master.backends import local
from dstrial.master.backends.log_file import parse
from dstrial.master.daemon import live_allocations
from dstrial.master.state_directory import StateDirectory
from dstrial.testing.master import MasterForTest, master_for_test

IGNORES_PREEMPTION = """
import os, time, urllib.request
path = f"/api/v1/allocations/{os.environ['DET_ALLOCATION_ID']}/signals/preemption"
token = {"Authorization": "Bearer " + os.environ["DET_SESSION_TOKEN"]}
urllib.request.urlopen(urllib.request.Request(os.environ["DET_MASTER"] + path, headers=token))
print("ready", flush=True)
time.sleep(%s)
"""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path, num_slots=2) as running:
        yield running


REPORTING = """
import logging, pathlib, time
import determined as det
logging.basicConfig(level=logging.WARNING)
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    print("ready", flush=True)
    for step in range(1, 1000):
        core.train.report_training_metrics(step, {"loss": 1.0})
        time.sleep(0.1)
        if pathlib.Path("GATE").exists():
            break
"""


@pytest.mark.process
def test_restarted_master_must_reuse_trials_port(
    master: MasterForTest,
) -> None:
    """`dstrial up` fails on another port; on the old port, it readopts the trial."""
    experiment_id = submit(
        master, config("exec python3 train.py", resources={"slots_per_trial": 2}), IGNORES_PREEMPTION % 7101
    )
    wait_for(lambda: "ready" in log_of(master, experiment_id))
    port = master.record.port

    master.kill()
    refused = master.dstrial("up", "--port", "0")

    assert refused.returncode == 1
    assert f"report to port {port}; expected that one" in refused.stderr
    taken_back = master.dstrial("up")
    assert f"http://localhost:{port}" in taken_back.stdout, taken_back.stderr
    [allocation_id] = live_allocations(master.state)
    assert allocation_id.endswith(".1")

    # The trial ignores the preemption signal, and a second SIGTERM does not kill it either.
    for _ in range(2):
        os.kill(master.record.pid, signal.SIGTERM)
        time.sleep(0.3)
    assert live_allocations(master.state) == [allocation_id]
    ended = master.dstrial("down", "--deadline", "0.5")
    assert "waiting for 1 trial to save a checkpoint" in ended.stdout
    assert "trials have not stopped within 0.5 s and are killed" in ended.stderr
    assert live_allocations(master.state) == []

    # On a master with too few slots, the requeued trial's log states why the trial waits.
    assert master.dstrial("up", "--slots", "1", "--port", str(port)).returncode == 0
    assert experiment(master, experiment_id)["state"] == "STATE_QUEUED"
    assert "the trial needs 2 slots and waits; this master has 1" in log_of(master, experiment_id)


@pytest.mark.process
def test_unusable_state_directory_is_named_in_error(tmp_path: Path) -> None:
    damaged = StateDirectory(tmp_path / "damaged")
    damaged.make()
    damaged.database_path.write_bytes(b"x" * 5000)
    (tmp_path / "file").write_text("")

    for command, path, words in (
        ("up", damaged.path, "master.db is damaged (file is not a database); expected"),
        ("status", damaged.path, "master.db cannot be used (file is not a database); expected"),
        ("up", tmp_path / "file" / "below", "cannot be made (Not a directory); expected"),
    ):
        arguments = [command, "--state-dir", str(path), *(["--port", "0"] if command == "up" else [])]
        ended = subprocess.run(
            [sys.executable, "-m", "dstrial.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 1
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.process
def test_supervisor_waits_on_full_disk_without_loss(tmp_path: Path) -> None:
    directory = tmp_path / "allocation"
    entrypoint = "echo first; until [ -e go ]; do sleep 0.05; done; seq 1 2000"
    local.prepare(allocation_request(directory, entrypoint=entrypoint))
    log = directory / "output.log"
    handle = local.start(directory)
    try:
        wait_for(lambda: log.exists() and b"first" in log.read_bytes())
        _, hard = resource.prlimit(handle.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(handle.pid, resource.RLIMIT_FSIZE, (1000, hard))
        (directory / "workdir" / "go").touch()
        wait_for(lambda: log.stat().st_size == 1000)
        time.sleep(0.2)
        assert local.poll_exit(directory, handle) is None

        resource.prlimit(handle.pid, resource.RLIMIT_FSIZE, (hard, hard))
        wait_for(lambda: local.poll_exit(directory, handle) is not None)

        exit_ = local.poll_exit(directory, handle)
        assert exit_ is not None
        assert exit_.exit_code == 0
        texts = [parse(line).text for line in log.read_text().splitlines()]
        assert texts == ["first\n", *(f"{number}\n" for number in range(1, 2001))]
    finally:
        local.kill(handle, directory)
        local.remove(directory)


def test_malformed_log_line_parses_as_text() -> None:
    for damaged in ("\0\0\0\0", "", "12 x text", "99999999999999999999999 o text"):
        assert parse(damaged).text == f"{damaged}\n"
    assert parse("12 o INFO: text").time_us == 12
