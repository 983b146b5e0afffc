"""Errors of the master client for truncated or missing responses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from dstrial.errors import MasterError
from dstrial.master.client import Client

pytestmark = pytest.mark.process


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], Client]]:
    """Factory of clients whose server sends the given bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []

        def answer(data: bytes) -> None:
            connection, _ = listener.accept()
            with connection:
                asked = b""
                while not asked.endswith(b"}"):  # closing with unread data would reset the connection
                    asked += connection.recv(65536)
                connection.sendall(data)

        def client_of(data: bytes) -> Client:
            threads.append(threading.Thread(target=answer, args=(data,)))
            threads[-1].start()
            return Client(f"http://localhost:{listener.getsockname()[1]}", timeout_s=20.0)

        yield client_of
        for thread in threads:
            thread.join(20.0)


@pytest.mark.parametrize("head", ["200 OK", "503 Service Unavailable"])
@pytest.mark.parametrize("body", [b"", b'{"experiment": {'], ids=["nothing", "a part"])
def test_truncated_response_is_reported_as_lost_connection(
    answering: Callable[[bytes], Client], head: str, body: bytes
) -> None:
    client = answering(f"HTTP/1.1 {head}\r\nContent-Length: 5698\r\n\r\n".encode() + body)

    with pytest.raises(
        MasterError, match=r"was lost \(IncompleteRead.*expected the rest of /api/v1/experiments\. See"
    ):
        client.post("/api/v1/experiments", {"config": "{}"})


def test_unresponsive_master_is_reported_as_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(f"http://localhost:{listener.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(MasterError, match=r"has not answered /info within 0\.2 s.*`dstrial status`"):
            client.get("/info")
