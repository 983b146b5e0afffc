"""Where a master listens for its owner, and what it finds there when it starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master import owner_socket
from dstrial.master.login import new_token
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process


def assert_owner_gets_in(master: MasterForTest) -> None:
    ended = master.dstrial("login", "--user", "admin")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert master.det("user", "whoami").stdout == "You are logged in as user 'admin'\n"
    ended = master.dstrial("login")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert master.det("user", "whoami").stdout == "You are logged in as user 'determined'\n"


def test_a_path_longer_than_a_sockets_address_is_no_matter(tmp_path: Path) -> None:
    directory = tmp_path / ("a long name " * 12) / ("and another" * 12)
    directory.mkdir(parents=True)
    with master_for_test(directory, num_slots=1) as master:
        assert len(master.record.socket) > 200
        assert master.record.socket == str(master.state.path / "master.sock")
        assert_owner_gets_in(master)


def test_the_socket_of_a_killed_master_is_replaced_and_that_of_an_ended_one_is_gone(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        path = Path(master.record.socket)
        master.kill()
        assert path.exists()
        gone = master.dstrial("login")
        assert gone.returncode == 1
        assert "no master is running" in gone.stderr
        master.up()
        assert_owner_gets_in(master)
    assert not path.exists()


def test_where_the_state_directory_takes_no_socket_up_is_one_clear_error(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.make()
    (tmp_path / "master.sock" / "taken").mkdir(parents=True)
    with pytest.raises(
        MasterError, match=r"a socket cannot be made in .*; expected a file system with sockets"
    ):
        owner_socket.listening(state).__enter__()


def test_a_user_that_does_not_exist_is_one_clear_error(shared_master: MasterForTest) -> None:
    ended = shared_master.dstrial("login", "--user", "nobody")
    assert ended.returncode == 1
    assert "user 'nobody' does not exist" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_master_that_does_not_answer_is_one_clear_error(tmp_path: Path) -> None:
    record = MasterRecord(os.getpid(), "1", 1, (), "c", "0.1.0", str(tmp_path / "none"))
    with pytest.raises(MasterError, match="No such file or directory"):
        new_token(record)


def test_ending_in_the_foreground_removes_the_socket(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        path = Path(master.record.socket)
        os.kill(master.record.pid, signal.SIGINT)
        assert master.dstrial("down").returncode == 0
        assert not path.exists()
        master.up()
