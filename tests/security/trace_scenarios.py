"""Run a scenario and print which files it leaves in /tmp and /dev/shm.

    python trace_scenarios.py NAME WORK

``WORK`` is a directory outside of /tmp. The last line of the output is JSON: step of the scenario -> list of new files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dstrial.testing.master import MasterForTest, master_for_test

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "master"), str(ROOT / "tests")]
import waiting  # noqa: E402
from submitting import processes_with, submit, trials, wait_until  # noqa: E402

DIRECTORIES = ("/tmp", "/dev/shm")
DEADLINE_S = 400.0
wait_for = functools.partial(waiting.wait_for, deadline_s=DEADLINE_S)

# Creates TensorBoard files, a semaphore in /dev/shm and a temporary directory, then prints "is ready".
TRAIN = """
import multiprocessing, multiprocessing.shared_memory, os, sys, tempfile, time
import determined as det

distributed = det.core.DistributedContext.from_torch_distributed()
with det.core.init(distributed=distributed) as core:
    if distributed.rank == 0:
        import torch.utils.tensorboard
        writer = torch.utils.tensorboard.SummaryWriter(str(core.train.get_tensorboard_path()))
        writer.add_scalar("loss", 0.5, 1)
        writer.close()
        core.train.report_training_metrics(1, {"loss": 0.5})
        core.train.report_validation_metrics(1, {"score": 0.5})
    kept = tempfile.mkdtemp(prefix="of-the-user-")
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    print("is ready", flush=True)
    if len(sys.argv) > 1:
        time.sleep(600)
