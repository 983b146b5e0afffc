"""Records a master: its database's schema, what it answers, and what it starts an allocation with."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from golden_runs import installation, plain_environment
from normalization import normalized
from record import ROOT


def schema(scratch: Path) -> dict[str, str]:
    """Record the schema of a fresh database as SQLite has it, and its version."""
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
"""What a route is asked for besides."""


def answers(scratch: Path) -> dict[str, str]:
    """Record the answer to every GET route of a master that has one of everything."""
    from dstrial.master.app import all_routes

    sys.path.append(str(ROOT / "tests" / "master" / "api"))
    from serving import serving

    with serving(scratch / "state") as master:
        values = _seed(master)
        sections = []
        for route in sorted(all_routes(), key=lambda one: one.path):
            if route.method == "GET":
                for path in _filled(route.path, values):
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
    return {"answers.txt": normalized("\n".join(sections), literals, ["wallClockTime"])}


def _seed(master: Any) -> dict[str, Sequence[Any]]:
    """Make one of everything; returns the values for each parameter of a path."""
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
    send("POST", f"projects/{project_id}/notes", {"name": "a note", "contents": "# of a project"})
    send("POST", f"workspaces/{workspace}/pin", {})
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
    line = {"taskId": task, "allocationId": allocation, "timestamp": _TIME, "stdtype": "stdout", "rankId": 0}
    send("POST", "task/logs", {"logs": [{**line, "log": "a line", "level": "LOG_LEVEL_INFO"}]}, "trial-1")
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
    body = {"config": _DETACHED, "unmanaged": True}
    outside = send("PUT", "experiments/by-external-id/theirs", body)["experiment"]["id"]
    request = {"experimentId": outside, "hparams": {"lr": 0.5}, "unmanaged": True}
    send("PUT", "trials", {"createTrialRequest": request, "externalTrialId": "one"})
    command = {"description": "golden command", "entrypoint": ["true"], "resources": {"slots": 1}}
    command_id = send("POST", "commands", {"config": command}, "determined")["command"]["id"]
    board = {"config": {"description": "golden board"}, "experimentIds": [1]}
    board_id = send("POST", "tensorboards", board, "determined")["tensorboard"]["id"]
    text = "entrypoint: [python3, t.py]\ndescription: golden task\n"
    file = {
        "path": "t.py",
        "type": 48,
        "content": base64.b64encode(b"x = 1\n").decode(),
        "mtime": "0",
        "mode": 420,
    }
    generic = {"config": text, "contextDirectory": [file]}
    generic_id = send("POST", "generic-tasks", generic, "determined")["taskId"]
    return {
        "agent_id": [master.services.agent_id],
        "slot_id": ["0"],
        "allocation_id": [allocation],
        "resources_id": ["x"],
        "checkpoint_uuid": [checkpoint],
        "task_id": [task, command_id, board_id, generic_id],
        "external_id": ["theirs"],
        "external_trial_id": ["one"],
        "experiment_id": [1, outside],
        "trial_id": [1],
        "run_id": [1],
        "model": ["net"],
        "version": [1],
        "workspace_id": [1, workspace],
        "project_id": [1, project_id],
        "key": ["PNT"],
        "template": ["base"],
        "user_id": [2],
        "username": ["ada"],
    }


def _filled(path: str, values: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Fill in a path's parameters; a route that asks for another parameter needs a value in ``_seed``."""
    before, brace, rest = path.partition("{")
    if not brace:
        yield path
        return
    name, _, behind = rest.partition("}")
    for value in values[name.partition(":")[0]]:
        yield from _filled(f"{before}{value}{behind}", values)


def _section(route: Any, path: str, answer: Any) -> str:
    """What a client gets: status, type and body; JSON, or each line of a stream, is spread out in its order."""
    kind = answer.headers.get("content-type", "")
    text = answer.content.decode(errors="replace")
    if kind.startswith("application/json"):
        lines = [json.loads(line) for line in text.splitlines()]
        text = "\n".join(json.dumps(line, indent=1, ensure_ascii=False) for line in lines)
    for nonce in re.findall(r'nonce="([^"]+)"', text):
        text = text.replace(nonce, "<nonce>")
    return f"GET {path} ({route.access.name})\n{answer.status} {kind}\n{text.rstrip()}\n"


_DUMP = """
import json, os, pathlib, sys

kind, directory = sys.argv[1], pathlib.Path(os.environ["DSTRIAL_ALLOCATION_DIR"])
found = {"environment": dict(os.environ), "files": {}}
if kind == "allocation":
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            found["files"][str(path.relative_to(directory))] = [oct(path.stat().st_mode), path.read_text()]
output = pathlib.Path(os.environ["GOLDEN_OUTPUT"], kind + os.environ.get("RANK", "") + ".json")
output.write_text(json.dumps(found))
"""


