"""Whole searches with real DeepSpeed on real ranks: without a master and killed meanwhile, and on a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.testing.master import MasterForTest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "experiment_configs" / "dsat_trial.yaml"
MODEL_DIR = ROOT / "model_defs" / "dsat_trial"
DEADLINE_S = 560
FLAGS = ["--metric", "throughput", "--measure-seconds", "0.2", "--max-trials"]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


def _command(output: Path, *flags: str, config: Path = CONFIG, model_dir: Path = MODEL_DIR) -> list[str]:
    return [
        *(sys.executable, "-m", "dstrial.dsat", "asha", str(config), str(model_dir)),
        *("--output", str(output), *FLAGS, *flags),
    ]


def _environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **(more or {})}


def _run(command: list[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=_environment(env), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


def _events(output: Path, kind: str) -> list[dict[str, Any]]:
    path = output / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_search_whose_driver_and_then_whose_worker_is_killed_ends_with_a_config_that_trains(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    command = _command(output, "3", "--local", "--run-full-experiment")
    first = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not _events(output, "submitted"):
        assert time.monotonic() < give_up_at_s
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    launcher = (output / "workers" / "1" / "launcher.pid").read_text()

    second = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while not _events(output, "result"):
        assert time.monotonic() < give_up_at_s
        assert second.poll() is None
        time.sleep(0.01)
    os.kill(int(launcher), signal.SIGKILL)
    told, _ = second.communicate(timeout=DEADLINE_S)

    assert second.returncode == 0, told
    assert "trial 1 goes on" in told
    assert (output / "workers" / "1.1" / "launcher.pid").read_text() == launcher
    assert [event["trial_id"] for event in _events(output, "result")] == [1, 2, 3]
    answers = (output / "workers" / "1" / "answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["generation"] for line in answers} == {1}
    metrics = json.loads((output / "best_ds_metrics.json").read_text())
    for name in ("throughput", "latency", "forward", "backward", "FLOPS_per_gpu", "bare_throughput"):
        assert metrics[name] > 0
    assert metrics["num_params"] == 64 * 256 + 256 + 3 * (256 * 256 + 256) + 256 * 10 + 10
    # Kept for backward per record: the image, and input and output of every GELU, in fp32.
    assert metrics["activation_bytes_per_record"] == pytest.approx(4 * (64 + 8 * 256), rel=0.05)
    assert json.loads((output / "best_ds_config.json").read_text())["train_batch_size"] == 64
    (record_path,) = (output / "runs").glob("*/*/run.json")
    assert json.loads(record_path.read_text())["state"] == "completed"
    trained = (record_path.parent / "experiment.yaml").read_text()
    assert "_use_dsat_mode" not in trained
    assert "autotuning" not in trained
    assert _run(_command(output, "3", "--local")).stdout.count("begins") == 0


@pytest.mark.parametrize("where", ["here", "master"])
def test_an_error_in_the_training_code_ends_a_search_with_its_message(
    where: str, tmp_path: Path, shared_master: MasterForTest
) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name in ("ds_config.json", "model_def.py"):
        (model_dir / name).write_text((MODEL_DIR / name).read_text())
    with (model_dir / "model_def.py").open("a") as file:
        file.write("\n\nDigitsTrial.train_batch = lambda *_: {}['no such key']\n")

    # Launched here, by a living worker there.
    flags = ["--local", "--no-worker"] if where == "here" else []
    ended = _run(_command(tmp_path / "out", "3", *flags, model_dir=model_dir), shared_master.env)

    assert ended.returncode == 1
    assert "error in the training code: KeyError: 'no such key'" in ended.stdout
    assert len(_events(tmp_path / "out", "result")) == 1


def test_a_search_on_a_master_has_one_experiment_measure_everything_and_keep_the_result(
    tmp_path: Path, shared_master: MasterForTest
) -> None:
    output = tmp_path / "out"
    config = yaml.safe_load(CONFIG.read_text())
    config["name"] = "dsat on a master"
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(config))

    ended = _run(_command(output, "2", config=path), shared_master.env)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    (number,) = {event["handle"]["experiment_id"] for event in _events(output, "submitted")}
    experiment = shared_master.client().get(f"/api/v1/experiments/{number}")
    assert experiment["experiment"]["state"] == "STATE_COMPLETED"
    assert experiment["config"]["searcher"]["name"] == "single"
    assert experiment["config"]["max_restarts"] == 0
    (trial,) = shared_master.client().get(f"/api/v1/experiments/{number}/trials")["trials"]
    (checkpoint,) = shared_master.client().get(f"/api/v1/trials/{trial['id']}/checkpoints")["checkpoints"]
    kept = {"best_ds_config.json", "best_ds_metrics.json", "trials.json", "report.json", "report.html"}
    assert kept <= checkpoint["resources"].keys()
    metrics = json.loads((output / "best_ds_metrics.json").read_text())
    assert metrics["throughput"] > 0
    assert _run(_command(output, "2", config=path)).stdout.count("begins") == 0
