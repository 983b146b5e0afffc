"""Record environments and files of an allocation that a real master starts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from golden_master import file_to_send
from golden_runs import installation, plain_environment
from normalization import normalized
from record import ROOT

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
    """Record environment and files of a trial's allocation, and rank environments."""
    sys.path += [str(ROOT / "tests" / "master"), str(ROOT / "tests")]
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
        number = submit(master, config, script="", modelDefinition=[file_to_send("dump.py", _DUMP)])
        wait_until(master, number, "COMPLETED", deadline_s=120.0)
        log = log_of(master, number)
        record = json.loads(master.state.record_path.read_text())
        given = dict(master.env)
        state_files = sorted(str(path.relative_to(master.state.path)) for path in master.state.path.glob("*"))
    found = {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}
    literals = {
        **_names(found, record, scratch),
        f':{given["PATH"]}"': "PATH of the master",
        record["slots"][0]["brand"]: "processor",
    }
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


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Run the block with a minimal environment and umask 022."""
    before = os.umask(0o022)
    try:
        with mock.patch.dict(os.environ, plain_environment(), clear=True):
            yield
    finally:
        os.umask(before)


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that ``after`` adds or changes; None for removed variables."""
    more = {name: value for name, value in sorted(after.items()) if before.get(name) != value and name != "_"}
    return {**more, **dict.fromkeys(sorted(set(before) - set(after)))}


def _content(name: str, text: str) -> Any:
    if name.startswith(("workdir", "model/")):
        return None
    content = json.loads(text) if name.endswith(".json") else text
    if name == "spec.json":
        content["environment"] = "as in environment.json"
    return content


def _names(found: Mapping[str, Any], record: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """Return placeholders for values that differ between two masters: value -> name."""
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
    """Run a command under a supervisor; return its exit record, output and file names."""
    (supervisor,) = ROOT.glob("dstrial/master/**/supervisor.py")
    directory.mkdir()
    command = ["bash", "-c", "echo out; echo err >&2; exit 3"]
    spec = {
        "command": command,
        "working_directory": str(directory),
        "temporary_directory": str(directory),
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
