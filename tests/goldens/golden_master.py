"""Record a master's database schema, HTTP responses and stored digests."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from normalization import normalized
from record import ROOT


def schema(scratch: Path) -> dict[str, str]:
    """Record the SQL dump and schema version of a new database."""
    from dstrial.master.store.database import Database

    path = scratch / "dstrial.db"
    Database(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        dump = "\n".join(connection.iterdump())
    return {"schema.sql": f"-- schema version {version}\n{dump}\n"}


_TIME = "2026-01-02T00:00:00Z"
_DETACHED = """
name: outside
reproducibility: {experiment_seed: 1}
searcher: {name: custom, metric: loss, smaller_is_better: true}
checkpoint_storage: {type: shared_fs, host_path: /nonexistent}
"""
_QUERIES = {
    "/api/v1/trials/{trial_id:int}/logs": "?limit=10",
    "/api/v1/tasks/{task_id}/logs": "?limit=10",
    "/api/v1/trials/metrics/trial_metrics": "?trialIds=1&group=custom",
    "/api/v1/trials/metrics/training_metrics": "?trialIds=1",
    "/api/v1/trials/metrics/validation_metrics": "?trialIds=1",
    "/api/v1/experiments/metrics-stream/metric-names": "?ids=1&periodSeconds=1",
    "/api/v1/tokens": "?showInactive=true",
    "/experiments/{experiment_id:int}/preview_gc": "?saveExperimentBest=0&saveTrialBest=1&saveTrialLatest=1",
    "/api/v1/trials/{trial_id:int}/workloads": "?includeBatchMetrics=true",
    "/api/v1/resources/allocation/raw": "?timestampAfter=1970-01-01T00:00:00Z&timestampBefore=1970-01-02T00:00:00Z",
    "/resources/allocation/raw": "?timestampAfter=1970-01-01T00:00:00Z&timestampBefore=1970-01-02T00:00:00Z",
    "/resources/allocation/allocations-csv": "?timestampAfter=1970-01-01T00:00:00Z&timestampBefore=1970-01-02T00:00:00Z",
    "/api/v1/resources/allocation/aggregated": "?startDate=1970-01-01&endDate=1970-01-02"
    "&period=RESOURCE_ALLOCATION_AGGREGATION_PERIOD_DAILY",
    "/resources/allocation/aggregated": "?startDate=1970-01-01&endDate=1970-01-02"
    "&period=RESOURCE_ALLOCATION_AGGREGATION_PERIOD_DAILY",
}
"""Route -> query string of its request."""
_PAGES = re.compile(r"/$|/page/|/det($|/)")
"""Routes of the web UI, which are not recorded; ``tests/master/web`` tests them."""


def answers(scratch: Path) -> dict[str, str]:
    """Record the response of every GET route of a master with sample data."""
    from dstrial.master.server import all_routes

    sys.path.append(str(ROOT / "tests" / "master"))
    from serving import serving

    with serving(scratch / "state") as master:
        values = _seed(master)
        sections = []
        for route in sorted(all_routes(), key=lambda one: one.path):
            if route.method == "GET" and not _PAGES.match(route.path):
                for path in _filled(route.path, values):
                    # The stream of metric names ends when the experiment has ended.
                    state = "COMPLETED" if "metrics-stream" in path else "ACTIVE"
                    master.change("UPDATE experiments SET state = ? WHERE id = 1", state)
                    answer = master.get(path + _QUERIES.get(route.path, ""), "admin")
                    sections.append(_section(route, path + _QUERIES.get(route.path, ""), answer))
        containers = master.rows("SELECT resources_id AS id FROM allocations")
        literals = {
            str(scratch): "scratch",
            f":{master.port}": ":port",
            f'"port": {master.port}': '"port": port',
            **{f" {row['id'][:8]} [rank": " container [rank" for row in containers},
            f'"{master.services.agent_id}"': '"host"',
            f"/agents/{master.services.agent_id}": "/agents/host",
            **{value: f"token of {name}" for name, value in master.tokens.items()},
        }
    return {"answers.txt": normalized("\n".join(sections), literals, ["wallClockTime", "duration"])}


def _seed(master: Any) -> dict[str, Sequence[Any]]:
    """Create one object of each kind; return path parameter -> values to request."""
    from dstrial.master.clock import parse_time
    from dstrial.master.store.reports import logs

    checkpoint, allocation, task = master.checkpoints[1], "1.request.1", "1.request"

    def send(method: str, path: str, body: Any, token: str = "admin") -> dict[str, Any]:
        answer = master.send(method, f"/api/v1/{path}", body, token=token)
        assert answer.status == 200, (path, answer.content)
        found: dict[str, Any] = answer.json
        return found

    user = {"username": "ada", "displayName": "Ada", "admin": False, "active": True}
    send("POST", "users", {"user": user, "password": "Golden-password-1"})
    workspace = send("POST", "workspaces", {"name": "golden"})["workspace"]["id"]
    project = {"name": "paints", "description": "of walls", "workspaceId": workspace, "key": "PNT"}
    project_id = send("POST", f"workspaces/{workspace}/projects", project)["project"]["id"]
    notes = [{"name": "a note", "contents": "# of a project"}]
    send("PUT", f"projects/{project_id}/notes", {"notes": notes})
    template = {"name": "base", "config": {"labels": ["x"], "max_restarts": 2}, "workspaceId": 0}
    send("POST", "templates/base", template)
    token = send("POST", "tokens", {"userId": 2, "lifespan": "72h", "description": "of a script"})
    master.tokens["script"] = token["token"]
    webhook = {
        "name": "hook",
        "url": "http://localhost:1/hook",
        "webhookType": "WEBHOOK_TYPE_DEFAULT",
        "mode": "WEBHOOK_MODE_SPECIFIC",
        "triggers": [
            {
                "triggerType": "TRIGGER_TYPE_EXPERIMENT_STATE_CHANGE",
                "condition": {"state": "COMPLETED"},
            }
        ],
    }
    send("POST", "webhooks", webhook)
    for group, steps, values in (
        ("training", 1, {"loss": 0.5}),
        ("validation", 2, {"loss": 0.25, "accuracy": 1}),
        ("custom", 2, {"speed": 3.5, "name": "x"}),
    ):
        metrics = {"avgMetrics": values, "batchMetrics": [values]}
        report = {
            "metrics": metrics,
            "stepsCompleted": steps,
            "trialId": 1,
            "trialRunId": 1,
            "reportTime": _TIME,
        }
        send("POST", "trials/1/metrics", {"group": group, "metrics": report}, "trial-1")
    for group, values in (
        ("gpu", {"GPU-1": {"gpu_util": 50.0, "gpu_free_memory": 1024.0}}),
        ("cpu", {"cpu_util_simple": 12.5}),
    ):
        metrics = {"avgMetrics": {"node": values}}
        report = {"metrics": metrics, "trialId": 1, "trialRunId": 1, "reportTime": _TIME}
        send("POST", "trials/1/metrics", {"group": group, "metrics": report}, "trial-1")
    written = {
        "uuid": checkpoint,
        "taskId": task,
        "allocationId": allocation,
        "resources": {"model.pt": 10, "code/": 0},
        "metadata": {"steps_completed": 2, "framework": "x"},
        "state": "STATE_COMPLETED",
        "reportTime": _TIME,
    }
    send("POST", "checkpoints", written, "trial-1")
    line = logs.LogLine(parse_time(_TIME), "stdout", "INFO", 0, "a line\n")
    master.services.database.write(lambda tx: logs.add_task_logs(tx, task, 1, allocation, [line]))
    model = {
        "name": "net",
        "description": "of the wall",
        "labels": ["a"],
        "metadata": {"by": "me"},
        "notes": "n",
    }
    send("POST", "models", model)
    version = {"checkpointUuid": checkpoint, "name": "first", "comment": "c", "labels": ["v"], "notes": "v"}
    send("POST", "models/net/versions", version)
    send("POST", "runs/1/metadata", {"runId": 1, "metadata": {"a": {"b": 1}}})
    for method, label in (("PUT", "kept"), ("PUT", "removed"), ("DELETE", "removed")):
        send(method, f"experiments/1/labels/{label}", None)
    body = {"config": _DETACHED, "unmanaged": True}
    outside = send("PUT", "experiments/by-external-id/theirs", body)["experiment"]["id"]
    request = {"experimentId": outside, "hparams": {"lr": 0.5}, "unmanaged": True}
    send("PUT", "trials", {"createTrialRequest": request, "externalTrialId": "one"})
    command = {"description": "golden command", "entrypoint": ["true"], "resources": {"slots": 1}}
    command_id = send("POST", "commands", {"config": command}, "determined")["command"]["id"]
    board = {"config": {"description": "golden board"}, "experimentIds": [1]}
    board_id = send("POST", "tensorboards", board, "determined")["tensorboard"]["id"]
    text = "entrypoint: [python3, t.py]\ndescription: golden task\n"
    generic = {"config": text, "contextDirectory": [file_to_send("t.py", "x = 1\n")]}
    generic_id = send("POST", "generic-tasks", generic, "determined")["taskId"]
    return {
        "agent_id": [master.services.agent_id],
        "allocation_id": [allocation],
        "checkpoint_uuid": [checkpoint],
        "task_id": [task, command_id, board_id, generic_id],
        "experiment_id": [1, outside],
        "trial_id": [1],
        "run_id": [1],
        "model": ["net"],
        "version": [1],
        "workspace_id": [1, workspace],
        "project_id": [1, project_id],
        "pool": ["default"],
        "template": ["base"],
        "user_id": [2],
        "username": ["ada"],
    }


def file_to_send(path: str, text: str) -> dict[str, Any]:
    """Return a file in the JSON form in which clients upload model definitions."""
    content = base64.b64encode(text.encode()).decode()
    return {"path": path, "type": 48, "content": content, "mtime": "0", "mode": 420}


def _filled(path: str, values: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield a route's paths, with parameters replaced by the values of ``_seed``."""
    before, brace, rest = path.partition("{")
    if not brace:
        yield path
        return
    name, _, behind = rest.partition("}")
    for value in values[name.partition(":")[0]]:
        yield from _filled(f"{before}{value}{behind}", values)


