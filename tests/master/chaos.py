"""Kill random processes of small searches, and check that nothing is lost.

Each run is one search under its own master. Its seed selects the searcher, the processes to kill and the moments. A trial
is a launcher with two ranks, which exchange values at every batch and keep journals. After a run:

- the experiment is COMPLETED and has the trials of the undisturbed search;
- the searcher's state equals that of a new searcher that gets the stored validations once;
- each trial has reports without a gap from batch 1 to the batch where the searcher ended the trial, with the losses of
  undisturbed training, and a checkpoint at that batch;
- everything that the master confirmed and every line that a rank printed is stored exactly once;
- no process, directory or token is left, and the database is intact.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import chaos_checks
import chaos_train
import yaml

from dstrial.master.backends.backend import SupervisorHandle
from dstrial.master.backends.local import is_alive
from dstrial.testing.master import MasterForTest, master_for_test

DEADLINE_S = 240.0
MAX_MOMENTS = 3
TARGETS = ("master", "supervisor", "entrypoint", "rank")
_END = ("COMPLETED", "ERROR", "CANCELED")
_HALVING = {"max_trials": 4, "max_concurrent_trials": 2, "divisor": 2}
SEARCHERS: dict[str, dict[str, Any]] = {
    "random": {"max_trials": 3, "max_concurrent_trials": 2},
    "async_halving": {**_HALVING, "num_rungs": 3},
    "adaptive_asha": {**_HALVING, "max_rungs": 3, "mode": "standard"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Strike:
    """A killed process: the master, or a process of one run of a trial."""

    target: str
    trial_id: int | None = None
    run_id: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The targets killed in a run, in order, and the problems found afterwards."""

    killed: tuple[str, ...]
    problems: tuple[str, ...]


