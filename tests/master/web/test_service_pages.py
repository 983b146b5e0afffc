"""A hostile task service, opened in the browser of a logged-in user."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from determined.common.api.errors import APIException
from tasks_here import TasksHere, wait_for

from dstrial.ranks.sockets import free_port
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

# The page tries requests to the master with the user's cookies, and a service worker for /; it also uses its own server.
SERVICE = r"""
import http.server, json, sys

MASTER = sys.argv[2]
PAGE = '''<title>hostile</title><script>
const tried = async (name, action) => {
  try { found[name] = await action(); } catch (error) { found[name] = "refused"; }
};
const found = {};
const socket = () => new Promise((done, fail) => {
  const opened = new WebSocket(location.href.replace("http", "ws"));
  opened.onopen = () => opened.send("abc");
  opened.onmessage = (event) => done(event.data);
  opened.onerror = fail;
});
(async () => {
  const own = { credentials: "include" };
  for (const at of [MASTER, ""]) {
    await tried("read " + at, async () => (await fetch(at + "/api/v1/me", own)).status);
    await tried("change " + at, async () =>
      (await fetch(at + "/api/v1/workspaces", { ...own, method: "POST", body: '{"name": "hostile"}' })).status);
  }
  await tried("frame", () => new Promise((done, fail) => {
    const frame = document.createElement("iframe");
    frame.src = MASTER;
    frame.onload = () => { try { done(frame.contentDocument.title); } catch { fail(); } };
    document.body.append(frame);
  }));
  await tried("worker", async () => { await navigator.serviceWorker.register("sw.js", { scope: "/" }); return "kept"; });
  await tried("cookie", async () => document.cookie);
  await tried("own", async () => (await fetch("own", { method: "POST", body: "mine" })).text());
  await tried("socket", socket);
  await tried("clearing", async () => (await fetch("cleared")).status);
  window.found = found;
})();
</script><body></body>'''.replace("MASTER", json.dumps(MASTER))
WORKER = '''self.addEventListener("fetch", (event) => event.respondWith(new Response("taken", {
  headers: { "Content-Type": "text/html" } })));
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(clients.claim()));'''

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.answer("text/plain", self.rfile.read(int(self.headers["Content-Length"])) + b" " + self.cookies())

    def do_GET(self):
        if self.headers.get("Upgrade") == "websocket":
            self.echo()
        elif self.path.endswith("sw.js"):
            self.answer("text/javascript", WORKER.encode())
        else:
            self.answer("text/html", PAGE.encode())

    def cookies(self):
        return "; ".join(sorted(self.headers.get("Cookie", "").split("; "))).encode()

    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Service-Worker-Allowed", "/")
        self.send_header("Set-Cookie", "auth=planted; Path=/")
        self.send_header("Set-Cookie", "auth=planted; Path=/; Domain=localhost")
        self.send_header("Set-Cookie", "own=1; Path=/")
        if "cleared" in self.path:
            self.send_header("Clear-Site-Data", '"cookies", "storage"')
        self.end_headers()
        self.wfile.write(body)

    def echo(self):
        from wsproto.connection import Connection, ConnectionType
        from wsproto.events import TextMessage
        from wsproto.utilities import generate_accept_token
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade")):
            self.send_header(name, value)
        key = self.headers["Sec-WebSocket-Key"].encode()
        self.send_header("Sec-WebSocket-Accept", generate_accept_token(key).decode())
        self.end_headers()
        frames = Connection(ConnectionType.SERVER)
        frames.receive_data(self.connection.recv(65536))
        for event in frames.events():
            self.connection.sendall(frames.send(TextMessage(data=event.data[::-1] + " " + self.cookies().decode())))
        self.close_connection = True

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def hostile(shared_master: MasterForTest, tmp_path: Path) -> Iterator[tuple[TasksHere, str]]:
    """The user of a task that runs SERVICE, and the path of its page on the master."""
    det, port, context = TasksHere(shared_master, tmp_path), free_port(), tmp_path / "context"
    context.mkdir()
    (context / "service.py").write_text(SERVICE)
    offered = {"resources.slots": 0, "environment.proxy_ports": [{"proxy_port": port}]}
    master = f"http://localhost:{shared_master.record.port}"
    task_id = det.run("--context", str(context), sys.executable, "service.py", str(port), master, **offered)
    path = f"/proxy/{task_id}:{port}/page"
    wait_for(lambda: _answers(det, path), "the service")
    yield det, path
    det.ok("command", "kill", task_id)


@contextlib.contextmanager
def window(chromium: Any, det: TasksHere, **options: Any) -> Iterator[Any]:
    """Open a browser window that is logged in to the master; yield its page."""
    master = f"http://localhost:{det.master.record.port}"
    context = chromium.new_context(**options)
    context.set_default_timeout(30_000)
    cookie = {"name": "auth", "value": det.token, "url": master, "httpOnly": True, "sameSite": "Strict"}
    context.add_cookies([cookie])
    yield context.new_page()
    context.close()


def _answers(det: TasksHere, path: str) -> bool:
    with contextlib.suppress(APIException):
        return bool(det.session.get(path[1:]).ok)
    return False


def test_service_page_reaches_neither_master_nor_session(
    hostile: tuple[TasksHere, str], chromium: Any
) -> None:
    det, path = hostile
    port = det.master.record.port
    master = f"http://localhost:{port}"
    with window(chromium, det) as page:
        page.goto(f"{master}/login")  # start on a page of the master and follow a link to the service
        page.evaluate("(url) => { location.href = url; }", f"{master}{path}?a=%2F")
        page.wait_for_url(lambda url: url.endswith(f"{path}?a=%2F"))
        page.wait_for_function("window.found")

        task_id = path.split("/")[2].partition(":")[0]
        assert page.url == f"http://{task_id}.localhost:{port}{path}?a=%2F"
        found = page.evaluate("window.found")
        assert found.pop("own") == "mine own=1"
        assert found.pop("socket") == "cba own=1"
        assert found.pop("worker") == "kept"  # registered for the task's own host name, not for the master's
        assert found.pop("cookie") == "auth=planted; own=1"
        assert found.pop("clearing") == 200
        assert set(found.values()) <= {"refused", 401, 403}, json.dumps(found)

        kept = [one for one in page.context.cookies(master) if one["name"] == "auth"]
        assert [(one["value"], one["domain"]) for one in kept] == [(det.token, "localhost")]
        page.goto(master)
        page.wait_for_selector("main h1")
        assert page.evaluate("navigator.serviceWorker.controller") is None
        names = [one["name"] for one in det.session.get("api/v1/workspaces").json()["workspaces"]]
        assert "hostile" not in names


def test_service_page_reopens_after_grant_is_lost(hostile: tuple[TasksHere, str], chromium: Any) -> None:
    det, path = hostile
    master = f"http://localhost:{det.master.record.port}"
    with window(chromium, det, service_workers="block") as page:
        page.goto(master + path)
        page.wait_for_function("window.found")
        opened = page.url

        page.context.clear_cookies(name="dstrial-service")
        page.reload()
        page.wait_for_function("window.found")

        assert page.url == opened
        page.context.clear_cookies(name="auth", domain="localhost")
        page.goto("about:blank")
        page.context.clear_cookies(name="dstrial-service")
        page.goto(opened)
        assert (page.url, "Log in" in page.content()) == (master + path, True)
