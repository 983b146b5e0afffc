"""The guardians of a living worker talk to their own kind only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dstrial.dsat.worker import rpc
from dstrial.errors import RankError
from dstrial.ranks.identity import RankIdentity, identify
from dstrial.ranks.job_secret import tag
from dstrial.ranks.sockets import free_port

pytestmark = pytest.mark.process

ACCOUNT = 65534


def _identity(monkeypatch: pytest.MonkeyPatch, rank: int, num_nodes: int) -> RankIdentity:
    variables = {
        **{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        **{"LOCAL_RANK": str(rank if num_nodes == 1 else 0), "LOCAL_WORLD_SIZE": str(2 // num_nodes)},
        **{"GROUP_RANK": str(rank if num_nodes == 2 else 0), "GROUP_WORLD_SIZE": str(num_nodes)},
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return identify(os.environ)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_MEET_S", 20.0)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("DSTRIAL_LAUNCHER_PID", str(os.getpid()))
    monkeypatch.delenv("DSTRIAL_SECRET", raising=False)
    monkeypatch.delenv("DET_SESSION_TOKEN", raising=False)


def _say(family: int, address: Any, *lines: bytes) -> None:
    """Connect, say something and wait until the other end has gone or has nothing to say."""
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(2.0)
        connection.connect(address)
        with contextlib.suppress(OSError):
            for line in lines:
                connection.sendall(line)
            while connection.recv(4096):
                pass


def _as_other_account(family: int, address: Any, *lines: bytes) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setuid(ACCOUNT)
            _say(family, address, *lines)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


class Gathering:
    """The chief's end, in a thread."""

    def __init__(self, identity: RankIdentity) -> None:
        self.server = rpc.listen(identity)
        self.address = self.server.getsockname()
        self.lines: dict[int, rpc.Connection] = {}
        self._thread = threading.Thread(target=self._gather, args=(identity,))
        self._thread.start()

    def _gather(self, identity: RankIdentity) -> None:
        self.lines = rpc.accept_supervisors(self.server, identity)

    def wait(self) -> dict[int, rpc.Connection]:
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        return self.lines


@pytest.fixture
def closing() -> Iterator[list[rpc.Connection]]:
    lines: list[rpc.Connection] = []
    yield lines
    for line in lines:
        line.close()


def _greetings() -> list[bytes]:
    return [json.dumps({"job": rpc.job_name(), "rank": rank}).encode() + b"\n" for rank in (0, 1)]


def _heard(line: rpc.Connection) -> Any:
    assert rpc.ready([line], 10.0)
    return line.receive()


@pytest.mark.skipif(os.geteuid() != 0, reason="Requires: [root, to be another account]")
def test_another_account_of_the_machine_is_no_guardian(
    monkeypatch: pytest.MonkeyPatch, closing: list[rpc.Connection]
) -> None:
    chief = _identity(monkeypatch, 0, num_nodes=1)
    gathering = Gathering(chief)
    for greeting in _greetings():
        _as_other_account(socket.AF_UNIX, gathering.address, greeting)

    guardians = [rpc.connect(chief), rpc.connect(_identity(monkeypatch, 1, num_nodes=1))]
    lines = gathering.wait()
    closing += [*guardians, *lines.values()]

    for rank, guardian in enumerate(guardians):
        guardian.send({"from": rank})
        lines[rank].send({"to": rank})
        assert _heard(lines[rank]) == [{"from": rank}]
        assert _heard(guardian) == [{"to": rank}]


def _serve_as_other_account(address: bytes, ready: int) -> None:
    try:
        os.setuid(ACCOUNT)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            os.write(ready, b"1")
            threading.Timer(30.0, os._exit, (0,)).start()
            while True:
                connection = server.accept()[0]
                with contextlib.suppress(OSError):
                    connection.sendall(b"0" * 32 + b"\n")
    finally:
        os._exit(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="Requires: [root, to be another account]")
