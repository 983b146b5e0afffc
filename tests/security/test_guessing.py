"""Password guessing must neither delay other clients nor lock out the owner."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

NUM_GUESSERS = 60


def guess(port: int, username: str) -> http.client.HTTPResponse:
    """Send a wrong password; return the response, whose body has been read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        body = json.dumps({"username": username, "password": "wrong", "isHashed": False})
        connection.request("POST", "/api/v1/auth/login", body, {"Host": "localhost"})
        answer = connection.getresponse()
        answer.read()
        return answer
    finally:
        connection.close()


@contextlib.contextmanager
def guessing(port: int, username: str = "determined") -> Iterator[list[int]]:
    """Guess in many threads during the block; yield the growing list of status codes."""
    is_over = threading.Event()
    statuses: list[int] = []

    def go_on() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                statuses.append(guess(port, username).status)

    threads = [threading.Thread(target=go_on) for _ in range(NUM_GUESSERS)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(statuses) > 10, "nobody guesses")
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("guessed"), num_slots=1) as running:
        yield running


def forget_login(master: MasterForTest) -> None:
    (Path(master.env["XDG_CONFIG_HOME"]) / "determined" / "auth.json").unlink()


def test_owner_logs_in_while_others_guess_passwords(master: MasterForTest) -> None:
    forget_login(master)
    with guessing(master.record.port):
        began_s = time.monotonic()
        told = master.dstrial("up", deadline_s=60)
        assert (told.returncode, told.stderr) == (0, "")
        assert "det:      logged in\n" in told.stdout
        between_s = time.monotonic()
        logged_in = master.dstrial("login", "--user", "admin", deadline_s=60)
        assert logged_in.returncode == 0, logged_in.stderr
        print(f"\nup {between_s - began_s:.2f} s, login {time.monotonic() - between_s:.2f} s")
    assert master.det("user", "whoami").stdout == "You are logged in as user 'admin'\n"
