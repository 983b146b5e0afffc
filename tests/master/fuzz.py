"""A fuzzer that sends mutated and hostile requests to a master.

The master runs in this process with a filled store and without a scheduler. A failure is an answer with a 5xx status other
than 501, an error that shows a traceback or is not in the API's format, or a damaged database.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import http.client
import json
import random
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from serving import Master

from dstrial.master.app import all_routes
from dstrial.master.http.router import Route
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Transaction

_TIMEOUT_S = 20.0
_REVIVE_EVERY = 20
_TRACES = (b"Traceback", b'File "', b"sqlite3.", b'.py", line')

_DATA = yaml.safe_load(Path(__file__).with_name("fuzz.yaml").read_text(encoding="utf-8"))
STATES = set(_DATA["states"].split())

_NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0, 0.5),
    *_DATA["nasty"].split(),
    *("", "a" * 5000, "\x00", "ä\u202e\U0001d518", "'; DROP TABLE trials; --", "2026-01-01T00:00:00Z"),
    *([], {}, [[]], [None], {"": ""}, {"a": {"b": [1, {"c": None}]}}, ["1", 2, 3.5], {"__proto__": 1}),
]

_TRIAL_METRICS = {
    "trialId": 1,
    "trialRunId": 1,
    "stepsCompleted": 5,
    "reportTime": "2026-01-01T00:00:00.000Z",
    "metrics": {"avgMetrics": {"loss": 0.5, "nan": "NaN"}, "batchMetrics": []},
}
_CONFIG_TEXT = """\
name: fuzz
entrypoint: 'true'
searcher: {name: single, metric: loss, max_length: {batches: 9}}
resources: {slots_per_trial: 0}
hyperparameters: {lr: 0.1}
"""
_CHECKPOINT = {
    "uuid": "00000000-0000-4000-8000-00000000000a",
    "taskId": "1.request",
    "allocationId": "1.request.1",
    "reportTime": "2026-01-01T00:00:00Z",
    "resources": {"a": "1"},
    "metadata": {"steps_completed": 5, "framework": "torch"},
    "state": "STATE_COMPLETED",
    "training": {},
}
_BODIES: dict[str, Any] = {
    **_DATA["bodies"],
    "experiments": {"config": _CONFIG_TEXT, "modelDefinition": [], "activate": False, "validateOnly": False},
    "trials/{trial_id}/metrics": {"trialId": 1, "group": "training", "metrics": _TRIAL_METRICS},
    "checkpoints": _CHECKPOINT,
    "checkpoints/rm": {"checkpointUuids": [_CHECKPOINT["uuid"]], "checkpointGlobs": ["*.none"]},
    "checkpoints/{checkpoint_uuid}/metadata": {"checkpoint": {**_CHECKPOINT, "metadata": {"a": 2}}},
}
_BROKEN_BODIES = [
    *(None, b"", b"{", b"[]", b"null", b"NaN", b"\xff\xfe\x00", b'{"a": NaN, "progress": Infinity}'),
    *(b'{"trialId": 1e999}', b'{"a": "\\ud800"}', b'{"config": ' + b"[" * 400 + b"]" * 400 + b"}"),
    b'{"metrics": ' + b'{"metrics":' * 200 + b"1" + b"}" * 200 + b"}",
]
_QUERY_NAMES = _DATA["query_names"].split()
_QUERY_VALUES = [*_DATA["query_values"].split(), "", "a" * 300]


@dataclasses.dataclass
class Report:
    """Counts of answers by status, and the failures."""

    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)


class Fuzzer:
    """Sends mutated requests to one master.

    Args:
        master: the master that gets the requests.
        seed: two runs with the same seed send the same requests.
    """

    def __init__(self, master: Master, seed: int) -> None:
        self._master = master
        self._random = random.Random(seed)
        # The event stream of the page does not end.
        self._routes = [route for route in all_routes() if route.path != "/page/events"]
        self._tokens: dict[str, str] = {}
        self._connection: http.client.HTTPConnection | None = None
        self.report = Report()

    def run(self, num_requests: int) -> Report:
        """Send ``num_requests`` requests, check the database, and return the report."""
        for request_idx in range(num_requests):
            if request_idx % _REVIVE_EVERY == 0:
                self._tokens = self._master.services.database.write(_revive)
            self._send_one(self._random.choice(self._routes))
        if self._connection is not None:
            self._connection.close()
        self.report.failures += database_problems(self._master)
        return self.report

    def _send_one(self, route: Route) -> None:
        path = re.sub(r"\{(\w+)(:int)?\}", lambda match: self._parameter(match[1]), route.path)
        path += self._query(route)
        self._exchange(route, path, None if route.method == "GET" else self._body(route))

    def _exchange(self, route: Route, path: str, body: bytes | None) -> None:
        who = self._random.choices(["admin", "trial-1", "other", None, "garbage"], [12, 6, 3, 1, 1])[0]
        headers = {"Host": "localhost"}
        if who is not None:
            name = "Grpc-Metadata-x-allocation-token" if who == "trial-1" else "Authorization"
            headers[name] = f"Bearer {self._tokens.get(who, who)}"
        try:
            status, content = self._send(route.method, path, body, headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection = None
            self.report.failures.append(f"{route.method} {path[:200]}: {error!r} body {body!r:.300}")
            return
        self.report.statuses[status] += 1
        is_error = status >= 300
        is_bad = status >= 500 and status != 501
        is_bad |= is_error and any(trace in content for trace in _TRACES)
        is_bad |= is_error and not content.startswith((b'{"error":{', b"<!"))
        if is_bad:
            asked = f"{route.method} {path[:200]} as {who}, body {body!r:.600}"
            self.report.failures.append(f"{asked}: {status} {content[:300]!r}")

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._master.port, timeout=_TIMEOUT_S)
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def _parameter(self, name: str) -> str:
        known = {
            "allocation_id": ["1.request.1", "2.request.1"],
            "task_id": ["1.request", "2.request"],
            "agent_id": [self._master.services.agent_id],
            "checkpoint_uuid": [*self._master.checkpoints.values(), _CHECKPOINT["uuid"]],
            "username": ["admin", "fuzz", "other"],
            "slot_id": ["0", "3"],
            "label": ["a", "b/c"],
            "model": ["m", "1"],
            "template": ["t", "a b"],
        }.get(name, ["1", "2"])
        if self._random.random() < 0.75:
            return quote(self._random.choice(known), safe="")
        odd = [*_DATA["odd_parameters"].split(), "9" * 30, "a" * 2000]
        return quote(self._random.choice(odd), safe="%")

    def _query(self, route: Route) -> str:
        pairs = [
            f"{self._random.choice(_QUERY_NAMES)}={self._random.choice(_QUERY_VALUES)}"
            for _ in range(self._random.choice([0, 0, 1, 2, 5]))
        ]
        if "preemption" in route.path:
            pairs = [pair for pair in pairs if "timeout" not in pair]
            pairs.append("timeoutSeconds=" + self._random.choice(["0", "-1", "x", "NaN"]))
        return "?" + "&".join(pairs) if pairs else ""

    def _body(self, route: Route) -> bytes | None:
        template = self._body_of(
            re.sub(r":int\b", "", route.path).removeprefix("/api/v1/"), {"id": 1, "drain": True}
        )
        kind = self._random.random()
        if kind < 0.2:
            value = template
        elif kind < 0.85:
            value = template
            for _ in range(self._random.randint(1, 3)):
                value = self._mutated(value)
        else:
            cut = json.dumps(template).encode()[: self._random.randint(0, 80)]
            noise = bytes(self._random.randrange(256) for _ in range(50))
            return self._random.choice([*_BROKEN_BODIES, cut, noise])
        return json.dumps(value).encode()

    def _body_of(self, path: str, other: Any) -> Any:
        """Return the template body for a path, with a checkpoint UUID of the master."""
        found = _BODIES.get(path, other)
        if isinstance(found, dict) and found.get("checkpointUuid") == "OWN":
            return {**found, "checkpointUuid": self._random.choice(list(self._master.checkpoints.values()))}
        return found

    def _mutated(self, value: Any) -> Any:
        """Return a copy with one value replaced, removed or added, or a key renamed."""
        nasty = self._random.choice(_NASTY)
        if isinstance(value, dict) and value and self._random.random() < 0.9:
            key = self._random.choice(sorted(value))
            change = self._random.random()
            if change < 0.1:
                return {name: one for name, one in value.items() if name != key}
            if change < 0.15:
                return {**value, self._random.choice(["id", "state", "steps_completed", "ä", ""]): nasty}
            if change < 0.2:
                snake = re.sub(r"([A-Z])", lambda match: "_" + match[1].lower(), key)
                return {(snake if name == key else name): one for name, one in value.items()}
            return {**value, key: self._mutated(value[key])}
        if isinstance(value, list) and value and self._random.random() < 0.8:
            return [self._mutated(value[0]), *value[1:], *([nasty] if self._random.random() < 0.3 else [])]
        return nasty


def _revive(tx: Transaction) -> dict[str, str]:
    """Restore users, tokens and the allocation that earlier requests may have ended."""
    tx.execute("UPDATE users SET active = 1")
    tx.execute("UPDATE users SET admin = 1 WHERE id = 1")
    if users.find_by_name(tx.connection, "fuzz") is None:
        users.create_user(tx, username="fuzz", admin=False, password="")
    tx.execute("UPDATE allocations SET state = 'RUNNING', end_us = NULL WHERE id = '1.request.1'")
    tx.execute("DELETE FROM tokens")
    fuzz = users.find_by_name(tx.connection, "fuzz")
    assert fuzz is not None
    own = {"allocation": "token-of-trial-1", "user": "token-of-the-user-in-trial-1"}
    hashes = {kind: tokens.hash_token(token) for kind, token in own.items()}
    tokens.keep_allocation_tokens(tx, "1.request.1", 2, hashes)
    return {
        "admin": tokens.create_token(tx, 1),
        "other": tokens.create_token(tx, fuzz.id),
        "trial-1": "token-of-trial-1",
    }


def database_problems(master: Master) -> list[str]:
    """Return the problems that SQLite's checks and queries for invalid rows find."""
    problems = []
    if master.rows("PRAGMA integrity_check") != [{"integrity_check": "ok"}]:
        problems.append("SQLite's check fails")
    for sql in (
        "PRAGMA foreign_key_check",
        "SELECT id FROM trials WHERE experiment_id NOT IN (SELECT id FROM experiments)",
        "SELECT id FROM metrics WHERE trial_id NOT IN (SELECT id FROM trials)",
        "SELECT uuid FROM checkpoints WHERE trial_id NOT IN (SELECT id FROM trials)",
        "SELECT id FROM experiments WHERE NOT json_valid(config) OR NOT json_valid(labels)",
        "SELECT id FROM trials WHERE NOT json_valid(hparams)",
        "SELECT name FROM metric_summaries WHERE NOT json_valid(summary)",
        "SELECT id FROM metrics WHERE NOT json_valid(metrics)",
        "SELECT uuid FROM checkpoints WHERE NOT json_valid(resources) OR NOT json_valid(metadata)",
        "SELECT id FROM experiments WHERE priority NOT BETWEEN 1 AND 99 OR progress NOT BETWEEN 0 AND 1",
        "SELECT id FROM trials WHERE progress NOT BETWEEN 0 AND 1",
    ):
        problems += [f"{sql}: {row}" for row in master.rows(sql)[:5]]
    for table in ("experiments", "trials"):
        odd = {row["state"] for row in master.rows(f"SELECT state FROM {table}")} - STATES
        if odd:
            problems.append(f"{table} are {odd}")
    if not master.rows("SELECT 1 FROM users WHERE admin AND active"):
        problems.append("no administrator is left")
    return problems


