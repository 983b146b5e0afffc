"""Webhook delivery to hostile URLs: slow responses, redirects, injection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from receiver import receiving
from waiting import wait_for

from dstrial.master.store.errors import InvalidError
from dstrial.master.store.webhooks import check_url
from dstrial.master.webhooks.delivery import DeliveryResult, Sender

pytestmark = pytest.mark.process

BODY = b'{"a":1}'


@contextlib.contextmanager
def serving(speak: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Run ``speak`` in a thread for each connection to a port; yield the port's URL.

    At the end of the block an event, the second argument of ``speak``, is set.
    """
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def handle(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            speak(connection, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=handle, args=(connection,)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (acceptor, *threads):
            thread.join(20)


def silent(_connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def dripping(connection: socket.socket, over: threading.Event) -> None:
    """Send a header byte by byte, each byte before any socket timeout."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not over.wait(0.05):
        connection.sendall(b"x")


def dripping_status(connection: socket.socket, over: threading.Event) -> None:
    while not over.wait(0.02):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def endless_headers(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.is_set():
        connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")


def endless_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"x" * 65536)


def nonsense(connection: socket.socket, _over: threading.Event) -> None:
    connection.recv(65536)  # closing with unread data would reset the connection before the nonsense arrives
    connection.sendall(b"\x1b[2J\x00\xff nonsense\r\n\r\n")


@pytest.mark.parametrize("speak", [silent, dripping, dripping_status])
def test_slow_receiver_cannot_exceed_timeout(speak: Any) -> None:
    with serving(speak) as url:
        outcome = Sender("key", timeout_s=0.5).post(url, BODY)
    assert outcome == DeliveryResult("no answer within 0.5 s", is_delivered=False, may_retry=True)


def test_oversized_responses_are_not_read() -> None:
    with serving(endless_body) as url:
        assert Sender("key", timeout_s=20).post(url, BODY) == DeliveryResult("HTTP 200", True, False)
    with serving(endless_headers) as url:
        outcome = Sender("key", timeout_s=20).post(url, BODY)
    assert outcome is not None
    assert "100 headers" in outcome.result


def test_invalid_response_is_printable_retryable_failure() -> None:
    with serving(nonsense) as url:
        outcome = Sender("key", timeout_s=20).post(url, BODY)
    assert outcome is not None
    assert not outcome.is_delivered
    assert outcome.may_retry
    assert len(outcome.result) <= 200
    assert outcome.result.isprintable(), outcome


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    with receiving() as elsewhere, receiving() as receiver:
        receiver.statuses, receiver.location = [status], elsewhere.url
        outcome = Sender("key").post(receiver.url, BODY)

        assert outcome == DeliveryResult(f"HTTP {status}, a redirect, which is not followed", False, False)
        assert len(receiver.received) == 1
        assert elsewhere.received == []


def test_non_http_schemes_are_refused(tmp_path: Any) -> None:
    """Both the check of new webhooks and the delivery of stored webhooks refuse them."""
    path = tmp_path / "file"
    path.write_text("secret")
    for url in (
        f"file://{path}",
        "ftp://127.0.0.1/x",
        "data:text/plain,x",
        "unix:///x",
        "gopher://127.0.0.1/",
    ):
        with pytest.raises(InvalidError, match="expected an address of http or https"):
            check_url(url)
        outcome = Sender("key").post(url, BODY)
        assert outcome is not None
        assert not outcome.is_delivered, url


def test_url_cannot_inject_headers() -> None:
    for url in ("http://127.0.0.1:1/\r\nX-Evil: 1", "http://127.0.0.1:1/a b", "http://a\tb/"):
        with pytest.raises(InvalidError, match="expected"):
            check_url(url)
        with receiving() as receiver:
            Sender("key").post(url.replace("127.0.0.1:1", f"127.0.0.1:{receiver.port}"), BODY)
            assert all("x-evil" not in one.headers for one in receiver.received)


def test_loopback_receiver_bypasses_environment_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as proxy, receiving() as receiver:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert Sender("key").post(receiver.url, BODY) == DeliveryResult("HTTP 200", True, False)
        assert proxy.received == []
        assert Sender("key").post("http://hooks.example/x", BODY) == DeliveryResult("HTTP 200", True, False)
        assert [one.path for one in proxy.received] == ["http://hooks.example/x"]
        assert len(receiver.received) == 1


def test_url_credentials_become_basic_auth() -> None:
    with receiving() as receiver:
        url = receiver.url.replace("http://", "http://me:s%40cret@")
        assert Sender("key").post(url, BODY) == DeliveryResult("HTTP 200", True, False)
        (got,) = receiver.received
    assert got.headers["authorization"] == "Basic bWU6c0BjcmV0"
    assert "me" not in got.headers["host"]


def test_shutdown_aborts_delivery_without_result() -> None:
    with receiving() as receiver:
        receiver.hangs = True
        sender = Sender("key", timeout_s=60)
        outcomes: list[DeliveryResult | None] = []
        thread = threading.Thread(target=lambda: outcomes.append(sender.post(receiver.url, BODY)))
        thread.start()
        receiver.wait()
        before_s = time.monotonic()
        sender.end()
        thread.join(20)
        wait_for(lambda: outcomes, "the end of the attempt")
        assert time.monotonic() - before_s < 20
        assert outcomes == [None]
        assert sender.post(receiver.url, BODY) is None
        assert len(receiver.received) == 1
