"""The commands ``dstrial up``, ``down``, ``status``, ``login`` and ``logs``."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm_start

from dstrial.master.state_directory import StateDirectory, process_start_time
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

Command = Callable[..., tuple[int, str, str]]

# With these variables ``warm_start`` can fork commands from its preloaded process.
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def module_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    """Start one master for the module; ``master`` restarts it after a test ends it."""
    with master_for_test(tmp_path_factory.mktemp("lasting")) as running:
        yield running


@pytest.fixture
def master(module_master: MasterForTest) -> Iterator[MasterForTest]:
    yield module_master
    if module_master.state.running() is None:
        module_master.up()


@pytest.fixture
def other_master_login(master: MasterForTest) -> Iterator[str]:
    """Store another master's ``det`` login for this address; yield the address."""
    address = f"http://localhost:{master.record.port}"
    path = Path(master.env["XDG_CONFIG_HOME"]) / "determined" / "auth.json"
    before = path.read_text()
    store = json.loads(before)
    store["masters"][address] = {"active_user": "me", "tokens": {"me": "of another master"}}
    path.write_text(json.dumps(store))
    yield address
    path.write_text(before)


def auth_entries(master: MasterForTest) -> dict[str, dict[str, object]]:
    path = Path(master.env["XDG_CONFIG_HOME"]) / "determined" / "auth.json"
    entries: dict[str, dict[str, object]] = json.loads(path.read_text())["masters"]
    return entries


def test_up_listens_on_loopback_and_prints_address(master: MasterForTest) -> None:
    before = auth_entries(master)
    second = master.dstrial("up")
    assert second.returncode == 0, second.stderr
    assert auth_entries(master) == before
    port = master.record.port
    assert second.stdout.startswith("the master is already running\n")
    assert f"address:  http://localhost:{port} (process {master.record.pid})\n" in second.stdout
    assert "slots:    2 cpu\n" in second.stdout
    assert f"state:    {master.state.path}\n" in second.stdout
    assert f"export DET_MASTER=http://localhost:{port}\n" in second.stdout
    assert listening_addresses(master.record.pid) == {f"0100007F:{port:04X}"}


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses a process listens on, as in ``/proc/net/tcp``."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        inodes |= set(re.findall(r"socket:\[(\d+)\]", target))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1])
    return found