def allocation(scratch: Path) -> dict[str, str]:
    """Record what a real master starts a trial with: its environment and its files; and what its ranks then see."""
    sys.path.append(str(ROOT / "tests" / "master"))
    from submitting import log_of, submit, wait_until

    from dstrial.testing.master import master_for_test

    output = scratch / "output"
    output.mkdir()
    steps = "python3 dump.py allocation && python3 -m dstrial.launch dump.py rank"
    config = {
        "name": "golden",
        "entrypoint": ["bash", "-c", steps],
        "environment": {"environment_variables": [f"GOLDEN_OUTPUT={output}"]},
        "hyperparameters": {"lr": 0.5},
        "max_restarts": 0,
        "reproducibility": {"experiment_seed": 1},
        "resources": {"slots_per_trial": 2},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
    }
    with _plainly(), master_for_test(scratch) as master:
        number = submit(master, config, script="", modelDefinition=[_file("dump.py", _DUMP)])
        wait_until(master, number, "COMPLETED", deadline_s=120.0)
        log = log_of(master, number)
        record = json.loads(master.state.record_path.read_text())
        given = dict(master.env)
        state_files = sorted(str(path.relative_to(master.state.path)) for path in master.state.path.glob("*"))
    found = {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}
    literals = {**_names(found, record, scratch), f':{given["PATH"]}"': "PATH of the master"}
    files = {
        "environment.json": {
            kind: _changed(
                given if kind == "allocation" else found["allocation"]["environment"], one["environment"]
            )
            for kind, one in sorted(found.items())
        },
        "files.json": {
            name: [mode, _content(name, text)] for name, (mode, text) in found["allocation"]["files"].items()
        },
        "master.json": record,
        "state_directory.json": state_files,
        "exit.json": _supervised(scratch / "supervised"),
    }
    texts = {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()}
    return {name: normalized(text, literals, ["time_us"]) for name, text in {**texts, "log.txt": log}.items()}


def _file(path: str, text: str) -> dict[str, Any]:
    content = base64.b64encode(text.encode()).decode()
    return {"path": path, "type": 48, "content": content, "mtime": "0", "mode": 420}


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Start programs with the same variables and umask wherever this runs."""
    before = os.umask(0o022)
    try:
        with mock.patch.dict(os.environ, plain_environment(), clear=True):
            yield
    finally:
        os.umask(before)


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What an environment has that the one it comes from has not; None for what it lacks."""
    more = {name: value for name, value in sorted(after.items()) if before.get(name) != value and name != "_"}
    return {**more, **dict.fromkeys(sorted(set(before) - set(after)))}


def _content(name: str, text: str) -> Any:
    if name.startswith("workdir"):
        return None
    content = json.loads(text) if name.endswith(".json") else text
    if name == "spec.json":
        content["environment"] = "as in environment.json"
    return content


def _names(found: Mapping[str, Any], record: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """Return what differs between two masters, with its name."""
    seen, rank = found["allocation"]["environment"], found["rank0"]["environment"]
    supervisor = json.loads(found["allocation"]["files"]["supervisor.json"][1])
    ports = {name: value for name, value in seen.items() if "_PORT" in name and value.isdecimal()}
    return {
        str(scratch): "scratch",
        **installation(),
        f":{record['port']}": ":port",
        **{f'"{value}"': f"port {name}" for name, value in ports.items()},
        f'"{rank["MASTER_PORT"]}"': "port of the launcher",
        f'"port\\": {rank["MASTER_PORT"]},': "port of the launcher",
        f'"port": {record["port"]}': "port",
        f'"pid": {record["pid"]}': "pid",
        f'"start_time": "{record["start_time"]}"': "start time",
        f'"pid": {supervisor["pid"]}': "pid of the supervisor",
        f'"start_time": "{supervisor["start_time"]}"': "start time of the supervisor",
        seen["DET_SESSION_TOKEN"]: "token of the allocation",
        seen["DET_USER_TOKEN"]: "token of the user",
        seen["DSTRIAL_ALLOCATION_MARKER"]: "marker",
        seen["TMPDIR"]: "temporary directory",
        seen["DET_AGENT_ID"]: "host",
        f"] {seen['DET_CONTAINER_ID'][:8]} ": "container",
        f'"{rank["DSTRIAL_LAUNCHER_PID"]}"': "pid of the launcher",
        rank["DSTRIAL_SECRET"]: "secret",
        rank["TORCHELASTIC_RUN_ID"]: "run id",
        Path(rank["DSTRIAL_PHASE_FILE"]).parent.name: "directory of the launcher",
    }


def _supervised(directory: Path) -> dict[str, Any]:
    """Return what a supervisor leaves of a command, and the names of its files."""
    (supervisor,) = ROOT.glob("dstrial/master/**/supervisor.py")
    directory.mkdir()
    command = ["bash", "-c", "echo out; echo err >&2; exit 3"]
    spec = {
        "command": command,
        "working_directory": str(directory),
        "environment": {"PATH": os.defpath},
        "umask": 18,
    }
    (directory / "spec.json").write_text(json.dumps(spec))
    subprocess.run([sys.executable, "-I", "-S", str(supervisor), str(directory)], check=True, timeout=60)
    lines = (directory / "output.log").read_text().splitlines()
    return {
        "files": sorted(path.name for path in directory.iterdir()),
        "exit.json": json.loads((directory / "exit.json").read_text()),
        "output.log": sorted(f"<time> {line.partition(' ')[2]}" for line in lines),
    }


def fingerprints(_scratch: Path) -> dict[str, str]:
    """Record digests that are stored, or compared with those of another release."""
    from determined.common.api.bindings import v1File

    from dstrial.checkpoint.seal import sealed
    from dstrial.cli.run_submission import fingerprint as of_submission
    from dstrial.master.launcher.failures import fingerprint as of_failure
    from dstrial.master.store.users import client_hash
    from dstrial.master.webhooks.signing import signature

    traceback = 'Traceback\n  File "/tmp/x/train.py", line 3, in main\nValueError: 3 at 0x7f12'
    file = v1File(content="eA==", gid=0, mode=420, mtime="0", path="train.py", type=48, uid=0)
    found = {
        "failure": of_failure(traceback),
        "submission": of_submission({"name": "golden", "hyperparameters": {"lr": 0.5}}, [file]),
        "webhook": signature("key", 1_700_000_000, b'{"event": 1}'),
        "sealed": sealed({"b": [1, 2.5], "a": None}),
        "password": client_hash("Golden-password-1"),
    }
    return {"fingerprints.json": json.dumps(found, indent=1) + "\n"}
