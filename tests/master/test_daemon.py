"""Port, usage, log and libraries of the master process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
import warm_start
from rows import add

from dstrial.errors import MasterError
from dstrial.master.backends import supervisor
from dstrial.master.daemon import MasterOptions, choose_port, live_allocations, tail
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.master.store.database import Database
from dstrial.master.store.views.observe import usage
from dstrial.testing.master import master_for_test


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    made = StateDirectory(tmp_path / "state")
    made.make()
    return made


def with_allocation(
    state: StateDirectory, pid: int, start_time: str, allocation_state: str = "RUNNING"
) -> None:
    columns = {"state": allocation_state, "supervisor_pid": pid, "supervisor_start": start_time}
    with contextlib.closing(Database(state.database_path)) as database:
        database.write(
            lambda tx: add(tx, "allocations", id="a.1", task_id="a", trial_id=1, slots=[0, 1], **columns)
        )
    state.write_record(MasterRecord(1, "1", 8123, (), "c", "0"))


def own_start_time() -> str:
    start_time = supervisor.start_time(os.getpid())
    assert start_time is not None
    return start_time


def test_port_defaults_to_8080(state: StateDirectory) -> None:
    assert choose_port(state, MasterOptions()) == 8080
    assert choose_port(state, MasterOptions(port=0)) == 0


def test_running_trials_pin_master_port(state: StateDirectory) -> None:
    with_allocation(state, os.getpid(), own_start_time())
    assert live_allocations(state) == ["a.1"]
    assert choose_port(state, MasterOptions()) == 8123
    assert choose_port(state, MasterOptions(port=8123)) == 8123
    with pytest.raises(
        MasterError, match=r"the port is 8124, while trials of the last master .* port 8123; expected"
    ):
        choose_port(state, MasterOptions(port=8124))


@pytest.mark.parametrize(("start_time", "allocation_state"), [("1", "RUNNING"), (None, "TERMINATED")])
def test_ended_trials_release_master_port(
    state: StateDirectory, start_time: str | None, allocation_state: str
) -> None:
    with_allocation(state, os.getpid(), start_time or own_start_time(), allocation_state)
    assert choose_port(state, MasterOptions()) == 8080


def test_usage_counts_slots_of_live_allocations(state: StateDirectory) -> None:
    assert dataclasses.astuple(usage(state)) == (0, {}, {})
    with_allocation(state, 1, "1")
    assert usage(state).num_slots_used == 2


def test_tail_returns_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path, 3) == []
    path.write_text("".join(f"{line_idx} {'x' * 50_000}\n" for line_idx in range(5)))
    assert [line[0] for line in tail(path, 3)] == ["2", "3", "4"]
    assert len(tail(path, 100)) == 5
    assert tail(path, 0) == []


@pytest.mark.process
def test_master_process_maps_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm_start.SWITCH, "0")
    with master_for_test(tmp_path) as master:
        maps = Path(f"/proc/{master.record.pid}/maps").read_text()

    assert "libtorch" not in maps
    assert "python" in maps
