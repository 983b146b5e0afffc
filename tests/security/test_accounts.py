"""Attacks by other accounts of the machine, at the port and at the owner's socket."""

from __future__ import annotations

import socket
import stat
import subprocess
from pathlib import Path

import pytest
from door import (
    OTHER_ACCOUNT,
    PYTHON,
    ask_as_other_account,
    needs_root,
    num_open_connections,
    read_all,
    request,
    status_of,
)

from dstrial.errors import RequestError
from dstrial.master.client import Client
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process


@needs_root
@pytest.mark.parametrize("path", ["/info", "/api/v1/me", "/", "/proxy/x/"])
def test_another_account_is_refused_before_it_says_anything(shared_master: MasterForTest, path: str) -> None:
    answer = ask_as_other_account(["127.0.0.1", shared_master.record.port], request("GET", path))
    assert status_of(answer) == 403
    assert b"allow_other_users: true" in answer
    assert f"user id {OTHER_ACCOUNT}".encode() in answer
    log = shared_master.state.log_path.read_text()
    assert f"a connection of user id {OTHER_ACCOUNT} is refused" in log


@needs_root
def test_another_account_with_a_stolen_token_is_refused_too(shared_master: MasterForTest) -> None:
    auth = f"Authorization: Bearer {shared_master.client().token}"
    answer = ask_as_other_account(
        ["127.0.0.1", shared_master.record.port], request("GET", "/api/v1/me", auth)
    )
    assert status_of(answer) == 403
    upgrade = request("GET", "/proxy/x/", auth, "Connection: Upgrade", "Upgrade: websocket")
    assert status_of(ask_as_other_account(["127.0.0.1", shared_master.record.port], upgrade)) == 403


@needs_root
def test_other_accounts_may_log_in_where_the_owner_says_so(tmp_path: Path) -> None:
    settings = tmp_path / "master.yaml"
    settings.write_text("allow_other_users: true\n")
    with master_for_test(tmp_path, num_slots=1, options=("--config-file", str(settings))) as master:
        address = ["127.0.0.1", master.record.port]
        assert status_of(ask_as_other_account(address, request("GET", "/info", "Connection: close"))) == 200
        assert (
            status_of(ask_as_other_account(address, request("GET", "/api/v1/me", "Connection: close"))) == 401
        )
        body = f'{{"username": "determined", "password": "{master.password()}"}}'.encode()
        login = request(
            "POST", "/api/v1/auth/login", f"Content-Length: {len(body)}", "Connection: close", body=body
        )
        assert status_of(ask_as_other_account(address, login)) == 200
        _assert_socket_is_the_owners(master)


@needs_root
def test_the_owners_socket_is_the_owners_alone(shared_master: MasterForTest) -> None:
    _assert_socket_is_the_owners(shared_master)


def _assert_socket_is_the_owners(master: MasterForTest) -> None:
    path = Path(master.record.socket)
    assert path == master.state.path / "master.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    asked = request("POST", "/owner/login", "Content-Length: 0")
    assert b"PermissionError" in ask_as_other_account(str(path), asked, socket.AF_UNIX)
    # Even where the owner has opened the way to it by mistake.
    opened = [directory for directory in path.parents if not directory.stat().st_mode & 0o001]
    modes = {one: stat.S_IMODE(one.stat().st_mode) for one in (*opened, path)}
    try:
        for one in modes:
            one.chmod(0o777)
        answer = ask_as_other_account(str(path), asked, socket.AF_UNIX)
    finally:
        for one, mode in modes.items():
            one.chmod(mode)
    assert status_of(answer) == 403
    assert b"token" not in answer


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_nothing_that_is_said_at_the_port_makes_it_the_owners_socket(
    shared_master: MasterForTest, host: str
) -> None:
    body = b'{"username": "admin"}'
    for path in ("/owner/login", "/owner/login/", "//owner/login", "/api/v1/../../owner/login"):
        with socket.create_connection(("127.0.0.1", shared_master.record.port), timeout=20) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
                f"Forwarded: for=unix\r\nX-Forwarded-For: unix\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            answer = read_all(connection)
        assert status_of(answer) in (403, 404), answer
        assert b"token" not in answer.partition(b"\r\n\r\n")[2]
    with pytest.raises(RequestError, match="owner of the state directory only"):
        Client(shared_master.address, shared_master.client("admin").token).post(
            "/owner/login", {"username": "admin"}
        )


def test_a_page_of_another_site_is_refused_at_the_owners_socket_too(shared_master: MasterForTest) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(shared_master.record.socket)
        connection.sendall(
            b"POST /owner/login HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        assert status_of(read_all(connection)) == 403


_FLOOD = """
import socket, sys
held = []
for _ in range(300):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20)
    held.append(connection)
print("held", flush=True)
sys.stdin.read()
"""


@needs_root
def test_connections_of_another_account_take_nobodys_place(shared_master: MasterForTest) -> None:
    port, pid = shared_master.record.port, shared_master.record.pid
    words = ["setpriv", f"--reuid={OTHER_ACCOUNT}", "--clear-groups", PYTHON, "-I", "-c", _FLOOD]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as ours:
        ours.sendall(request())
        assert ours.recv(12) == b"HTTP/1.1 200"
        before = num_open_connections(pid, port)
        with subprocess.Popen(
            [*words, str(port)], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as flooding:
            assert flooding.stdout is not None
            assert flooding.stdin is not None
            assert flooding.stdout.readline() == b"held\n"
            assert num_open_connections(pid, port) <= before + 40
            ours.sendall(request("GET", "/info", "Connection: close"))
            assert b"HTTP/1.1 200" in read_all(ours)
            flooding.stdin.close()
            assert flooding.wait(20) == 0
