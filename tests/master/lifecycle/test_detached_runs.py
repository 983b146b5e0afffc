"""Detached ``core_v2`` scripts with a real master that is killed meanwhile."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
from submitting import experiment, log_of, reports_of, trials, wait_until
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

SCRIPT = """
import pathlib, sys, time
from determined.experimental import core_v2

name, gate, end = sys.argv[1:4]
core_v2.init(
    config=core_v2.Config(
        name=name,
        hparams={"lr": 0.1},
        labels=["by hand"],
        checkpoint_storage=str(pathlib.Path(gate).parent / "checkpoints"),
        searcher={"name": "custom", "metric": "score", "smaller_is_better": False},
        external_experiment_id=f"{name} é",
        external_trial_id="trial 1",
    )
)
start = 0
if core_v2.info.latest_checkpoint is not None:
    with core_v2.checkpoint.restore_path(core_v2.info.latest_checkpoint) as path:
        start = int((path / "step").read_text())
print("starts at", start, core_v2.url_reverse_webui_exp_view())

def train(step):
    core_v2.train.report_training_metrics(steps_completed=step, metrics={"loss": 1 / step})
    core_v2.train.report_validation_metrics(steps_completed=step, metrics={"score": step})
    core_v2.train.report_metrics("cpu", None, {"load": 0.5})
    with core_v2.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "step").write_text(str(step))

train(start + 1)
print("ERROR: half way", file=sys.stderr)
while not pathlib.Path(gate).exists():
    time.sleep(0.05)
train(start + 2)
core_v2.train.report_progress(1.0)
if end == "error":
    raise RuntimeError("went wrong")
"""


Begin = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "master.yaml"
    path.write_text("detached_timeout_s: 300")
    return path


@pytest.fixture
def master(tmp_path: Path, settings: Path) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path, options=["--config-file", str(settings)]) as one:
        yield one


@pytest.fixture
def begin(master: MasterForTest, tmp_path: Path) -> Iterator[Begin]:
    """Return a function that starts a script; a script named ``error`` fails."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:

        def start(name: str) -> subprocess.Popen[str]:
            script = warm_start.Popen(
                [sys.executable, str(tmp_path / "script.py"), name, str(tmp_path / f"{name}.gate"), name],
                env=dict(master.env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            stack.enter_context(script)
            stack.callback(script.kill)
            return script

        yield start


def number_of(master: MasterForTest, name: str) -> int | None:
    found = master.client().get("/api/v1/experiments?limit=-1")["experiments"]
    return next((int(one["id"]) for one in found if one["name"] == name), None)


def half_way(master: MasterForTest, script: subprocess.Popen[str], name: str) -> int:
    """Wait until a script has sent logs and reports; return its experiment's id."""
    wait_for(lambda: script.poll() is not None or number_of(master, name) is not None, "the experiment")
    assert script.poll() is None, script.communicate()[0]
    number = number_of(master, name)
    assert number is not None
    wait_for(lambda: "half way" in log_of(master, number), "the log")
    wait_for(lambda: trials(master, number)[0]["totalBatchesProcessed"] > 0, "the reports")
    return number


def reports(master: MasterForTest, trial_id: int, group: str) -> list[tuple[int, int]]:
    return [(one["totalBatches"], one["trialRunId"]) for one in reports_of(master, trial_id, group)]


def test_detached_script_survives_master_kill_and_resumes(
    master: MasterForTest, begin: Begin, settings: Path, tmp_path: Path
) -> None:
    lives, dies, fails = (begin(name) for name in ("lives", "dies", "error"))
    number, lost, failed = (
        half_way(master, script, name)
        for script, name in ((lives, "lives"), (dies, "dies"), (fails, "error"))
    )
    shown = experiment(master, number)
    assert (shown["state"], shown["unmanaged"], shown["labels"]) == ("STATE_RUNNING", True, ["by hand"])
    assert master.det("job", "list").stdout.count("lives") == 0

    dies.send_signal(signal.SIGKILL)
    dies.communicate()
    master.kill()
    settings.write_text("detached_timeout_s: 5")
    master.up()
    (tmp_path / "lives.gate").touch()
    (tmp_path / "error.gate").touch()
    printed, _ = lives.communicate(timeout=60)
    assert lives.returncode == 0, printed
    printed, _ = fails.communicate(timeout=60)
    assert fails.returncode == 1, printed

    wait_until(master, number, "COMPLETED")
    (trial,) = trials(master, number)
    assert (trial["hparams"], trial["totalBatchesProcessed"]) == ({"lr": 0.1}, 2)
    assert (trial["searcherMetricValue"], trial["checkpointCount"]) == (2, 2)
    assert experiment(master, number)["progress"] == 1
    assert reports(master, trial["id"], "cpu") == [(0, 1), (0, 1)]
    log = log_of(master, number)
    assert "[rank=0] || starts at 0" in log
    assert "ERROR: half way" in log
    _assert_shown_by_det(master, number)

    assert wait_until(master, failed, "ERROR")["bestTrialSearcherMetric"] == 2
    assert "its script has reported an error" in log_of(master, failed)
    assert wait_until(master, lost, "ERROR")["bestTrialSearcherMetric"] == 1
    assert "no heartbeat of its script" in log_of(master, lost)
    _assert_lost_run_resumes(master, lost)

    again = begin("lives")
    printed, _ = again.communicate(timeout=60)
    assert (again.returncode, "starts at 2" in printed) == (0, True), printed
    assert number_of(master, "lives") == number
    (trial,) = trials(master, number)
    assert (trial["totalBatchesProcessed"], trial["state"]) == (4, "STATE_COMPLETED")
    assert reports(master, trial["id"], "training") == [(1, 1), (2, 1), (3, 2), (4, 2)]


def _assert_shown_by_det(master: MasterForTest, number: int) -> None:
    assert "COMPLETED" in master.det("e", "describe", str(number)).stdout
    followed = master.det("e", "logs", "-f", str(number))
    assert "starts at 0" in followed.stdout
    page = urllib.request.Request(f"{master.address}/det/experiments/{number}")
    page.add_header("Authorization", f"Bearer {master.client().token}")
    with urllib.request.urlopen(page, timeout=30) as answer:
        assert "/page/assets/app.js" in answer.read().decode()
    assert [one["state"] for one in master.client().get(f"/page/experiments/{number}/trials")["trials"]] == [
        "COMPLETED"
    ]
    refused = master.det("e", "pause", str(number))
    assert (refused.returncode, "has detached runs" in refused.stderr) == (1, True)


def _assert_lost_run_resumes(master: MasterForTest, number: int) -> None:
    """Assert that a lost run resumes with a heartbeat and that a killed run does not."""
    client = master.client()
    (trial,) = trials(master, number)
    path = f"/api/v1/trials/{trial['id']}"
    body: dict[str, Any] = {"trialId": trial["id"]}

    assert client.send("PATCH", path, body=body)["trial"]["state"] == "STATE_RUNNING"
    assert experiment(master, number)["endTime"] is None
    client.post(f"/api/v1/experiments/{number}/kill")
    ended = client.send("PATCH", path, body={**body, "state": "STATE_COMPLETED"})["trial"]
    assert (ended["state"], experiment(master, number)["state"]) == ("STATE_CANCELED", "STATE_CANCELED")
