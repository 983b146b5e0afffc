"""State directory of a master: location, permissions, record and lock."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master.state_directory import MasterRecord, StateDirectory, process_start_time


def record_of(pid: int, start_time: str) -> MasterRecord:
    return MasterRecord(
        pid, start_time, 8123, ({"id": 0, "kind": "cpu", "brand": "x", "uuid": "u"},), "c", "0"
    )


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    made = StateDirectory(tmp_path / "state")
    made.make()
    return made


def test_directory_is_private_to_owner(state: StateDirectory) -> None:
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert state.allocations_path.is_dir()
    assert state.checkpoints_path.is_dir()


def test_record_round_trips(state: StateDirectory) -> None:
    record = record_of(1, "2")
    state.write_record(record)
    assert state.read_record() == record
    assert record.address == "http://localhost:8123"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_damaged_record_reads_as_none(state: StateDirectory, content: str) -> None:
    state.record_path.write_text(content)
    assert state.read_record() is None


def test_running_master_is_known_by_pid_and_start(state: StateDirectory) -> None:
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    state.write_record(record_of(os.getpid(), start_time))
    assert state.running() is not None
    state.write_record(record_of(os.getpid(), "1"))  # the pid of another process before
    assert state.running() is None


def test_second_lock_of_directory_is_refused(state: StateDirectory) -> None:
    with (
        state.lock(),
        pytest.raises(MasterError, match=f"in use by process {os.getpid()}; expected"),
        state.lock(),
    ):
        pass
    with state.lock():
        pass


def test_environment_sets_directory_unless_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSTRIAL_STATE_DIR", str(tmp_path / "a"))
    assert StateDirectory.choose().path == tmp_path / "a"
    assert StateDirectory.choose(tmp_path / "b").path == tmp_path / "b"
    monkeypatch.delenv("DSTRIAL_STATE_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert StateDirectory.choose().path == tmp_path / "data" / "dstrial"


@pytest.mark.process
def test_unreaped_process_counts_as_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process_start_time(process.pid) is not None
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_start_time(process.pid) is None
