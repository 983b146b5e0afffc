"""Output, log and status show why a start waits: busy slots or a compilation."""

from __future__ import annotations

import json
import os
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
# The compiler blocks on a named pipe until the test closes it; DeepSpeed builds operators with the same ``load``.
SOURCE = '#include "{held}"\n'
COMPILE_SCRIPT = """
import sys
import torch
from torch.utils.cpp_extension import load

load(name="cpu_adam", sources=[sys.argv[1]], is_python_module=False)
print("compiled", flush=True)
"""
CONFIG = """
name: {name}
entrypoint: {entrypoint}
max_restarts: 0
resources: {{slots_per_trial: {slots}}}
searcher: {{name: single, metric: loss, max_length: {{batches: 1}}}}
environment: {{environment_variables: ["TORCH_EXTENSIONS_DIR={extensions}"]}}
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
    (context / "compiles.py").write_text(COMPILE_SCRIPT)
    # Not in the context, which each trial copies: a source at a new path would be compiled again.
    (tmp_path / "slow.cpp").write_text(SOURCE.format(held=tmp_path / "held.h"))
    os.mkfifo(tmp_path / "held.h")
    return tmp_path


def write_config(project: Path, name: str, entrypoint: str, slots: int) -> str:
    text = CONFIG.format(name=name, entrypoint=entrypoint, slots=slots, extensions=project / "operators")
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
        text = (
            f"waiting for 2 slots: 1 of 2 is in use, by trial 1 of experiment {holder['id']} (holding) on 1"
        )
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


@pytest.mark.ranks
def test_compiled_operator_is_shown_in_output_and_status(project: Path, master: MasterForTest) -> None:
    config = write_config(
        project, "compiling", f"python3 -m dstrial.launch compiles.py {project / 'slow.cpp'}", 1
    )
    held = os.open(project / "held.h", os.O_RDWR)
    process = start_run(master, project, config)
    try:
        wait_for(
            lambda: (
                process.poll() is not None
                or any(one.text == "compiling operator cpu_adam" for one in observe.starting(master.state))
            ),
            "the status tells of no operator",
            deadline_s=DEADLINE_S,
        )
        assert process.poll() is None, process.communicate()[0]
        (compiling,) = starting(master)
        assert compiling["phase"] == "compiling operator cpu_adam"
        logs = ("trial", "logs", str(compiling["trial"]))
        wait_for(
            lambda: "compiling operator cpu_adam since " in master.det(*logs).stdout, "the log tells nothing"
        )
    finally:
        os.close(held)
        printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, printed
    assert "compiled" in printed
    lines = [line for line in printed.splitlines() if "compiling operator cpu_adam" in line]
    assert 1 <= len(lines) <= 5, printed
    told = next(line for line in lines if "since " in line)
    for part in (
        "by process ",
        f"the result is kept in {project / 'operators' / 'cpu_adam'} for the next start",
        '"torch_adam": true',
        "`DS_BUILD_OPS=1 pip install deepspeed`",
    ):
        assert part in told
    assert starting(master) == []
    again = master.dstrial("run", config, "context", "--no-progress", cwd=project, deadline_s=DEADLINE_S)
    assert again.returncode == 0
    assert "compiling operator" not in again.stdout + again.stderr
    assert [path.name for path in (project / "operators").iterdir()] == ["cpu_adam"]