"""
# Importing dstrial moves the TensorBoard files; otherwise Determined writes them to a fixed place in /tmp.
DETACHED = """
import dstrial
from determined.experimental import core_v2
core_v2.init(config=core_v2.Config(name="detached", checkpoint_storage=STORAGE))
import torch.utils.tensorboard
writer = torch.utils.tensorboard.SummaryWriter(str(core_v2.train.get_tensorboard_path()))
writer.add_scalar("loss", 0.5, 1)
writer.close()
core_v2.train.report_training_metrics(steps_completed=1, metrics={"loss": 0.5})
"""


class LeftoverTracker:
    """Records the files that each step of a scenario leaves behind."""

    def __init__(self) -> None:
        self.left: dict[str, list[str]] = {}
        self._known: set[str] = set(listing())

    def record_step(self, name: str, *, ignoring: str = "") -> None:
        """Record the new files since the last step, except those that match ``ignoring``."""
        give_up_at_s = time.monotonic() + 20
        while True:
            found = [entry for entry in listing() if not ignoring or not re.search(ignoring, entry)]
            new = [entry for entry in found if entry not in self._known]
            if not new or time.monotonic() > give_up_at_s:
                break
            time.sleep(0.1)
        self._known |= set(new)
        self.left[name] = new


def listing() -> list[str]:
    """Return "MODE PATH" of every direct entry of /tmp and /dev/shm."""
    found = []
    for directory in DIRECTORIES:
        for entry in sorted(Path(directory).iterdir()):
            with contextlib.suppress(FileNotFoundError):
                found.append(f"{stat.S_IMODE(entry.lstat().st_mode):04o} {entry}")
    return found


def run(command: list[str], env: dict[str, str], **more: Any) -> None:
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **more
    )
    assert ended.returncode == 0, f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"


def config(entrypoint: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "traces",
        "entrypoint": entrypoint,
        "searcher": {"name": "single", "metric": "score"},
        "max_restarts": 0,
        "resources": {"slots_per_trial": 2},
        **changes,
    }


def has_printed(master: MasterForTest, experiment_id: int, text: str, times: int = 1) -> bool:
    client = master.client()
    lines = [
        line["log"]
        for trial in trials(master, experiment_id)
        for line in client.stream(f"/api/v1/trials/{trial['id']}/logs")
    ]
    return sum(text in line for line in lines) >= times


def master_trials(tracker: LeftoverTracker, work: Path) -> None:
    """Trials of two ranks: completed, rank killed, supervisor killed, trial killed."""
    with master_for_test(work) as master:
        launchers = {
            "dstrial.launch": "python3 -m dstrial.launch train.py",
            "torch_distributed": "python3 -m determined.launch.torch_distributed python3 train.py",
        }
        for name, entrypoint in launchers.items():
            done = submit(master, config(entrypoint), TRAIN)
            wait_until(master, done, "COMPLETED", deadline_s=DEADLINE_S)
            tracker.record_step(f"{name}: completed")
        for name in ("a rank killed", "the supervisor killed", "det experiment kill"):
            experiment_id = submit(master, config("python3 -m dstrial.launch train.py wait"), TRAIN)
            wait_for(lambda: has_printed(master, experiment_id, "is ready", 2), "both ranks")  # noqa: B023
            if name == "a rank killed":
                # The launcher has the same arguments, therefore is_rank.
                ranks = [pid for pid in processes_with("train.py\0wait") if is_rank(pid)]
                os.kill(ranks[0], signal.SIGKILL)
            elif name == "the supervisor killed":
                (supervisor,) = processes_with(f"/allocations/{allocation_of(master, experiment_id)}")
                os.kill(supervisor, signal.SIGKILL)
                # The trial restarts in a new allocation.
                wait_for(lambda: has_printed(master, experiment_id, "is ready", 4), "both ranks, anew")  # noqa: B023
                master.det("experiment", "kill", str(experiment_id))
            else:
                assert master.det("experiment", "kill", str(experiment_id)).returncode == 0
            wait_until(master, experiment_id, "ERROR", "CANCELED", deadline_s=DEADLINE_S)
            tracker.record_step(name)
    tracker.record_step("dstrial down")


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def allocation_of(master: MasterForTest, experiment_id: int) -> str:
    (trial,) = trials(master, experiment_id)
    tasks = master.client().get("/api/v1/tasks")["allocationIdToSummary"]
    return next(key for key, summary in tasks.items() if summary["taskId"] == trial["taskId"])


def on_a_master(tracker: LeftoverTracker, work: Path) -> None:
    """A command, TensorBoard, generic task, detached script, and ``dstrial run``."""
    with master_for_test(work) as master:
        tasks(tracker, master, work)
        detached(tracker, master, work)
        dstrial_run(tracker, master, work)
    tracker.record_step("dstrial down")


def tasks(tracker: LeftoverTracker, master: MasterForTest, work: Path) -> None:
    write = "python3 -c 'import tempfile; tempfile.mkdtemp()'"
    assert master.det("command", "run", "sh", "-c", write).returncode == 0
    tracker.record_step("command")
    one_rank = {"slots_per_trial": 1}
    experiment_id = submit(master, config("python3 -m dstrial.launch train.py", resources=one_rank), TRAIN)
    wait_until(master, experiment_id, "COMPLETED", deadline_s=DEADLINE_S)
    tracker.record_step("its trial")
    started = master.det("tensorboard", "start", "--no-browser", "--detach", str(experiment_id))
    assert started.returncode == 0, started.stderr
    task_id = started.stdout.split()[-1]
    client = master.client()

    def state() -> str:
        return str(client.get(f"/api/v1/tensorboards/{task_id}")["tensorboard"]["state"])

    wait_for(lambda: state() == "STATE_RUNNING", "the TensorBoard")
    assert master.det("tensorboard", "kill", task_id).returncode == 0
    wait_for(lambda: state() == "STATE_TERMINATED", "the end of the TensorBoard")
    tracker.record_step("tensorboard")
    (work / "task.yaml").write_text(yaml.safe_dump({"entrypoint": ["sh", "-c", write]}))
    made = master.det("task", "create", str(work / "task.yaml"))
    assert made.returncode == 0, made.stderr
    task_id = made.stdout.split("Created task ")[1].split()[0]
    wait_for(
        lambda: client.get(f"/api/v1/tasks/{task_id}")["task"]["taskState"].endswith("COMPLETED"),
        "the task",
    )
    tracker.record_step("generic task")


def detached(tracker: LeftoverTracker, master: MasterForTest, work: Path) -> None:
    script = work / "detached.py"
    script.write_text(DETACHED.replace("STORAGE", repr(str(work / "kept"))))
    run([sys.executable, str(script)], dict(master.env))
    tracker.record_step("detached")


def digits(work: Path, batches: int = 10, **changes: Any) -> Path:
    given = yaml.safe_load((ROOT / "experiment_configs" / "digits.yaml").read_text())
    given["searcher"]["max_length"] = {"batches": batches}
    given["resources"] = {"slots_per_trial": 2}
    path = work / "digits.yaml"
    path.write_text(yaml.safe_dump({**given, "max_restarts": 0, **changes}))
    return path


def plain_env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


def dstrial_run(tracker: LeftoverTracker, master: MasterForTest, work: Path) -> None:
    definition = str(ROOT / "model_defs" / "digits")
    run(
        [sys.executable, "-m", "dstrial.cli", "run", str(digits(work)), definition],
        dict(master.env) | {"PYTHONPATH": str(ROOT)},
        cwd=work,
    )
    tracker.record_step("dstrial run")


def launch(tracker: LeftoverTracker, work: Path) -> None:
    """Runs without a master: completed, interrupted, launcher killed."""
    definition = ROOT / "model_defs" / "digits"
    command = [sys.executable, "-m", "dstrial.launch", "--trial", "model_def:DigitsTrial"]
    command += ["--context-dir", str(definition), "--config"]
    run([*command, str(digits(work))], plain_env(), cwd=work)
    tracker.record_step("launch: completed")
    long = digits(work, 100_000)
    for name, number in (("interrupted", signal.SIGINT), ("launcher killed", signal.SIGKILL)):
        before = num_training(work)
        with (work / "launch.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(long)], env=plain_env(), cwd=work, stdout=log, stderr=log
            )
            wait_for(lambda: num_training(work) > before or process.poll() is not None, "ranks")  # noqa: B023
            assert process.poll() is None, (work / "launch.log").read_text()
            process.send_signal(number)
            process.wait()
        wait_for(lambda: not rank_pids(work), "the ranks' end")
        tracker.record_step(f"launch: {name}")
    run([*command, str(digits(work))], plain_env(), cwd=work)
    tracker.record_step("launch: the next one")


def num_training(work: Path) -> int:
    """Return the number of runs that have reported metrics."""
    return sum(path.stat().st_size > 0 for path in work.glob("runs/*/*/metrics.jsonl"))


def rank_pids(work: Path) -> list[int]:
    return [pid for pid in processes_with(str(work / "digits.yaml")) if is_rank(pid)]


SCENARIOS: dict[str, Callable[[LeftoverTracker, Path], None]] = {
    "master_trials": master_trials,
    "on_a_master": on_a_master,
    "launch": launch,
}


def main(name: str, work: Path) -> None:
    """Run a scenario with its own home directory; print the files that it left."""
    home = work / "home"
    home.mkdir()
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
    os.environ.update({"HOME": str(home), "TORCH_EXTENSIONS_DIR": extensions})
    tracker = LeftoverTracker()
    SCENARIOS[name](tracker, work)
    print(json.dumps(tracker.left))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
