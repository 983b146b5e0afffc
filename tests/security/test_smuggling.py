"""HTTP request smuggling at the master's port; proxy: test_hostile_services.py."""

from __future__ import annotations

import pytest
from door import connect, read_all, status_of

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

_LOGIN = "POST /api/v1/auth/login HTTP/1.1\r\nHost: localhost\r\n"
_HIDDEN = "GET /info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

AMBIGUOUS = {
    "two lengths": "Content-Length: 0\r\nContent-Length: 4\r\n\r\n",
    "a list of lengths": "Content-Length: 0, 4\r\n\r\n",
    "a length with a sign": "Content-Length: +0\r\n\r\n",
    "a length in hexadecimal": "Content-Length: 0x0\r\n\r\n",
    "another coding": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a bare carriage return": "X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a NUL": "X: y\0Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n",
    "a chunk with a sign": "Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    "a chunk with a prefix": "Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
    "a chunk longer than it says": "Transfer-Encoding: chunked\r\n\r\n1\r\nxx\r\n0\r\n\r\n",
    "a second host": "Host: evil.example\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("framing", AMBIGUOUS)
def test_ambiguous_request_and_smuggled_request_are_rejected(
    shared_master: MasterForTest, framing: str
) -> None:
    with connect(shared_master.record.port) as connection:
        connection.sendall((_LOGIN + AMBIGUOUS[framing] + _HIDDEN).encode())
        answers = read_all(connection)
    statuses = [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses in ([400], []), answers


def test_trailer_is_not_parsed_as_header(shared_master: MasterForTest) -> None:
    token = shared_master.client().token
    for trailer in (f"Authorization: Bearer {token}", "Host: localhost"):
        is_host = trailer.startswith("Host")
        head = "GET /api/v1/me HTTP/1.1\r\n" + ("" if is_host else "Host: localhost\r\n")
        head += f"Authorization: Bearer {token}\r\n" if is_host else ""
        sent = f"{head}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n{trailer}\r\n\r\n"
        with connect(shared_master.record.port) as connection:
            connection.sendall(sent.encode())
            assert status_of(read_all(connection)) == (400 if is_host else 401), trailer


@pytest.mark.parametrize("method", ["PRI", "CONNECT", "get", "G\0T"])
def test_unsupported_methods_are_rejected(shared_master: MasterForTest, method: str) -> None:
    for target in ("*", "localhost:80", "http://evil.example/info", "/info"):
        with connect(shared_master.record.port) as connection:
            connection.sendall(
                f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            assert status_of(read_all(connection)) in (400, 404, 405, 501), (method, target)
