"""Unix socket on which a master accepts logins of its owner without a password."""

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


def test_long_state_directory_path_is_supported(tmp_path: Path) -> None:
    directory = tmp_path / ("a long name " * 12) / ("and another" * 12)
    directory.mkdir(parents=True)
    with master_for_test(directory, num_slots=1) as master:
        assert len(master.record.socket) > 200
        assert master.record.socket == str(master.state.path / "master.sock")
        assert_owner_gets_in(master)


def test_socket_is_replaced_after_kill_removed_after_end(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        path = Path(master.record.socket)
        master.kill()
        assert path.exists()
        gone = master.dstrial("login")
        assert gone.returncode == 1
        assert "no master is running" in gone.stderr
        master.up()
        assert_owner_gets_in(master)
        os.kill(master.record.pid, signal.SIGINT)
        assert master.dstrial("down").returncode == 0
        assert not path.exists()
        master.up()
    assert not path.exists()


def test_state_directory_without_sockets_is_refused(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.make()
    (tmp_path / "master.sock" / "taken").mkdir(parents=True)
    with pytest.raises(
        MasterError, match=r"a socket cannot be made in .*; expected a file system with sockets"
    ):
        owner_socket.listening(state).__enter__()


def test_login_of_unknown_user_is_refused(shared_master: MasterForTest) -> None:
    ended = shared_master.dstrial("login", "--user", "nobody")
    assert ended.returncode == 1
    assert "user 'nobody' does not exist" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_token_without_master_socket_raises_error(tmp_path: Path) -> None:
    record = MasterRecord(os.getpid(), "1", 1, (), "c", "0.1.0", str(tmp_path / "none"))
    with pytest.raises(MasterError, match="No such file or directory"):
        new_token(record)
