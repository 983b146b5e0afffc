"""The proxy with services of other accounts and with malformed responses."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from det_here import DetHere
from door import OTHER_ACCOUNT, PYTHON, connect, memory_mib, needs_root, read_all, request, status_of
from waiting import wait_for

from dstrial.ranks.sockets import free_port
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

DEADLINE_S = 60.0
# The last part of the path selects the response.
SERVICE = r"""
import http.server, itertools, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        kind, line = self.path.rsplit("/", 1)[1], b"HTTP/1.1 200 OK\r\n"
        answers = {
            "whole": [line + b"Content-Length: 5\r\n\r\nwhole"],
            "cut": [line + b"Transfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n"],
            "nothing": [],
            "headers": [line + b"Connection: X-Hop, close\r\nX-Hop: 1\r\nX-Kept: 1\r\n\r\n" + bytes(self.headers)],
            "999": [b"HTTP/1.1 999 Beyond\r\nContent-Length: 0\r\n\r\n"],
            "101": [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
            "endless": itertools.chain([line], itertools.repeat(b"X: " + b"y" * 60_000 + b"\r\n")),
            "one-header": itertools.chain([line + b"X: "], itertools.repeat(b"y" * 60_000)),
            "no-http": [b"220 welcome\r\n\r\n"],
            "two-lengths": [line + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nwhole"],
        }
        try:
            for piece in answers[kind]:
                self.wfile.write(piece)
        except OSError:
            pass
        self.close_connection = True

    do_CONNECT = do_GET

    def log_message(self, *words):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def service(shared_master: MasterForTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start ``SERVICE`` as a task; yield its path at the proxy."""
    home, port = tmp_path_factory.mktemp("hostile"), free_port()
    (home / "context").mkdir()
    (home / "context" / "service.py").write_text(SERVICE)
    path = _run(shared_master, home, port, sys.executable, "service.py", str(port))
    wait_for(lambda: _ask(shared_master, f"{path}/whole")[0] == 200, "the service")
    yield path
    DetHere.at(shared_master, home).ok("command", "kill", path.split("/")[2].partition(":")[0])


def _run(master: MasterForTest, home: Path, port: int, *words: str) -> str:
    options = ("--config=resources.slots=0", f"--config=environment.proxy_ports=[{{proxy_port: {port}}}]")
    det = DetHere.at(master, home)
    where = ("--context", str(home / "context"))
    return f"/proxy/{det.ok('command', 'run', '--detach', *options, *where, *words).split()[-1]}:{port}"


def _ask(master: MasterForTest, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", master.record.port, timeout=DEADLINE_S)
    sent = {"Host": f"localhost:{master.record.port}", "Authorization": f"Bearer {master.client().token}"}
    connection.request("GET", path, headers={**sent, **headers})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def test_non_ascii_request_path_returns_400(shared_master: MasterForTest, service: str) -> None:
    with connect(shared_master.record.port) as connection:
        auth = f"Authorization: Bearer {shared_master.client().token}"
        connection.sendall(request("GET", f"{service}/ü", auth, "Connection: close"))
        assert status_of(read_all(connection)) == 400


def test_connect_request_does_not_break_master(shared_master: MasterForTest, service: str) -> None:
    with connect(shared_master.record.port) as connection:
        auth = f"Authorization: Bearer {shared_master.client().token}"
        connection.sendall(request("CONNECT", f"{service}/whole", auth))
        read_all(connection)
    assert _ask(shared_master, "/api/v1/me")[0] == 200


def test_proxy_drops_headers_named_by_connection_header(shared_master: MasterForTest, service: str) -> None:
    sent = {"Connection": "X-Own, Content-Length, Host", "X-Own": "1", "X-Sent": "1", "Content-Length": "0"}

    status, headers, content = _ask(shared_master, f"{service}/headers", **sent)

    assert (status, headers["X-Hop"], headers["X-Kept"]) == (200, None, "1")
    received = content.decode().lower()
    assert [name in received for name in ("x-own:", "x-sent:", "content-length:", "host:")] == [
        False,
        True,
        True,
        True,
    ]


def test_proxy_forwards_single_framing_header(shared_master: MasterForTest, service: str) -> None:
    auth = f"Authorization: Bearer {shared_master.client().token}"
    framings = ("Content-Length: 4", "Transfer-Encoding: chunked")
    with connect(shared_master.record.port) as connection:
        connection.sendall(
            request("GET", f"{service}/headers", auth, *framings, "Connection: close", body=b"0\r\n\r\n")
        )
        received = read_all(connection).lower()
    assert (b"transfer-encoding: chunked" in received, b"content-length: 4" in received) == (True, False)


def test_truncated_chunked_response_raises_incomplete_read(
    shared_master: MasterForTest, service: str
) -> None:
    with pytest.raises(http.client.IncompleteRead):
        _ask(shared_master, f"{service}/cut")


NO_ANSWERS = {
    "999": b"has status 999",
    "101": b"is not whole or no HTTP",
    "endless": b"is not whole or no HTTP",
    "one-header": b"is not whole or no HTTP",
    "no-http": b"is not whole or no HTTP",
    "nothing": b"expected HTTP",
    "two-lengths": b"is not whole or no HTTP",
}


@pytest.mark.parametrize("kind", NO_ANSWERS)
def test_malformed_service_response_returns_502(
    shared_master: MasterForTest, service: str, kind: str
) -> None:
    before = memory_mib(shared_master.record.pid, "VmHWM")

    status, _, content = _ask(shared_master, f"{service}/{kind}")

    assert (status, NO_ANSWERS[kind] in content) == (502, True), content
    assert memory_mib(shared_master.record.pid, "VmHWM") - before < 16
    assert "Traceback" not in shared_master.state.log_path.read_text()


_FOREIGN = """
import os, sys
os.setgroups([]); os.setgid({account}); os.setuid({account})
import http.server, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, flush=True)
        self.wfile.write(b"HTTP/1.1 200 OK\\r\\n\\r\\nforeign")
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
    def get_request(self):
        found = super().get_request()
        if len(sys.argv) > 3:
            self.socket.close()
        return found
server = Server((sys.argv[1], int(sys.argv[2])), Handler)
print("listens", flush=True)
server.serve_forever()
"""


@needs_root
@pytest.mark.parametrize("options", [("127.0.0.1",), ("0.0.0.0",), ("::",), ("127.0.0.1", "closes")])
def test_proxy_refuses_port_of_other_account(
    shared_master: MasterForTest, tmp_path: Path, options: tuple[str, ...]
) -> None:
    port = free_port()
    (tmp_path / "context").mkdir()
    path = _run(shared_master, tmp_path, port, "sleep", "600")
    wait_for(
        lambda: b"does not answer" in _ask(shared_master, path + "/")[2], "the task", deadline_s=DEADLINE_S
    )
    words = [PYTHON, "-I", "-c", _FOREIGN.format(account=OTHER_ACCOUNT), options[0], str(port), *options[1:]]
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    with subprocess.Popen(words, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as foreign:
        assert foreign.stdout is not None
        assert foreign.stdout.readline() == b"listens\n"
        try:
            for headers in [{}] if len(options) > 1 else [{}, upgrade]:
                status, _, content = _ask(shared_master, path + "/secret", **headers)
                why = f"is held by user id {OTHER_ACCOUNT}".encode()
                assert (status, why in content) == (502, True), content
        finally:
            foreign.kill()
        assert foreign.stdout.read() == b""
    DetHere.at(shared_master, tmp_path).ok("command", "kill", path.split("/")[2].partition(":")[0])


def test_master_cookie_alone_redirects_to_task_host(shared_master: MasterForTest, service: str) -> None:
    port, task_id = shared_master.record.port, service.split("/")[2].partition(":")[0]
    cookie = {"Authorization": "", "Cookie": f"auth={shared_master.client().token}"}

    status, headers, content = _ask(shared_master, f"{service}/whole", **cookie)

    own = f"http://{task_id}.localhost:{port}{service}/whole?dstrial-grant="
    assert (status, content) == (307, b"")
    code = headers["Location"].removeprefix(own)
    assert headers["Location"] == own + code
    at_own = {"Host": f"{task_id}.localhost:{port}", "Authorization": ""}
    status, headers, _ = _ask(shared_master, f"{service}/whole?dstrial-grant={code}", **at_own)
    granted = headers["Set-Cookie"].partition(";")[0]
    assert (status, headers["Location"]) == (307, f"{service}/whole")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert code not in granted

    assert _ask(shared_master, f"{service}/whole", Cookie=granted, **at_own)[2] == b"whole"
    # A grant code works only once. The cookie opens only this task, and only at the task's own host.
    again = _ask(shared_master, f"{service}/whole?dstrial-grant={code}", **at_own)
    assert (again[0], again[1]["Set-Cookie"]) == (307, None)
    for path, host in (
        (f"{service}/whole", f"localhost:{port}"),
        (f"{service}/whole", f"other.localhost:{port}"),
        ("/api/v1/me", f"{task_id}.localhost:{port}"),
    ):
        refused = _ask(shared_master, path, Host=host, Authorization="", Cookie=granted)
        assert refused[0] in (401, 403), (path, host, refused)
    for origin in ("null", f"http://localhost:{port}", "http://evil.example"):
        refused = _ask(shared_master, f"{service}/whole", Cookie=granted, Origin=origin, **at_own)
        assert refused[0] == 403, origin
    with connect(port) as connection:
        upgrade = ("Connection: Upgrade", "Upgrade: websocket", f"Cookie: {cookie['Cookie']}")
        connection.sendall(request("GET", f"{service}/whole", *upgrade, "Origin: http://localhost"))
        assert status_of(read_all(connection)) == 403