def test_a_guardian_takes_no_orders_from_another_account(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = _identity(monkeypatch, 1, num_nodes=1)
    address = rpc._address(identity)[1]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _serve_as_other_account(address, writer)
    try:
        assert os.read(reader, 1) == b"1"
        monkeypatch.setattr(rpc, "_MEET_S", 1.0)
        with pytest.raises(RankError, match="belongs to another account"):
            rpc.connect(identity)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_between_machines_only_who_knows_the_secret_is_a_guardian_and_only_one_address_is_served(
    monkeypatch: pytest.MonkeyPatch, closing: list[rpc.Connection]
) -> None:
    monkeypatch.setenv("DSTRIAL_SECRET", "known to both machines")
    chief = _identity(monkeypatch, 0, num_nodes=2)
    gathering = Gathering(chief)
    assert gathering.address[0] == "127.0.0.1"
    for greeting in _greetings():
        _say(socket.AF_INET, gathering.address, greeting)
    guess = {"rank": 1, "nonce": "0" * 32, "tag": "0" * 64}
    _say(socket.AF_INET, gathering.address, json.dumps(guess).encode() + b"\n")
    _say(socket.AF_INET, gathering.address, b"[]\n")
    _say(socket.AF_INET, gathering.address, b"x" * 10_000)

    guardians = [rpc.connect(chief), rpc.connect(_identity(monkeypatch, 1, num_nodes=2))]
    lines = gathering.wait()
    closing += [*guardians, *lines.values()]

    guardians[1].send({"said": "answer"})
    assert _heard(lines[1]) == [{"said": "answer"}]


def _pass_for_guardian(address: Any, rank: int) -> bool:
    """Do what a guardian does, with nothing but what everybody on the network can know; say whether it is heard."""
    public = tag(b"", b"dsat", rpc.job_name().encode())
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(5.0)
        connection.connect(address)
        nonce, answer = connection.recv(64).strip(), b"0" * 32
        parts = (nonce, answer, b"%d" % rank)
        greeting = {"rank": rank, "nonce": answer.decode(), "tag": tag(public, b"greeting", *parts).hex()}
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        connection.settimeout(1.0)
        try:
            return connection.recv(1) != b""
        except TimeoutError:
            return True  # it is kept


def _attack(chief: RankIdentity, rank: int) -> None:
    """Try to pass for a guardian of a chief that listens."""
    with contextlib.closing(rpc.listen(chief)) as server:
        threading.Thread(target=rpc.accept_supervisors, args=(server, chief), daemon=True).start()
        assert not _pass_for_guardian(server.getsockname(), rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_between_machines_a_stranger_who_knows_all_but_a_secret_is_no_guardian(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RankError, match="DSTRIAL_SECRET is not set; expected"):
        _attack(_identity(monkeypatch, 0, num_nodes=2), rank)
    with pytest.raises(RankError, match="DSTRIAL_SECRET is not set; expected"):
        rpc.connect(_identity(monkeypatch, 1, num_nodes=2))


def test_a_line_that_is_repeated_changed_or_sent_back_is_not_read(
    monkeypatch: pytest.MonkeyPatch, closing: list[rpc.Connection]
) -> None:
    def pair() -> tuple[rpc.Connection, rpc.Connection]:
        ends = socket.socketpair()
        lines = (
            rpc.Connection(ends[0], b"key", is_chief=True),
            rpc.Connection(ends[1], b"key", is_chief=False),
        )
        closing.extend(lines)
        return lines

    chief, guardian = pair()
    chief.send({"do": "end"})
    told = guardian.socket.recv(4096)
    chief.socket.sendall(told + told)
    with pytest.raises(RankError, match="does not carry this job's tag"):
        _heard(guardian)

    chief, guardian = pair()
    chief.socket.sendall(told.replace(b"end", b"kil"))
    with pytest.raises(RankError, match="does not carry this job's tag"):
        _heard(guardian)

    chief, guardian = pair()
    guardian.socket.sendall(told)
    with pytest.raises(RankError, match="does not carry this job's tag"):
        _heard(chief)
