"""Commands and generic tasks: logs, slots, exit codes and proxied services."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
import yaml
from determined.cli import proxy
from determined.common import detlomond
from lomond import events
from submitting import config, submit, wait_until
from tasks_here import DEADLINE_S, TasksHere, wait_for

from dstrial.master.lifecycle import commands
from dstrial.master.login import USERNAME
from dstrial.master.store.database import Database, Transaction
from dstrial.ranks.sockets import free_port
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        seen = {"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}, "size": len(body)}
        answer = json.dumps(seen).encode() + b" " * len(body)
        self.send_response(202)
        self.send_header("X-Own", "yes")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self):
        from wsproto.connection import Connection, ConnectionType
        from wsproto.events import CloseConnection, TextMessage
        from wsproto.utilities import generate_accept_token
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade")):
            self.send_header(name, value)
        key = self.headers["Sec-WebSocket-Key"].encode()
        self.send_header("Sec-WebSocket-Accept", generate_accept_token(key).decode())
        self.end_headers()
        frames, said = Connection(ConnectionType.SERVER), ""
        while data := self.connection.recv(65536):
            frames.receive_data(data)
            for event in frames.events():
                if isinstance(event, TextMessage):
                    said += event.data
                    if event.message_finished:
                        self.connection.sendall(frames.send(TextMessage(data=said[::-1])))
                elif isinstance(event, CloseConnection):
                    self.connection.sendall(frames.send(event.response()))
                    return

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ECHO = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = listener.accept()
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.close()
"""


@pytest.fixture
def det(task_master: MasterForTest, tmp_path: Path) -> TasksHere:
    return TasksHere(task_master, tmp_path)


def test_command_runs_in_context_and_reports_exit_code(det: TasksHere, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "note.txt").write_text("a note\n")
    (tmp_path / "part.yaml").write_text(
        "environment: {environment_variables: [A=template, B=template]}\nname: x\n"
    )
    det.ok("template", "create", "variables", str(tmp_path / "part.yaml"))
    line = "cat note.txt; echo $A $B $DET_TASK_TYPE $#; echo oops >&2; det user whoami; exit 3"

    printed = det.ok(
        "command", "run", "--template", "variables", "--config=environment.environment_variables=[A=own]",
        "--context", str(context), line,
    )  # fmt: skip

    (task_id,) = set(re.findall(r"id: ([0-9a-f-]{36}),", printed))
    assert det.log(task_id) == [
        "a note",
        "own template COMMAND 0",
        "oops",
        f"You are logged in as user '{USERNAME}'",
    ]
    assert "has failed: resources failed with non-zero exit code" in printed
    assert det.command(task_id)["exitStatus"] == "exited with code 3"
    assert f"{task_id} " in det.ok("command", "list")
    assert "TERMINATED" in det.ok("command", "describe", task_id)
    stored = yaml.safe_load(det.ok("command", "config", task_id))
    assert stored["entrypoint"] == [line]
    assert stored["resources"]["slots"] == 1
    assert stored["environment"]["environment_variables"]["cpu"] == ["A=own", "B=template"]
    assert task_id not in det.ok("task", "list")


def test_commands_and_trials_share_one_queue(det: TasksHere, task_master: MasterForTest) -> None:
    first = det.run("sleep", "600")
    det.wait(first, "RUNNING")
    later, urgent = det.run("sleep", "600"), det.run("echo", "done")
    experiment_id = submit(task_master, config("true", searcher={"name": "single", "metric": "score"}), "")
    none = det.run("true", **{"resources.slots": 0})

    det.wait(none, "TERMINATED")
    assert [det.command(one)["state"] for one in (first, later, urgent)] == [
        "STATE_RUNNING",
        "STATE_QUEUED",
        "STATE_QUEUED",
    ]
    det.ok("command", "set", "priority", urgent, "1")
    rows = [line.split("|") for line in det.ok("job", "list").splitlines() if "STATE_" in line]
    assert [(row[2].strip(), row[7].strip()) for row in rows] == [
        ("TYPE_COMMAND", "STATE_QUEUED"),
        ("TYPE_COMMAND", "STATE_SCHEDULED"),
        ("TYPE_COMMAND", "STATE_QUEUED"),
        ("TYPE_EXPERIMENT", "STATE_QUEUED"),
    ]
    assert first in det.ok("task", "list")
    job_id = det.session.get(f"api/v1/experiments/{experiment_id}").json()["experiment"]["jobId"]
    move = {"jobId": job_id, "aheadOf": det.command(later)["jobId"]}
    det.session.post("api/v1/job-queues", json={"updates": [move]})
    ids = [line.split("|")[1].strip() for line in det.ok("job", "list").splitlines() if "STATE_" in line]
    assert ids.index(job_id) + 1 == ids.index(det.command(later)["jobId"])

    det.ok("command", "kill", first)
    det.wait(urgent, "TERMINATED")
    det.wait(later, "RUNNING")
    assert det.command(first)["exitStatus"] == "allocation killed: a user has killed it"
    det.ok("command", "kill", later, first)
    wait_until(task_master, experiment_id, "COMPLETED")
    used = det.ok("resources", "raw", "2000-01-01T00:00:00", "2100-01-01T00:00:00")
    assert ",command,determined," in used