def _section(route: Any, path: str, answer: Any) -> str:
    """Return a response as text: status, content type and body, with JSON indented."""
    kind = answer.headers.get("content-type", "")
    text = answer.content.decode(errors="replace")
    if kind.startswith("application/json"):
        lines = [json.loads(line) for line in text.splitlines()]
        text = "\n".join(json.dumps(line, indent=1, ensure_ascii=False) for line in lines)
    for nonce in re.findall(r'nonce="([^"]+)"', text):
        text = text.replace(nonce, "<nonce>")
    return f"GET {path} ({route.access.name})\n{answer.status} {kind}\n{text.rstrip()}\n"


def fingerprints(scratch: Path) -> dict[str, str]:
    """Record digests that are stored or must stay equal between releases."""
    from determined.common.api.bindings import v1File

    from dstrial.checkpoint.checksum import signed, with_checksum
    from dstrial.cli.submit import fingerprint as of_submission
    from dstrial.master.backends.failures import fingerprint as of_failure
    from dstrial.master.store.users import client_hash
    from dstrial.master.webhooks.delivery import signature

    traceback = 'Traceback\n  File "/tmp/x/train.py", line 3, in main\nValueError: 3 at 0x7f12'
    file = v1File(content="eA==", gid=0, mode=420, mtime="0", path="train.py", type=48, uid=0)
    key = scratch / "dstrial" / "checkpoint.key"
    key.parent.mkdir()
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    with mock.patch.dict(os.environ, {"XDG_DATA_HOME": str(scratch)}):
        manifest = signed({"format": 1, "files": {"a": {"bytes": 3}}})
    found = {
        "manifest": manifest,
        "failure": of_failure(traceback),
        "submission": of_submission({"name": "golden", "hyperparameters": {"lr": 0.5}}, [file]),
        "webhook": signature("key", 1_700_000_000, b'{"event": 1}'),
        "sealed": with_checksum({"b": [1, 2.5], "a": None}),
        "password": client_hash("Golden-password-1"),
    }
    return {"fingerprints.json": json.dumps(found, indent=1) + "\n"}
