"""Kill the master, a trial's supervisor, its entrypoint or one of its ranks at random moments of small searches.

Usage: ``python tests/master/chaos.py [--runs N] [--seed S] [--workers W]``

Every run is a search of its own under a master of its own. Afterwards the experiment must be COMPLETED with every trial that
it asked for, each trial's batches reported once and without a gap, its final loss that of undisturbed training, no log
line doubled and the last one there, no process left, and the database sound.
"""

from __future__ import annotations

import argparse
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import sqlite3
import sys
import tempfile
import time

import yaml

from dstrial.master.launcher import SupervisorHandle, is_alive
from dstrial.testing.master import MasterForTest, master_for_test

NUM_STEPS = 24
NUM_TRIALS = 3
DEADLINE_S = 180.0
TARGETS = ("master", "supervisor", "entrypoint", "rank")

SCRIPT = """
import json, subprocess, sys, time
import determined as det

def step(state, lr):
    return state - lr * (2.0 * state - 0.1 * state * state)

def main():
    info = det.get_cluster_info()
    lr = info.trial.hparams["lr"]
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    with det.core.init() as core:
        done, state = 0, 1.0
        if info.latest_checkpoint is not None:
            with core.checkpoint.restore_path(info.latest_checkpoint) as path:
                done, state = json.loads((path / "state.json").read_text())
        while done < STEPS:
            time.sleep(0.05)
            state, done = step(state, lr), done + 1
            if rank.poll() is not None:
                # Without a traceback, two of which before the first batch would end the trial for good.
                sys.exit(3)
            print("run", info.trial._trial_run_id, "batch", done, flush=True)
            core.train.report_training_metrics(done, {"loss": state})
            if done % 4 == 0:
                core.train.report_validation_metrics(done, {"validation_loss": state, "batches": done})
                with core.checkpoint.store_path({"steps_completed": done}) as (path, _):
                    (path / "state.json").write_text(json.dumps([done, state]))
            if core.preempt.should_preempt():
                break
    rank.kill()
    rank.wait()

main()
""".replace("STEPS", str(NUM_STEPS))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        seed: of the run.
        killed: what was killed, in order.
        problems: what was wrong afterwards; none if all was right.
        seconds: how long it took.
    """

    seed: int
    killed: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float


def expected_loss(lr: float) -> float:
    """Return the loss after all steps of undisturbed training."""
    state = 1.0
    for _ in range(NUM_STEPS):
        state -= lr * (2.0 * state - 0.1 * state * state)
    return state


def submit(master: MasterForTest, seed: int) -> int:
    """Submit a small random search and return its id."""
    config = {
        "name": f"chaos-{seed}",
        "entrypoint": "python3 train.py",
        "hyperparameters": {"lr": {"type": "double", "minval": 0.01, "maxval": 0.2}},
        "searcher": {
            "name": "random", "metric": "validation_loss", "max_trials": NUM_TRIALS, "max_concurrent_trials": 2,
        },
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": seed},
    }  # fmt: skip
    content = base64.b64encode(SCRIPT.encode()).decode()
    file = {"path": "train.py", "type": 48, "content": content, "mtime": "0", "mode": 420}
    message = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": [file]}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


@contextlib.contextmanager
def opened(master: MasterForTest):
    """Open the master's database to look."""
    connection = sqlite3.connect(master.state.database_path, timeout=30)
    connection.row_factory = sqlite3.Row
    try:
        yield connection
    finally:
        connection.close()