def test_killed_command_leaves_no_process(det: TasksHere, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    task_id = det.run(f"sleep 600 & setsid sleep 600 & echo $! $$ > {path}.new; mv {path}.new {path}; wait")
    wait_for(path.exists, "the pids")
    pids = path.read_text().split()

    det.ok("command", "kill", task_id)

    det.wait(task_id, "TERMINATED")
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_invalid_command_config_lists_every_problem(det: TasksHere, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("resources: {slots: 9}\nentry: x\nwork_dir: /nowhere/at/all\nidle_timeout: soon\n")

    problems = det.refused("command", "run", "--config-file", str(path))

    for part in (
        "entry is not a key",
        "resources.slots is 9",
        "work_dir is",
        "idle_timeout",
    ):
        assert part in problems
    assert "is not found" in det.refused("command", "kill", "00000000-0000-0000-0000-000000000000")


def test_generic_task_tree_is_paused_forked_killed(det: TasksHere, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "note.txt").write_text("a note\n")
    text = "entrypoint: cat note.txt; sleep 600\nresources: {slots: 0}\n"
    task_id = det.task(text, "--context", str(context))
    child = det.task(text, "--parent", task_id, "--inherit_context")
    stubborn = det.task(
        "entrypoint: [sleep, '600']\nresources: {slots: 0}\n", "--parent", child, "--no_pause"
    )
    for one in (task_id, child):
        wait_for(lambda one=one: det.log(one) == ["a note"], "the first run")  # type: ignore[misc]

    det.ok("task", "pause", task_id)
    for one in (task_id, child):
        wait_for(lambda one=one: det.generic(one)["taskState"] == "PAUSED", "the pause")  # type: ignore[misc]
    assert det.generic(stubborn)["taskState"] == "ACTIVE"
    assert "--no_pause" in det.refused("task", "pause", stubborn)
    assert "expected PAUSED" in det.refused("task", "unpause", stubborn)
    listed = det.ok("task", "list")
    assert (task_id in listed, stubborn in listed) == (False, True)

    det.ok("task", "unpause", task_id)
    for one in (task_id, child):
        wait_for(lambda one=one: det.log(one) == ["a note", "a note"], "the second run")  # type: ignore[misc]
    fork = re.search(r"Created task (\S+)", det.ok("task", "fork", task_id))
    assert fork is not None
    wait_for(lambda: det.log(fork[1]) == ["a note"], "the fork")
    assert det.generic(fork[1])["forkedFrom"] == task_id
    assert json.loads(det.ok("task", "config", "--json", fork[1]))["entrypoint"] == "cat note.txt; sleep 600"

    det.ok("task", "kill", "--root", stubborn)
    for one in (task_id, child, stubborn):
        wait_for(lambda one=one: det.generic(one)["taskState"] == "CANCELED", "the end")  # type: ignore[misc]
    assert det.generic(fork[1])["taskState"] == "ACTIVE"
    det.ok("task", "kill", fork[1])


def test_proxy_forwards_requests_without_user_token(det: TasksHere, tmp_path: Path) -> None:
    port, context = free_port(), tmp_path / "context"
    context.mkdir()
    (context / "server.py").write_text(SERVER)
    ports = {"resources.slots": 0, "environment.proxy_ports": [{"proxy_port": port}]}
    task_id = det.run("--context", str(context), sys.executable, "server.py", str(port), **ports)
    path, data = f"/proxy/{task_id}:{port}/a%2Fb/c?d=e%20f", b"x" * 3_000_000
    wait_for(lambda: _send(det, "POST", path, b"")[0] == 202, "the server")

    status, headers, content = _send(
        det, "POST", path, data, {"Cookie": f"auth={det.token}; own=1", "X-Mine": "1"}
    )

    seen = json.loads(content)
    assert (status, headers["x-own"], len(content) > len(data)) == (202, "yes", True)
    assert (seen["path"], seen["size"], seen["headers"]["x-mine"]) == (path, len(data), "1")
    assert seen["headers"]["cookie"] == "own=1"
    assert det.token not in json.dumps(seen)
    assert f"{port}" in det.ok("task", "list")

    # Requests without a token or from a foreign origin are refused.
    assert _send(det, "POST", path, b"", {"Authorization": ""})[0] == 401
    foreign = {"Authorization": "", "Cookie": f"auth={det.token}", "Origin": "http://localhost:1"}
    assert _send(det, "POST", path, b"", foreign)[0] == 403
    assert b"none of environment.proxy_ports" in _send(det, "POST", f"/proxy/{task_id}:1/", b"")[2]
    upgrade = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    assert _send(det, "GET", path, b"", {**upgrade, **foreign})[0] == 403
    assert _send(det, "GET", "/api/v1/me", b"", upgrade)[0] == 404

    socket_ = detlomond.WebSocket(det.session, f"proxy/{task_id}:{port}/")
    said = []
    for event in socket_.connect(ping_rate=0):
        if isinstance(event, events.Ready):
            socket_.send_text("abc" * 40_000)
        elif isinstance(event, events.Text):
            said.append(event.text)
            socket_.close()
    assert said == ["cba" * 40_000]
    det.ok("command", "kill", task_id)
    det.wait(task_id, "TERMINATED")
    assert _send(det, "POST", path, b"")[0] == 404


def _send(
    det: TasksHere, method: str, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    port = det.master.record.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        sent = {"Host": f"localhost:{port}", "Authorization": f"Bearer {det.token}", **(headers or {})}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_det_tunnel_carries_bytes_to_tcp_port(det: TasksHere, tmp_path: Path) -> None:
    port, local_port, context = free_port(), free_port(), tmp_path / "context"
    context.mkdir()
    (context / "echo.py").write_text(ECHO)
    ports = {"resources.slots": 0, "environment.proxy_ports": [{"proxy_port": port, "proxy_tcp": True}]}
    task_id = det.run("--context", str(context), sys.executable, "-u", "echo.py", str(port), **ports)
    wait_for(lambda: _listens(port), "the server")
    data = bytes(range(256)) * 4000

    listener = proxy.ListenerConfig(f"{task_id}:{port}", local_port, "127.0.0.1")
    with proxy.http_tunnel_listener(det.session, [listener]):
        with socket.create_connection(("127.0.0.1", local_port), timeout=DEADLINE_S) as connection:
            sending = threading.Thread(target=connection.sendall, args=(data,))
            sending.start()
            received = bytearray()
            while len(received) < len(data):
                received += connection.recv(65536)
            sending.join()
        det.ok("command", "kill", task_id)

    assert bytes(received) == data


def test_command_beyond_capacity_logs_waiting_once(det: TasksHere) -> None:
    slot = _disable_slot(det)
    try:
        task_id = det.run("echo", "done")
        told = "it needs 1 slot and waits; this master has 0"
        wait_for(lambda: told in det.ok("command", "logs", task_id), "the line in its log")
        # The next pass over the queue logs no second line.
        det.wait(det.run("true", **{"resources.slots": 0}), "TERMINATED")
    finally:
        det.master.client("admin").post(f"/{slot}/enable")

    det.wait(task_id, "TERMINATED")
    assert det.log(task_id) == ["done"]
    assert det.ok("command", "logs", task_id).count("and waits") == 1


def _disable_slot(det: TasksHere) -> str:
    """Disable the slot, and return its API path."""
    (agent,) = det.session.get("api/v1/agents").json()["agents"]
    slot = f"api/v1/agents/{agent['id']}/slots/0"
    det.master.client("admin").post(f"/{slot}/disable")
    return slot


def test_unstarted_command_begins_after_master_restart(
    det: TasksHere,
) -> None:
    _disable_slot(det)
    task_id, state = det.run("echo", "done"), det.master.state
    det.master.kill()

    def assign(tx: Transaction) -> None:
        tx.execute("DELETE FROM disabled_slots")
        directory = str(state.path / "allocations")
        commands.assign(
            tx, task_id, slots=[0], ports={}, resources_id="r", directory=directory, token_hashes={}
        )

    with contextlib.closing(Database(state.database_path)) as database:
        database.write(assign)
    det.master.up()

    det.wait(task_id, "TERMINATED")
    assert (det.log(task_id), det.command(task_id)["exitStatus"]) == (["done"], "exited with code 0")
    assert "the master was killed before the process began" in det.ok("command", "logs", task_id)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