def hostile_requests(master: Master) -> dict[str, int]:
    """Send hostile paths, bodies and files; return the status of each answer."""
    found = {}

    def send(what: str, method: str, path: str, body: Any = None) -> None:
        found[what] = master.send(method, path, body, token="determined").status

    for path in (
        "/../../../../etc/passwd",
        "/api/v1/../../etc/passwd",
        "/api/v1/tasks/..%2f..%2fetc%2fpasswd",
        "/api/v1/users/1%00/by-username",
        "/api/v1/users/' OR 1=1 --/by-username".replace(" ", "%20"),
        "/api/v1/experiments/1;DROP%20TABLE%20trials",
        "/api/v1/experiments/" + "9" * 400,
        "/checkpoints/..%2f..%2fmaster.db",
        "/credentials.json",
        "//evil.example/api/v1/me",
        "/api/v1/" + "a/" * 2000,
    ):
        send(path[:60], "GET", path)
    send("no JSON", "POST", "/api/v1/auth/login", b"\xff\xfe")
    send("NaN", "POST", "/api/v1/auth/login", b'{"username": NaN}')
    send("5,000 levels deep", "POST", "/api/v1/auth/login", b"[" * 5000 + b"]" * 5000)
    return {**found, "a terabyte": _oversized(master), **_model_definitions(master)}


