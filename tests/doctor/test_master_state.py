import dataclasses
import os
import socket
import threading

import pytest

from dstrial.doctor import master_state
from dstrial.doctor.master_state import MasterState
from dstrial.master.state_directory import MasterRecord, StateDirectory, process_start_time
from dstrial.testing.master import master_for_test

RECORD = MasterRecord(1, "1", 8080, ({"kind": "cpu"},), "cluster", "0.1.0")
RUNNING = MasterState("/state", RECORD, "", os.getuid(), 0o700, 0o600)


def judged(master, accelerator="cpu"):
    found = master_state.judge(master, version="0.1.0", accelerator=accelerator)
    return {finding.name: finding for finding in found}


def test_a_master_that_answers_is_ok():
    assert {finding.status for finding in judged(RUNNING).values()} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"answer": "no answer within 3 s"}, "master", "problem"),
        ({"record": MasterRecord(1, "1", 8080, (), "c", "0.0.9")}, "master version", "note"),
        ({"record": None, "default_port_is_free": False}, "master", "note"),
        ({"mode": 0o755}, "state directory", "note"),
        ({"credentials_mode": 0o644}, "credentials", "problem"),
        ({"owner": 4_000_000}, "state directory", "problem"),
        ({"error": "cannot be read"}, "state directory", "problem"),
    ],
)
def test_what_is_wrong_with_a_master_is_told(changes, name, status):
    found = judged(dataclasses.replace(RUNNING, **changes))[name]
    assert found.status == status
    assert found.todo


def test_slots_of_another_kind_than_the_machine_now_has_are_told():
    assert judged(RUNNING, accelerator="cuda")["master slots"].status == "note"


@pytest.mark.process
def test_no_master_is_ok(tmp_path):
    measured = master_state.measure(StateDirectory(tmp_path / "none"))
    assert measured.record is None
    assert "dstrial up" in judged(measured)["master"].what + judged(measured)["state directory"].what


@pytest.mark.process
def test_a_real_master_is_found_answering_and_then_gone(tmp_path):
    with master_for_test(tmp_path, num_slots=3) as master:
        measured = master_state.measure(master.state)
        assert measured.answer == ""
        assert "3 slots (cpu)" in judged(measured)["master"].what
        assert {finding.status for finding in judged(measured).values()} == {"ok"}
        master.state.credentials_path.chmod(0o644)
        assert judged(master_state.measure(master.state))["credentials"].status == "problem"
        state = master.state
    assert master_state.measure(state).record is None


@pytest.mark.process
def test_a_process_that_listens_and_never_answers_is_a_problem(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = []
        threading.Thread(target=lambda: taken.append(server.accept()), daemon=True).start()
        state = StateDirectory(tmp_path)
        start_time = process_start_time(os.getpid())
        state.write_record(MasterRecord(os.getpid(), start_time, server.getsockname()[1], (), "c", "0.1.0"))
        measured = master_state.measure(state)
        assert judged(measured)["master"].status == "problem"
        assert "no answer" in judged(measured)["master"].what
        for connection, _ in taken:
            connection.close()
