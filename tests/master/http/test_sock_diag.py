"""Whose the other end of a connection is, on real sockets of every family and in every state."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrial.master.http.sock_diag import Endpoint, SockDiag, open_checked

pytestmark = pytest.mark.process

OTHER_ACCOUNT = 65534


@pytest.fixture
def diag() -> Iterator[SockDiag]:
    found = open_checked()
    yield found
    found.close()


def _pair(
    server: tuple[int, str], client: tuple[int, str], *, client_port: int = 0
) -> tuple[socket.socket, socket.socket]:
    """A connection between two families and hosts: the client's end, then the server's."""
    family, host = server
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, 0))
        listener.listen()
        connecting = socket.socket(client[0], socket.SOCK_STREAM)
        if client_port:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connecting.bind((client[1], client_port))
        connecting.connect((client[1], listener.getsockname()[1]))
        return connecting, listener.accept()[0]


def _account(diag: SockDiag, accepted: socket.socket) -> int | None:
    return diag.account_of(Endpoint(*accepted.getpeername()[:2]), Endpoint(*accepted.getsockname()[:2]))


V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ((V4, "127.0.0.1"), (V4, "127.0.0.1")),
        ((V6, "::1"), (V6, "::1")),
        ((V6, "::"), (V4, "127.0.0.1")),
        ((V4, "127.0.0.1"), (V6, "::ffff:127.0.0.1")),
        ((V6, "::"), (V6, "::ffff:127.0.0.1")),
        ((V4, "127.0.0.2"), (V4, "127.0.0.2")),
    ],
    ids=["4 to 4", "6 to 6", "4 to 6", "mapped to 4", "mapped to 6", "another loopback"],
)
def test_the_account_of_a_peer_is_found_whatever_the_family(
    diag: SockDiag, server: tuple[int, str], client: tuple[int, str]
) -> None:
    ours, theirs = _pair(server, client)
    with ours, theirs:
        assert _account(diag, theirs) == os.getuid()


def test_a_peer_that_has_closed_is_unknown_and_not_root(diag: SockDiag) -> None:
    """The kernel says uid 0 and inode 0 of what no process holds any more, in FIN_WAIT and in TIME_WAIT."""
    ours, theirs = _pair((V4, "127.0.0.1"), (V4, "127.0.0.1"))
    with theirs:
        peer, here = Endpoint(*theirs.getpeername()), Endpoint(*theirs.getsockname())
        ours.close()
        assert diag.account_of(peer, here) is None
    assert diag.account_of(peer, here) is None


def test_a_peer_that_only_ends_its_writing_is_still_known(diag: SockDiag) -> None:
    ours, theirs = _pair((V4, "127.0.0.1"), (V4, "127.0.0.1"))
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        assert _account(diag, theirs) == os.getuid()


def test_a_socket_that_listens_at_the_peers_old_address_is_not_taken_for_the_peer(diag: SockDiag) -> None:
    # Below the ports that the kernel hands out (ip(7)), at an address of this test: nobody else takes it meanwhile.
    own = f"127.83.{os.getpid() % 251}.1"
    ours, theirs = _pair((V4, own), (V4, own), client_port=21_083)
    with theirs:
        peer, here = Endpoint(*theirs.getpeername()), Endpoint(*theirs.getsockname())
        # Gone without a trace, so that the kernel looks for who listens.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.close()
        with socket.create_server((peer.host, peer.port)):
            assert diag.account_of(peer, here) is None


def test_the_wrong_way_round_and_no_connection_at_all_are_unknown(diag: SockDiag) -> None:
    assert diag.account_of(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2)) is None
    assert diag.account_of(Endpoint("192.0.2.1", 1), Endpoint("127.0.0.1", 2)) is None


@pytest.mark.skipif(os.getuid() != 0, reason="Requires: [root], to become another account")
def test_a_process_of_another_account_is_known_by_its_own(diag: SockDiag) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
        words = [
            "setpriv",
            f"--reuid={OTHER_ACCOUNT}",
            "--clear-groups",
            "/usr/bin/python3",
            "-I",
            "-c",
            code,
        ]
        with subprocess.Popen([*words, str(listener.getsockname()[1])], cwd="/") as child:
            accepted, _ = listener.accept()
            with accepted:
                assert _account(diag, accepted) == OTHER_ACCOUNT
            assert child.wait(20) == 0


_WITHOUT_NETLINK = """
import ctypes, os, platform, socket, struct, sys
number = {"x86_64": 41, "aarch64": 198}[platform.machine()]  # socket(2)
instructions = [
    (0x20, 0, 0, 0),               # load the number of the system call
    (0x15, 0, 3, number),
    (0x20, 0, 0, 16),              # load its first argument
    (0x15, 0, 1, socket.AF_NETLINK),
    (0x06, 0, 0, 0x00050001),      # EPERM
    (0x06, 0, 0, 0x7FFF0000),      # allowed
]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
filter_ = struct.pack("@HP", len(instructions), ctypes.addressof(program))
assert libc.prctl(22, 2, filter_, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
os.execv(sys.executable, [sys.executable, "-m", "dstrial.cli", *sys.argv[1:]])
"""


def test_a_sandbox_that_forbids_netlink_ends_the_start_and_names_the_setting(tmp_path: Path) -> None:
    env = {**os.environ, "DSTRIAL_STATE_DIR": str(tmp_path / "s"), "XDG_CONFIG_HOME": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _WITHOUT_NETLINK, *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    refused = run("up", "--port", "0", "--slots", "1")
    assert refused.returncode == 1
    assert "sock_diag: Operation not permitted" in refused.stderr
    assert "`allow_other_users: true`" in refused.stderr
    settings = tmp_path / "master.yaml"
    settings.write_text("allow_other_users: true\n")
    started = run("up", "--port", "0", "--slots", "1", "--config-file", str(settings))
    try:
        assert (started.returncode, started.stderr) == (0, "")
        assert "det:      logged in\n" in started.stdout
    finally:
        assert run("down", "--now").returncode == 0