def searcher_of(seed: int) -> str:
    """Return the searcher for a seed; 12 seeds in a row pair it with each target."""
    return list(SEARCHERS)[seed // len(TARGETS) % len(SEARCHERS)]


def submit(master: MasterForTest, seed: int, journals: pathlib.Path) -> int:
    """Submit a small search without torch and return its id."""
    name = searcher_of(seed)
    searcher = {
        "name": name, "metric": "validation_loss", "smaller_is_better": True, **SEARCHERS[name],
    }  # fmt: skip
    if name != "random":
        searcher |= {"time_metric": "batches", "max_time": chaos_train.NUM_STEPS}
    config = {
        "name": f"chaos-{seed}",
        "entrypoint": "python3 chaos_train.py",
        "hyperparameters": {
            "lr": {"type": "double", "minval": 0.01, "maxval": 0.2},
            "journals": str(journals),
        },
        "searcher": searcher,
        "resources": {"slots_per_trial": chaos_train.NUM_RANKS},
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": seed},
    }
    path = pathlib.Path(chaos_train.__file__)
    content = base64.b64encode(path.read_bytes()).decode()
    file = {"path": path.name, "type": 48, "content": content, "mtime": "0", "mode": 420}
    message = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": [file]}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


def state_of(master: MasterForTest, experiment_id: int) -> str:
    """Return the experiment's stored state."""
    with chaos_checks.opened(master) as connection:
        row = connection.execute("SELECT state FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
    return str(row["state"])


def wait(master: MasterForTest, experiment_id: int) -> None:
    """Wait up to ``DEADLINE_S`` for an experiment and its allocations to end."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at_s:
        if state_of(master, experiment_id) in _END:
            with chaos_checks.opened(master) as connection:
                left = connection.execute("SELECT 1 FROM allocations WHERE state != 'TERMINATED'").fetchone()
            # The directory of an allocation is removed after its row is TERMINATED.
            if left is None and not any((master.state.path / "allocations").iterdir()):
                return
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid and fields[0] != b"Z":
                    found.append(int(entry.name))
    return sorted(found)


def ranks_below(pid: int) -> list[int]:
    """Return the rank processes below a process, without the ranks' children."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            # A forked rank has no RANK in /proc: it leads its group, and its session leader is not its parent.
            is_fork = os.getpgid(child) == child and os.getsid(child) not in (pid, child)
            is_rank = any(variable.startswith(b"RANK=") for variable in variables) or is_fork
            found += [child] if is_rank else ranks_below(child)
    return found


def hit(master: MasterForTest, target: str, chance: random.Random, trial_id: int | None) -> Strike | None:
    """Kill a process of the given or a random trial; return None if there is none."""
    with chaos_checks.opened(master) as connection:
        rows = connection.execute(
            "SELECT * FROM allocations WHERE state = 'RUNNING' AND supervisor_pid IS NOT NULL ORDER BY id"
        ).fetchall()
    alive = [row for row in rows if is_alive(_handle(row)) and trial_id in (None, row["trial_id"])]
    if not alive:
        return None
    row = chance.choice(alive)
    if target == "supervisor":
        pids = [row["supervisor_pid"]]
    else:
        pids = (children_of if target == "entrypoint" else ranks_below)(row["supervisor_pid"])
    if not pids:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    return Strike(target, row["trial_id"], row["run_id"])


def strike(master: MasterForTest, target: str, chance: random.Random, trial_id: int | None) -> list[Strike]:
    """Kill a target, and sometimes another while the master is down."""
    if target != "master":
        done = hit(master, target, chance, trial_id)
        return [] if done is None else [done]
    master.kill()
    strikes = [Strike(target)]
    time.sleep(chance.uniform(0.0, 0.75))
    if chance.random() < 0.3:
        done = hit(master, chance.choice(TARGETS[1:]), chance, trial_id)
        strikes += [] if done is None else [done]
    time.sleep(chance.uniform(0.0, 0.75))
    master.up()
    return strikes


def stopping_trial(master: MasterForTest, experiment_id: int, timeout_s: float) -> int | None:
    """Return a trial that the searcher is stopping, or None after ``timeout_s``."""
    give_up_at_s = time.monotonic() + timeout_s
    with chaos_checks.opened(master) as connection:
        while time.monotonic() < give_up_at_s:
            row = connection.execute(
                "SELECT id FROM trials WHERE experiment_id = ? AND state = 'STOPPING_COMPLETED'",
                (experiment_id,),
            ).fetchone()
            if row is not None:
                return int(row["id"])
            time.sleep(0.002)
    return None


def _handle(row: sqlite3.Row) -> SupervisorHandle:
    return SupervisorHandle(row["supervisor_pid"], row["supervisor_start"])


def disturb(master: MasterForTest, experiment_id: int, seed: int) -> list[Strike]:
    """Kill targets at one to three moments, sometimes while a trial is stopping."""
    chance = random.Random(seed)
    strikes: list[Strike] = []
    for index in range(chance.randint(1, MAX_MOMENTS)):
        time.sleep(chance.uniform(0.2, 3.0))
        trial_id = None
        if chance.random() < 0.4 and searcher_of(seed) != "random":
            trial_id = stopping_trial(master, experiment_id, 5.0)
        if state_of(master, experiment_id) in _END:
            break
        # Consecutive seeds rotate the first target.
        target = TARGETS[seed % len(TARGETS)] if index == 0 else chance.choice(TARGETS)
        strikes += strike(master, target, chance, trial_id)
    return strikes


@contextlib.contextmanager
def _running_master() -> Iterator[tuple[pathlib.Path, MasterForTest]]:
    with tempfile.TemporaryDirectory(prefix="dstrial-chaos-", ignore_cleanup_errors=True) as name:
        directory = pathlib.Path(name)
        for child in ("journals", "tmp"):
            (directory / child).mkdir()
        # Start every program as a new process, not as a fork of the test suite's server.
        env = {"TMPDIR": str(directory / "tmp"), "TEST_FORKS": "0"}
        with master_for_test(directory, num_slots=2 * chaos_train.NUM_RANKS, env=env) as master:
            yield directory, master


def run(seed: int) -> Outcome:
    """Run one search, kill processes of it, and check the result."""
    with _running_master() as (directory, master):
        experiment_id = submit(master, seed, directory / "journals")
        strikes = disturb(master, experiment_id, seed)
        wait(master, experiment_id)
        cut_off = {
            (strike.trial_id, strike.run_id)
            for strike in strikes
            if strike.target == "supervisor" and strike.trial_id is not None and strike.run_id is not None
        }
        with chaos_checks.opened(master) as connection:
            search, problems = chaos_checks.look(
                master, connection, experiment_id, directory / "journals", cut_off
            )
            if problems:
                problems.append(_last_log_lines(search))
    return Outcome(tuple(strike.target for strike in strikes), tuple(problems))


def _last_log_lines(search: chaos_checks.Search) -> str:
    """Return the last 150 log lines, for the report of a failed run."""
    rows = search.connection.execute("SELECT * FROM logs ORDER BY id DESC LIMIT 150").fetchall()
    return "\n" + "".join(f"{row['time_us']} trial {row['trial_id']}: {row['log']}" for row in rows[::-1])
