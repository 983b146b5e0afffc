"""Hostile paths, bodies and model definitions are refused with a 4xx status."""

from __future__ import annotations

import base64
import socket
from typing import Any

import pytest
from serving import Master

pytestmark = pytest.mark.process

CONFIG = """\
name: hostile
entrypoint: 'true'
searcher: {name: single, metric: loss, max_length: {batches: 9}}
resources: {slots_per_trial: 0}
"""
PATHS = (
    "/../../../../etc/passwd",
    "/api/v1/../../etc/passwd",
    "/api/v1/tasks/..%2f..%2fetc%2fpasswd",
    "/api/v1/users/1%00/by-username",
    "/api/v1/users/'%20OR%201=1%20--/by-username",
    "/api/v1/experiments/1;DROP%20TABLE%20trials",
    "/api/v1/experiments/" + "9" * 400,
    "/checkpoints/..%2f..%2fmaster.db",
    "/credentials.json",
    "//evil.example/api/v1/me",
    "/api/v1/" + "a/" * 2000,
)
BODIES = {
    "no JSON": b"\xff\xfe",
    "NaN": b'{"username": NaN}',
    "5,000 levels deep": b"[" * 5000 + b"]" * 5000,
    "a number beyond floats": b'{"username": 1e999}',
    "a lone surrogate": b'{"username": "\\ud800", "password": 1}',
}
_FILE = {
    "type": 48,
    "content": base64.b64encode(b"owned").decode(),
    "mtime": "0",
    "mode": 0o644,
    "uid": 0,
    "gid": 0,
}
DEFINITIONS: dict[str, Any] = {
    "an absolute path": [{**_FILE, "path": "/tmp/dstrial-owned"}],
    "a path upwards": [{**_FILE, "path": "../owned"}],
    "a path upwards in the middle": [{**_FILE, "path": "a/../../owned"}],
    "a symbolic link": [{**_FILE, "path": "link", "type": 50, "content": base64.b64encode(b"/etc").decode()}],
    "a hard link": [{**_FILE, "path": "link", "type": 49}],
    "a device": [{**_FILE, "path": "device", "type": 51}],
    "a named pipe": [{**_FILE, "path": "pipe", "type": 54}],
    "a NUL in its path": [{**_FILE, "path": "a\x00b"}],
    "an empty path": [{**_FILE, "path": ""}],
    "content that is no base64": [{**_FILE, "path": "a", "content": "%%%"}],
    "a file where a directory is": [{**_FILE, "path": "a"}, {**_FILE, "path": "a/b"}],
    "no list": {"path": "a"},
}
METRICS: dict[str, Any] = {
    "no numbers": {"trialRunId": 1, "stepsCompleted": "many", "metrics": {}},
    "a list": {"trialRunId": 1, "stepsCompleted": 5, "metrics": {"avgMetrics": [1]}},
    "steps beyond 64 bits": {"trialRunId": 1, "stepsCompleted": 2**63, "metrics": {"avgMetrics": {}}},
    "no object": 3,
}


def is_refused(master: Master, method: str, path: str, body: Any = None, token: str = "determined") -> bool:
    answer = master.send(method, path, body, token=token)
    assert b"Traceback" not in answer.content
    return 400 <= answer.status < 500 or answer.status == 501


@pytest.mark.parametrize("path", PATHS)
def test_hostile_path_is_refused(served: Master, path: str) -> None:
    assert is_refused(served, "GET", path)


@pytest.mark.parametrize("name", BODIES)
def test_hostile_body_is_refused(served: Master, name: str) -> None:
    assert is_refused(served, "POST", "/api/v1/auth/login", BODIES[name])


@pytest.mark.parametrize("name", DEFINITIONS)
def test_hostile_model_definition_is_refused(served: Master, name: str) -> None:
    body = {"config": CONFIG, "modelDefinition": DEFINITIONS[name], "activate": False}
    assert is_refused(served, "POST", "/api/v1/experiments", body)
    assert not list(served.services.state_dir.parent.rglob("*owned*"))


@pytest.mark.parametrize("name", METRICS)
def test_hostile_report_is_refused(served: Master, name: str) -> None:
    body = {"group": "training", "metrics": METRICS[name]}
    assert is_refused(served, "POST", "/api/v1/trials/1/metrics", body, token="trial-1")


def test_body_of_a_terabyte_is_refused(served: Master) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(
            b"POST /api/v1/auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
        )
        assert b"".join(iter(lambda: connection.recv(65536), b"")).split()[1] == b"413"