def _oversized(master: Master) -> int:
    """Announce a body of a terabyte and send none of it."""
    with socket.create_connection(("127.0.0.1", master.port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(
            b"POST /api/v1/auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
        )
        return int(b"".join(iter(lambda: connection.recv(65536), b"")).split()[1])


def _model_definitions(master: Master) -> dict[str, int]:
    """Submit invalid or escaping model definitions; return the statuses."""
    content = base64.b64encode(b"owned").decode()
    regular = {"type": 48, "content": content, "mtime": "0", "mode": 0o644, "uid": 0, "gid": 0}
    files = {
        "an absolute path": [{**regular, "path": "/tmp/dstrial-owned"}],
        "a path upwards": [{**regular, "path": "../owned"}],
        "a path upwards in the middle": [{**regular, "path": "a/../../owned"}],
        "a symbolic link": [
            {**regular, "path": "link", "type": 50, "content": base64.b64encode(b"/etc").decode()}
        ],
        "a hard link": [{**regular, "path": "link", "type": 49}],
        "a device": [{**regular, "path": "device", "type": 51}],
        "a named pipe": [{**regular, "path": "pipe", "type": 54}],
        "a NUL in its path": [{**regular, "path": "a\x00b"}],
        "an empty path": [{**regular, "path": ""}],
        "content that is no base64": [{**regular, "path": "a", "content": "%%%"}],
        "a file where a directory is": [{**regular, "path": "a"}, {**regular, "path": "a/b"}],
        "no list": {"path": "a"},
    }
    found = {}
    for what, definition in files.items():
        body = {"config": _CONFIG_TEXT, "modelDefinition": definition, "activate": False}
        found[what] = master.send("POST", "/api/v1/experiments", body, token="determined").status
    return found
