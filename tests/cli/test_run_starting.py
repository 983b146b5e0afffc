"""Output, log and status show that a start waits for slots."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
from waiting import wait_for

from dstrial.master.store.views import observe
from dstrial.testing.master import MasterForTest, master_for_test

DEADLINE_S = 300

HOLD_SCRIPT = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
CONFIG = """
name: {name}
entrypoint: {entrypoint}
max_restarts: 0
resources: {{slots_per_trial: {slots}}}
searcher: {{name: single, metric: loss, max_length: {{batches: 1}}}}
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("starting"), num_slots=2) as running:
        yield running


def start_run(master: MasterForTest, project: Path, config: str) -> subprocess.Popen[str]:
    return warm_start.Popen(
        [sys.executable, "-m", "dstrial.cli", "run", config, "context", "--no-progress"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(master.env),
        cwd=project,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    context = tmp_path / "context"
    context.mkdir()
    (context / "holds.py").write_text(HOLD_SCRIPT)
    return tmp_path


def write_config(project: Path, name: str, entrypoint: str, slots: int) -> str:
    text = CONFIG.format(name=name, entrypoint=entrypoint, slots=slots)
    (project / f"{name}.yaml").write_text(text)
    return f"{name}.yaml"


def starting(master: MasterForTest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(master.dstrial("status", "--json").stdout)["starting"]
    return found


@pytest.mark.ranks
def test_waiting_trial_names_holder_of_slots(project: Path, master: MasterForTest) -> None:
    done = project / "done"
    holding = write_config(project, "holding", f"python3 holds.py {done}", 1)
    created = master.det("e", "create", holding, "context", cwd=project)
    assert created.returncode == 0, created.stderr
    client = master.client()
    (holder,) = client.get("/api/v1/experiments?limit=-1")["experiments"]
    done_already = project / "done already"
    done_already.touch()
    waits = write_config(project, "waits", f"python3 holds.py '{done_already}'", 2)
    process = start_run(master, project, waits)
    try:
        wait_for(lambda: observe.starting(master.state), "the status tells of nobody who waits")
        (waiting,) = starting(master)
        text = f"waiting for 2 slots: 1 of 2 is in use, by trial 1 of experiment {holder['id']} on 1"
        assert waiting["phase"] == text
        shown = master.dstrial("status").stdout
        assert f"trial {waiting['trial']} of experiment {waiting['experiment']} is {text}" in shown
        logged = master.det("trial", "logs", str(waiting["trial"])).stdout
        assert logged.count(text) == 1
    finally:
        done.touch()
        printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, printed
    assert printed.count(text) == 1
    assert starting(master) == []