def test_up_logs_in_det_for_owner_only(master: MasterForTest) -> None:
    port = master.record.port
    for address in (f"http://localhost:{port}", f"http://127.0.0.1:{port}"):
        asked = warm_start.run_command(
            [sys.executable, "-m", "determined.cli", "-m", address, "user", "whoami"],
            env=dict(master.env),
            capture_output=True,
            text=True,
        )
        assert (asked.returncode, asked.stdout) == (0, "You are logged in as user 'determined'\n"), (
            asked.stderr
        )
    assert stat.S_IMODE(master.state.credentials_path.stat().st_mode) == 0o600
    assert len(master.password("admin")) >= 16
    stranger = warm_start.run_command(
        [sys.executable, "-m", "determined.cli", "experiment", "list"],
        env={**master.env, "XDG_CONFIG_HOME": str(master.state.path.parent / "stranger")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert stranger.returncode != 0


def test_up_keeps_login_of_other_master(master: MasterForTest, other_master_login: str) -> None:
    told = master.dstrial("up", "--slots", "7", "--no-password")
    assert told.returncode == 0
    assert "--slots 7, --no-password changes nothing while the master runs" in told.stderr
    assert f"det is logged in to another master at {other_master_login}; that is left as it is" in told.stderr
    assert auth_entries(master)[other_master_login]["tokens"] == {"me": "of another master"}
    assert f"not logged in at {other_master_login}" in told.stdout
    assert master.dstrial("login").returncode == 0
    assert auth_entries(master)[other_master_login]["active_user"] == "determined"


def test_det_needs_no_login_without_passwords(tmp_path: Path) -> None:
    with master_for_test(tmp_path, options=["--no-password"]) as master:
        env = {**master.env, "XDG_CONFIG_HOME": str(tmp_path / "stranger")}
        asked = warm_start.run_command(
            [sys.executable, "-m", "determined.cli", "user", "whoami"],
            env=env,
            capture_output=True,
            text=True,
        )
        assert asked.stdout == "You are logged in as user 'determined'\n", asked.stderr
        assert not master.state.credentials_path.exists()


def test_wrong_settings_and_missing_logs_are_clear_errors(tmp_path: Path, dstrial_command: Command) -> None:
    (tmp_path / "master.yaml").write_text("prot: 80\n")
    place = ("--state-dir", tmp_path / "s")
    exit_code, _, err = dstrial_command("up", *place, "--config-file", tmp_path / "master.yaml")
    assert exit_code == 1
    assert "prot" in err
    assert "port" in err
    assert StateDirectory(tmp_path / "s").running() is None
    exit_code, _, err = dstrial_command("logs", *place)
    assert exit_code == 1
    assert "does not exist; expected the log of a master" in err


def test_status_shows_address_slots_experiments_and_disk(master: MasterForTest) -> None:
    shown = master.dstrial("status")
    assert shown.returncode == 0
    assert f"address:     {master.address} (process {master.record.pid})\n" in shown.stdout
    assert "slots:       2 cpu; 0 used, 2 free\n" in shown.stdout
    assert "experiments: none\n" in shown.stdout
    fields = json.loads(master.dstrial("status", "--json").stdout)
    assert (fields["running"], fields["pid"]) == (True, master.record.pid)
    assert fields["slots"] == {"total": 2, "used": 0, "free": 2}
    assert fields["disk_bytes"] > 0


def test_status_reports_suspended_master_and_down_ends_it(master: MasterForTest) -> None:
    fields = json.loads(master.dstrial("status", "--json").stdout)
    assert (fields["answers"], fields["stopped"]) == (True, False)
    pid = master.record.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        shown = master.dstrial("status")
        fields = json.loads(master.dstrial("status", "--json").stdout)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert shown.returncode == 1
    assert (
        f"stopped:     process {pid} is stopped (SIGSTOP) and does not respond; continue it with `kill -CONT {pid}`"
        in (shown.stdout)
    )
    assert (fields["running"], fields["answers"], fields["stopped"]) == (True, False, True)
    going_on = master.dstrial("status")
    assert (going_on.returncode, "stopped" in going_on.stdout) == (0, False)
    os.kill(pid, signal.SIGSTOP)
    assert master.dstrial("down").stdout == "the master has ended\n"


def test_up_after_down_keeps_cluster_and_port(master: MasterForTest) -> None:
    first = master.record
    assert master.dstrial("down").stdout == "the master has ended\n"
    assert process_start_time(first.pid) != first.start_time
    stopped = master.dstrial("status")
    assert (stopped.returncode, stopped.stdout.splitlines()[0]) == (
        1,
        "master:      not running; start it with `dstrial up`",
    )
    assert master.dstrial("down").stdout.startswith("no master is running")
    second = master.up()
    assert (second.cluster_id, second.port) == (first.cluster_id, first.port)
    assert second.pid != first.pid
    assert master.det("user", "whoami").stdout == "You are logged in as user 'determined'\n"


def test_down_ends_master_despite_open_connection(master: MasterForTest) -> None:
    with socket.create_connection(("127.0.0.1", master.record.port)) as connection:
        connection.sendall(b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert master.dstrial("down", deadline_s=30).returncode == 0


def test_logs_prints_tail_and_follows_master_log(master: MasterForTest) -> None:
    shown = master.dstrial("logs", "-n", "1000").stdout
    assert re.search(r"INFO dstrial\.master: serving at http://localhost:\d+ with 2 slots", shown)
    assert len(master.dstrial("logs", "-n", "1").stdout.splitlines()) == 1
    command = [sys.executable, "-m", "dstrial.cli", "logs", "-f", "-n", "0"]
    with subprocess.Popen(command, env=dict(master.env), stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        was_read = threading.Event()

        def write() -> None:
            # Repeatedly: lines written before ``logs -f`` starts are not printed.
            while not was_read.wait(0.2):
                with master.state.log_path.open("a") as log:
                    log.write("one more line\n")

        writing = threading.Thread(target=write)
        writing.start()
        try:
            assert following.stdout.readline() == "one more line\n"
        finally:
            was_read.set()
            writing.join()
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130


def test_foreground_up_shows_log_until_ctrl_c(tmp_path: Path) -> None:
    env = {**os.environ, "DSTRIAL_STATE_DIR": str(tmp_path / "s"), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "dstrial.cli", "up", "--foreground", "--port", "0", "--slots", "1"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = []
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith("export DET_MASTER="):
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    text = "".join(output)
    assert "serving at http://localhost:" in text
    assert "the master has ended" in text
    assert "Traceback" not in text
