"""Whole searches with real DeepSpeed: local and on a master, killed and resumed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from searching import CONFIG, MODEL_DIR, begun, command, events, run
from waiting import sleep_a_little

from dstrial.process_state import read_state
from dstrial.testing.master import MasterForTest

DEADLINE_S = 560
FLAGS = ["--metric", "throughput", "--measure-seconds", "0.2", "--max-trials"]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


@pytest.mark.exhaustive("tests/dsat/test_dsat_searches.py::test_search_on_master_survives_pause_and_kill")
def test_killed_and_interrupted_search_is_resumed(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    words = command("predict", output, *FLAGS, "3", "--local", "--run-full-experiment")
    first = begun(words, tmp_path / "first.log")
    _wait_for(lambda: _launchers(first.pid), first)
    launcher = _launchers(first.pid)[-1]
    first.send_signal(signal.SIGKILL)
    first.wait()

    second = begun(words, tmp_path / "second.log")
    # A launcher that is killed before its ranks begin is started again.
    _wait_for(lambda: any(output.glob("trials/2/runs/*/*")), second)
    assert not _is_running(launcher)  # ranks end with their search
    os.kill(_launchers(second.pid)[-1], signal.SIGKILL)
    _wait_for(lambda: len(events(output, "result")) == 2, second)
    assert events(output, "result")[-1]["failure"]["kind"] == "HOST_OOM"
    _wait_for(lambda: _launchers(second.pid), second)
    launcher = _launchers(second.pid)[-1]
    second.send_signal(signal.SIGINT)

    assert second.wait(60) == 128 + signal.SIGINT
    told = (tmp_path / "second.log").read_text()
    assert "search:        not finished (SIGINT)" in told
    assert "best:          trial " in told
    assert json.loads((output / "best_ds_config.json").read_text())["train_batch_size"] == 64
    assert "interrupted by SIGINT" in (output / "report.md").read_text()
    assert not _is_running(launcher)

    submitted = events(output, "submitted")
    third = begun(words, tmp_path / "third.log")
    _wait_for(lambda: len(events(output, "submitted")) > len(submitted), third)
    # The journal cannot grow any more, as on a full disk or at a quota.
    size_bytes = (output / "events.jsonl").stat().st_size
    resource.prlimit(third.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
    assert third.wait(DEADLINE_S) == 1
    assert (
        "cannot be written (File too large); expected room on the disk"
        in (tmp_path / "third.log").read_text()
    )

    assert run(words).returncode == 0
    assert [event["trial_id"] for event in events(output, "result")] == [1, 2, 3]
    metrics = json.loads((output / "best_ds_metrics.json").read_text())
    for name in (
        "throughput",
        "latency",
        "forward",
        "backward",
        "FLOPS_per_gpu",
        "end_to_end_throughput",
    ):
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
    again = run(words)
    assert again.stdout.count("begins") == 0
    assert f"full run:      {record_path.parent}" in again.stdout
    assert len([*(output / "runs").glob("*/*")]) == 1


def _launchers(search: int) -> list[int]:
    """Return the PIDs of a search's running launchers."""
    children = Path(f"/proc/{search}/task/{search}/children").read_text().split()
    running = [int(pid) for pid in children if _is_running(int(pid))]
    return [pid for pid in running if Path(f"/proc/{pid}/comm").read_text() == "launch\n"]


def _search_process(address: str) -> int:
    """Return the PID of the only search that runs in a trial of a master."""
    port = address[address.rindex(":") :]
    (found,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if _read(path).endswith("\0-m\0dstrial.dsat.search_trial\0")
        and port in _read(path.parent / "environ")
    ]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + DEADLINE_S
        assert process.poll() is None, process.args
        sleep_a_little(began_s)


def _is_running(pid: int) -> bool:
    state = read_state(pid)
    return state is not None and not state.has_ended


@pytest.mark.exhaustive("[here]")
@pytest.mark.parametrize("where", ["here", "master"])
def test_training_code_error_ends_search(where: str, tmp_path: Path, shared_master: MasterForTest) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name in ("ds_config.json", "model_def.py"):
        (model_dir / name).write_text((MODEL_DIR / name).read_text())
    with (model_dir / "model_def.py").open("a") as file:
        file.write("\n\nDigitsTrial.train_batch = lambda *_: {}['no such key']\n")

    # Trials run on this machine for "here", and inside the search's own trial for "master".
    method, flags = ("asha", ["--local"]) if where == "here" else ("predict", [])
    ended = run(
        command(method, tmp_path / "out", *FLAGS, "3", *flags, model_dir=model_dir), shared_master.env
    )

    assert ended.returncode == 1
    assert "error in the training code: KeyError: 'no such key'" in ended.stdout
    assert len(events(tmp_path / "out", "result")) == 1


def test_search_on_master_survives_pause_and_kill(tmp_path: Path, shared_master: MasterForTest) -> None:
    output = tmp_path / "out"
    config = yaml.safe_load(CONFIG.read_text())
    config.update(name="dsat on a master", max_restarts=1)
    path, log = tmp_path / "exp.yaml", tmp_path / "first.log"
    path.write_text(yaml.safe_dump(config))
    words = command("predict", output, *FLAGS, "6", "--search-runner-config", "none.yaml", config=path)

    first = begun(words, log, shared_master.env)
    _wait_for(lambda: len(events(output, "submitted")) >= 2, first)
    number = events(output, "submitted")[0]["handle"]["experiment_id"]
    shared_master.client().post(f"/api/v1/experiments/{number}/pause", {})
    _wait_for(lambda: f"experiment {number} is paused; `det experiment activate" in log.read_text(), first)
    shared_master.kill()
    shared_master.up()
    num_before = len(events(output, "result"))
    shared_master.client().post(f"/api/v1/experiments/{number}/activate", {})
    _wait_for(lambda: len(events(output, "result")) > num_before, first)
    # The search's own process is killed, as when the machine's memory runs out: the master restarts its trial.
    os.kill(_search_process(shared_master.address), signal.SIGKILL)
    _wait_for(lambda: 2 in [event["handle"]["attempt"] for event in events(output, "submitted")], first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    ended = run(words, shared_master.env)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "--search-runner-config is accepted and has no effect" in ended.stderr
    results = [event["trial_id"] for event in events(output, "result")]
    assert results == list(range(1, len(results) + 1))
    assert {event["handle"]["experiment_id"] for event in events(output, "submitted")} == {number}
    experiment = shared_master.client().get(f"/api/v1/experiments/{number}")
    assert experiment["experiment"]["state"] == "STATE_COMPLETED"
    assert experiment["config"]["searcher"]["name"] == "single"
    (trial,) = shared_master.client().get(f"/api/v1/experiments/{number}/trials")["trials"]
    (checkpoint,) = shared_master.client().get(f"/api/v1/trials/{trial['id']}/checkpoints")["checkpoints"]
    kept = {"best_ds_config.json", "best_ds_metrics.json", "trials.json", "report.json", "report.md"}
    assert kept <= checkpoint["resources"].keys()
    metrics = json.loads((output / "best_ds_metrics.json").read_text())
    assert metrics["throughput"] > 0
    # The search is finished, so the repeated command starts no trial.
    assert run(words).stdout.count("begins") == 0
