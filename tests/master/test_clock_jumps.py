"""Jumps of the wall clock by a day under a master and all processes of trials."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos
import pytest
from chaos import num_reports
from submitting import checkpoints_of, config, log_of, submit, trials, wait_until
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process
DAY_S = 86_400
SILENCE_S = 20
SECONDS = struct.Struct("<q")
SOURCE = Path(__file__).with_name("shifted_clock.cpp")

# After the preemption signal, the trial waits for the file ``go`` before it saves.
SLOW_TO_STOP = """
import json, pathlib, time
import determined as det

info = det.get_cluster_info()
here = pathlib.Path(info.trial.hparams["here"])
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    step = 0
    while not core.preempt.should_preempt():
        step += 1
        core.train.report_training_metrics(step, {"loss": 1.0 / step})
        time.sleep(0.05)
    (here / "asked").touch()
    while not (here / "go").exists():
        time.sleep(0.05)
    with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "state.json").write_text(json.dumps(step))
"""

DETACHED = """
import pathlib, sys, time
from determined.experimental import core_v2

core_v2.init(
    config=core_v2.Config(name="by hand", external_experiment_id="a", external_trial_id="1"),
)
here, step = pathlib.Path(sys.argv[1]), 0
while not (here / "last").exists():
    if not (here / "quiet").exists():
        step += 1
        core_v2.train.report_training_metrics(steps_completed=step, metrics={"loss": 1 / step})
    time.sleep(0.5)
core_v2.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("Requires: [a C++ compiler]")
    path = tmp_path_factory.mktemp("clock") / "shifted_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-ldl"], check=True)
    return path


@pytest.fixture(scope="module")
def master_and_shift(
    tmp_path_factory: pytest.TempPathFactory, library: Path
) -> Iterator[tuple[MasterForTest, Path]]:
    """A master with a shifted clock, and the file with the shift in seconds."""
    directory = tmp_path_factory.mktemp("shifted")
    path = directory / "shift"
    path.write_bytes(SECONDS.pack(0))
    settings = directory / "master.yaml"
    settings.write_text(f"detached_timeout_s: {SILENCE_S}")
    options = ("--config-file", str(settings))
    with tempfile.TemporaryDirectory(prefix="short-", ignore_cleanup_errors=True) as short:
        env = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(path), "TMPDIR": short}
        with master_for_test(directory, num_slots=4, options=options, env=env) as master:
            yield master, path


@pytest.fixture
def shifted(master_and_shift: tuple[MasterForTest, Path]) -> tuple[MasterForTest, Callable[[int], None]]:
    """The master and a function that shifts its clock relative to the test's start."""
    master, path = master_and_shift
    (before,) = SECONDS.unpack(path.read_bytes())

    def shift(seconds: int) -> None:
        with path.open("r+b") as file:
            file.write(SECONDS.pack(before + seconds))

    return master, shift


def wait_for_reports(master: MasterForTest, number: int, *, before: int | None = None) -> None:
    """Wait for ``number`` reports more than ``before`` (default: the current count)."""
    wanted = number + (num_reports(master) if before is None else before)
    wait_for(lambda: num_reports(master) >= wanted)


def test_search_is_unaffected_by_clock_jumps(
    shifted: tuple[MasterForTest, Callable[[int], None]],
) -> None:
    master, shift = shifted
    experiment_id = chaos.submit(master)
    for seconds in (DAY_S, -DAY_S, 0, 2 * DAY_S):
        wait_for_reports(master, 6)
        shift(seconds)
    chaos.wait(master, experiment_id)

    assert chaos.problems_of(master, experiment_id) == []
    # Each trial has a single run, so none was restarted; timestamps of log lines show the jumps.
    (runs,) = chaos.rows(master, "SELECT COUNT(*), COUNT(DISTINCT task_id) FROM allocations")
    assert runs[0] == runs[1]
    (times,) = chaos.rows(master, "SELECT MIN(time_us), MAX(time_us) FROM logs WHERE source = 'task'")
    assert times[1] - times[0] > 2 * DAY_S * 1_000_000


def test_forward_jump_kills_no_trial_saving_on_pause(
    shifted: tuple[MasterForTest, Callable[[int], None]], tmp_path: Path
) -> None:
    master, shift = shifted
    before = num_reports(master)
    experiment_id = submit(master, config(hyperparameters={"here": str(tmp_path)}), SLOW_TO_STOP)
    wait_for_reports(master, 3, before=before)
    master.client().post(f"/api/v1/experiments/{experiment_id}/pause")
    wait_for((tmp_path / "asked").exists)

    shift(DAY_S)
    time.sleep(2.0)  # The scheduler polls several times a second.
    (tmp_path / "go").touch()
    wait_until(master, experiment_id, "PAUSED")
    wait_for(lambda: re.search("was terminated|crashed", log_of(master, experiment_id)))

    assert "it did not stop within" not in log_of(master, experiment_id)
    [trial] = trials(master, experiment_id)
    assert int(trial["restarts"]) == 0
    assert [one["state"] for one in checkpoints_of(master, experiment_id)] == ["STATE_COMPLETED"]


def test_forward_jump_ends_no_detached_run(
    shifted: tuple[MasterForTest, Callable[[int], None]], tmp_path: Path
) -> None:
    """The jump must not look like a missed heartbeat."""
    master, shift = shifted
    before = num_reports(master)
    started_s = time.monotonic()
    script = subprocess.Popen(
        [sys.executable, "-c", DETACHED, str(tmp_path)], env=dict(master.env), cwd=tmp_path
    )
    try:
        # A master checks for missing heartbeats only after it has run for the timeout.
        wait_for(lambda: time.monotonic() > started_s + SILENCE_S + 2)
        wait_for_reports(master, 3, before=before)
        (tmp_path / "quiet").touch()
        time.sleep(1.0)
        shift(DAY_S)
        time.sleep(3.0)  # The master checks heartbeats once a second.
        (tmp_path / "quiet").unlink()
        wait_for_reports(master, 2)
        (tmp_path / "last").touch()
        assert script.wait(timeout=60) == 0
    finally:
        script.kill()
        script.wait()

    assert "detached runs without heartbeats are ended" not in master.state.log_path.read_text()
    [found] = master.client().get("/api/v1/experiments", name="by hand")["experiments"]
    wait_until(master, found["id"], "COMPLETED")