def state_of(master: MasterForTest, experiment_id: int) -> str:
    """Return the experiment's stored state."""
    with opened(master) as connection:
        row = connection.execute("SELECT state FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
    return str(row["state"])


def children_of(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid and fields[0] != b"Z":
                    found.append(int(entry.name))
    return found


def strike(master: MasterForTest, target: str, chance: random.Random) -> str | None:
    """Kill one target; return what was killed, None if there was nothing to kill."""
    if target == "master":
        master.kill()
        time.sleep(chance.uniform(0.0, 1.5))
        master.up()
        return target
    with opened(master) as connection:
        rows = connection.execute(
            "SELECT supervisor_pid, supervisor_start FROM allocations "
            "WHERE state = 'RUNNING' AND supervisor_pid IS NOT NULL"
        ).fetchall()
    handles = [SupervisorHandle(row["supervisor_pid"], row["supervisor_start"]) for row in rows]
    handles = [handle for handle in handles if is_alive(handle)]
    if not handles:
        return None
    pid = chance.choice(handles).pid
    if target != "supervisor":
        entrypoints = children_of(pid)
        if not entrypoints:
            return None
        pid = entrypoints[0]
    if target == "rank":
        below = children_of(pid)
        # Behind a shell, the script is one further down.
        below = [grandchild for child in below for grandchild in children_of(child)] or below
        if not below:
            return None
        pid = below[0]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return target


def look(master: MasterForTest, experiment_id: int) -> list[str]:
    """Return what is wrong with an experiment that has ended."""
    problems = []
    with opened(master) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            problems.append("the database is damaged")
        trials = connection.execute(
            "SELECT * FROM trials WHERE experiment_id = ?", (experiment_id,)
        ).fetchall()
        if len(trials) != NUM_TRIALS:
            problems.append(f"{len(trials)} trials")
        for trial in trials:
            problems += look_at_trial(connection, trial)
    marked = [
        entry.name
        for entry in pathlib.Path("/proc").iterdir()
        if entry.name.isdigit() and _belongs_to(entry, master)
    ]
    if marked:
        problems.append(f"processes {marked} are left")
    return problems


def look_at_trial(connection: sqlite3.Connection, trial: sqlite3.Row) -> list[str]:
    """Return what is wrong with a trial."""
    problems = []
    name = f"trial {trial['id']}"
    if trial["state"] != "COMPLETED":
        problems.append(f"{name} is {trial['state']}")
    rows = connection.execute(
        "SELECT steps, metrics FROM metrics WHERE trial_id = ? AND group_name = 'training' AND archived = 0 ORDER BY steps",
        (trial["id"],),
    ).fetchall()
    if [row["steps"] for row in rows] != list(range(1, NUM_STEPS + 1)):
        problems.append(f"{name} has reported {[row['steps'] for row in rows]}")
    elif json.loads(rows[-1]["metrics"])["loss"] != expected_loss(json.loads(trial["hparams"])["lr"]):
        problems.append(f"{name} has another final loss")
    summary = json.loads(trial["summary_metrics"]).get("avg_metrics", {}).get("loss", {})
    if summary.get("count") != NUM_STEPS:
        problems.append(f"{name} has a summary of {summary.get('count')} reports")
    lines = collections.Counter(
        row["log"]
        for row in connection.execute(
            "SELECT log FROM logs WHERE trial_id = ? AND log LIKE 'run %'", (trial["id"],)
        )
    )
    doubled = [line for line, count in lines.items() if count > 1]
    if doubled:
        problems.append(f"{name} has lines twice: {doubled[:3]}")
    if not any(line.endswith(f"batch {NUM_STEPS}\n") for line in lines):
        problems.append(f"{name} lacks its last line")
    return problems


def _belongs_to(entry: pathlib.Path, master: MasterForTest) -> bool:
    try:
        return f"DSTRIAL_ALLOCATION_DIR={master.state.path}".encode() in (entry / "environ").read_bytes()
    except OSError:
        return False


def run(seed: int) -> Outcome:
    """Run one search and disturb it once to three times."""
    chance = random.Random(seed)
    started_s = time.monotonic()
    killed: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="dstrial-chaos-") as name,
        master_for_test(pathlib.Path(name), num_slots=2) as master,
    ):
        experiment_id = submit(master, seed)
        for index in range(chance.randint(1, 3)):
            time.sleep(chance.uniform(0.2, 3.0))
            if state_of(master, experiment_id) == "COMPLETED":
                break
            # Every kind comes first equally often.
            target = TARGETS[seed % len(TARGETS)] if index == 0 else chance.choice(TARGETS)
            hit = strike(master, target, chance)
            if hit is not None:
                killed.append(hit)
        give_up_at_s = time.monotonic() + DEADLINE_S
        while state_of(master, experiment_id) not in ("COMPLETED", "ERROR", "CANCELED"):
            if time.monotonic() > give_up_at_s:
                break
            time.sleep(0.1)
        problems = look(master, experiment_id)
        state = state_of(master, experiment_id)
        if state != "COMPLETED":
            problems.insert(0, f"the experiment is {state}")
    return Outcome(seed, tuple(killed), tuple(problems), time.monotonic() - started_s)


def main(arguments: list[str] | None = None) -> int:
    """Run, print each run and a table; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="runs at once (default: 2)")
    options = parser.parse_args(arguments)
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for outcome in pool.map(run, range(options.seed, options.seed + options.runs)):
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "right"
            print(
                f"seed {outcome.seed}: {', '.join(outcome.killed)}: {verdict} ({outcome.seconds:.0f} s)",
                flush=True,
            )
    print("\n| killed | times | in runs | of them right |\n|---|---|---|---|")
    for target in TARGETS:
        touched = [outcome for outcome in outcomes if target in outcome.killed]
        times = sum(outcome.killed.count(target) for outcome in outcomes)
        right = sum(not outcome.problems for outcome in touched)
        print(f"| {target} | {times} | {len(touched)} | {right} |")
    wrong = [outcome for outcome in outcomes if outcome.problems]
    print(f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} runs ended right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
