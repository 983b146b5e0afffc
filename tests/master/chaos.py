"""Small searches without torch whose processes are killed, and checks that nothing is lost.

A trial is a launcher with two ranks (``chaos_train.py``), which exchange values at every batch and print numbered lines.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import os
import pathlib
import re
import signal
import sqlite3
import time
from collections.abc import Collection, Iterator
from typing import Any

import chaos_train
import yaml
from chaos_train import NUM_RANKS, NUM_STEPS, undisturbed
from simulated_search import simulate

from dstrial.master.backends.backend import SupervisorHandle
from dstrial.master.backends.local import is_alive
from dstrial.search import Searcher, Stop
from dstrial.testing.master import MasterForTest

DEADLINE_S = 240.0
_END = ("COMPLETED", "ERROR", "CANCELED")
_TIME = {"time_metric": "batches", "max_time": NUM_STEPS}
_HALVING = {"max_trials": 4, "max_concurrent_trials": 2, "divisor": 2, **_TIME}
SEARCHERS: dict[str, dict[str, Any]] = {
    "random": {"max_trials": 3, "max_concurrent_trials": 2},
    "async_halving": {**_HALVING, "num_rungs": 3},
    "adaptive_asha": {**_HALVING, "max_rungs": 3, "mode": "standard"},
}
_LINE = re.compile(r"run (\d+) rank (\d+) line (\d+): ")


def submit(master: MasterForTest, name: str = "random") -> int:
    """Submit a search by name of its searcher; return the experiment's id."""
    searcher = {"name": name, "metric": "validation_loss", "smaller_is_better": True, **SEARCHERS[name]}
    config = {
        "name": f"chaos-{name}",
        "entrypoint": "python3 chaos_train.py",
        "hyperparameters": {"lr": {"type": "double", "minval": 0.01, "maxval": 0.2}},
        "searcher": searcher,
        "resources": {"slots_per_trial": NUM_RANKS},
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": 3},
    }
    path = pathlib.Path(chaos_train.__file__)
    content = base64.b64encode(path.read_bytes()).decode()
    file = {"path": path.name, "type": 48, "content": content, "mtime": "0", "mode": 420}
    message = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": [file]}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


@contextlib.contextmanager
def opened(master: MasterForTest) -> Iterator[sqlite3.Connection]:
    """Open the master's database read-only."""
    # A writable connection would checkpoint the WAL of a killed master when it closes.
    connection = sqlite3.connect(f"file:{master.state.database_path}?mode=ro", uri=True, timeout=30)
    connection.row_factory = sqlite3.Row
    with contextlib.closing(connection):
        yield connection


def rows(master: MasterForTest, sql: str, *values: object) -> list[sqlite3.Row]:
    with opened(master) as connection:
        return connection.execute(sql, values).fetchall()


def num_reports(master: MasterForTest) -> int:
    return int(rows(master, "SELECT COUNT(*) FROM metrics")[0][0])


def wait(master: MasterForTest, experiment_id: int) -> None:
    """Wait up to ``DEADLINE_S`` for an experiment and its allocations to end."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at_s:
        (row,) = rows(master, "SELECT state FROM experiments WHERE id = ?", experiment_id)
        live = rows(master, "SELECT 1 FROM allocations WHERE state != 'TERMINATED'")
        # The directory of an allocation is removed after its row is TERMINATED.
        if row["state"] in _END and not live and not any((master.state.path / "allocations").iterdir()):
            return
        time.sleep(0.1)


def running(master: MasterForTest) -> list[sqlite3.Row]:
    """Return the running allocations whose supervisor lives."""
    found = rows(master, "SELECT * FROM allocations WHERE state = 'RUNNING' AND supervisor_pid IS NOT NULL")
    return [
        row for row in found if is_alive(SupervisorHandle(row["supervisor_pid"], row["supervisor_start"]))
    ]


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children that have not ended."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid and fields[0] not in (b"Z", b"X"):
                    found.append(int(entry.name))
    return sorted(found)


def kill(master: MasterForTest, target: str) -> set[tuple[int, int]]:
    """Kill a process of a trial; return (trial id, run id) whose last lines may be lost.

    ``target`` is "supervisor", "entrypoint", "rank" or "all", which kills all processes of all trials.
    """
    cut_off = set()
    for row in running(master)[: None if target == "all" else 1]:
        supervisor = row["supervisor_pid"]
        entrypoints = children_of(supervisor)
        ranks = [pid for entrypoint in entrypoints for pid in children_of(entrypoint)]
        pids = {"supervisor": [supervisor], "entrypoint": entrypoints, "rank": ranks[-1:]}
        for pid in [supervisor, *entrypoints, *ranks] if target == "all" else pids[target]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if target in ("supervisor", "all"):
            cut_off.add((row["trial_id"], row["run_id"]))
    return cut_off


def problems_of(
    master: MasterForTest,
    experiment_id: int,
    cut_off: Collection[tuple[int, int]] = (),
    *,
    has_all_lines: bool = True,
) -> list[str]:
    """Return what differs from an undisturbed search in an ended search.

    ``cut_off`` are (trial id, run id) of runs whose last printed lines may be lost.
    """
    (row,) = rows(master, "SELECT * FROM experiments WHERE id = ?", experiment_id)
    trials = rows(master, "SELECT * FROM trials WHERE experiment_id = ? ORDER BY id", experiment_id)
    config = json.loads(row["config"])
    problems = [] if row["state"] == "COMPLETED" else [f"it is {row['state']}: {row['end_reason']}"]
    seed = config["reproducibility"]["experiment_seed"]
    wanted = [trial.hparams for trial in simulate(config, seed, lambda *_: 0.0).trials]
    found = [json.loads(trial["hparams"]) for trial in trials]
    if found != wanted:
        problems.append(f"{len(found)} trials {found}; undisturbed {len(wanted)} {wanted}")
    if row["searcher_type"] != "random":
        problems += _replayed(master, row, trials)
    for trial in trials:
        problems += [f"trial {trial['id']}: {text}" for text in _training_problems(master, trial, config)]
    if has_all_lines:
        problems += _line_problems(master, cut_off)
    return problems + _leftovers(master)


def _replayed(master: MasterForTest, row: sqlite3.Row, trials: list[sqlite3.Row]) -> list[str]:
    """Compare the stored searcher with a new one that gets the stored validations once."""
    config = json.loads(row["config"])
    searcher = Searcher.new(config, config["reproducibility"]["experiment_seed"])
    searcher.initial_trials()
    request_ids = {trial["id"]: trial["request_id"] for trial in trials}
    stopped = set()
    for one in rows(master, "SELECT * FROM metrics WHERE group_name = 'validation' ORDER BY id"):
        request_id, metrics = request_ids.get(one["trial_id"]), json.loads(one["metrics"])
        if request_id is not None and request_id not in stopped:
            actions = searcher.validation_completed(request_id, metrics)
            stopped |= {action.request_id for action in actions if isinstance(action, Stop)}
    for request_id in request_ids.values():
        searcher.trial_exited(request_id)
    found, wanted = json.loads(row["searcher_snapshot"]), searcher.snapshot()
    problems = [
        f"the searcher's {name!r} is {found[name]}; told again {wanted[name]}"
        for name in wanted
        if found[name] != wanted[name]
    ]
    return problems + [f"{one} was not stopped" for one in request_ids.values() if one not in stopped]


def _series(master: MasterForTest, trial_id: int, group: str) -> list[tuple[int, dict[str, Any]]]:
    sql = (
        "SELECT steps, metrics FROM metrics WHERE trial_id = ? AND group_name = ? AND archived = 0 "
        "ORDER BY steps, id"
    )
    return [(row["steps"], json.loads(row["metrics"])) for row in rows(master, sql, trial_id, group)]


def _training_problems(master: MasterForTest, trial: sqlite3.Row, config: Any) -> list[str]:
    """Check that a trial reported every batch once, with the losses of undisturbed training."""
    problems = [] if trial["state"] == "COMPLETED" else [f"it is {trial['state']}"]
    series = _series(master, trial["id"], "training")
    steps = [step for step, _ in series]
    if not steps or steps != list(range(1, len(steps) + 1)):
        return [*problems, f"it has reported {steps}"]
    losses = undisturbed(json.loads(trial["hparams"])["lr"])
    if [metrics["loss"] for _, metrics in series] != losses[: len(steps)]:
        problems.append("its losses differ from undisturbed training")
    for group, name in (("training", "loss"), ("validation", "validation_loss")):
        values = [metrics[name] for _, metrics in _series(master, trial["id"], group)]
        sql = "SELECT summary FROM metric_summaries WHERE trial_id = ? AND group_name = ? AND name = ?"
        (row,) = rows(master, sql, trial["id"], group, name)
        of = json.loads(row["summary"])
        if (of["count"], of["min"], of["last"]) != (len(values), min(values), values[-1]):
            problems.append(f"it has the summary {of} of {len(values)} {group} reports")
    sql = "SELECT * FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED' ORDER BY steps DESC LIMIT 1"
    storage = config["checkpoint_storage"]
    for saved in rows(master, sql, trial["id"]):
        path = pathlib.Path(storage["host_path"], storage.get("storage_path") or "", saved["uuid"])
        if json.loads((path / "state.json").read_text()) == [steps[-1], losses[steps[-1] - 1]]:
            return problems
    return [*problems, f"it has no checkpoint at its last batch, {steps[-1]}"]


def _line_problems(master: MasterForTest, cut_off: Collection[tuple[int, int]]) -> list[str]:
    """Check that each line of each rank, and each line of the master, is stored once."""
    said = rows(master, "SELECT * FROM logs WHERE source = 'master' AND allocation_id IS NOT NULL")
    count = collections.Counter((row["allocation_id"], row["log"]) for row in said)
    problems = [f"{line} is stored {number} times" for line, number in count.items() if number > 1]
    numbers: dict[tuple[int, int, int], list[int]] = collections.defaultdict(list)
    for row in rows(master, "SELECT * FROM logs WHERE source = 'task' ORDER BY id"):
        match = _LINE.match(row["log"])
        if match is not None:
            numbers[row["trial_id"], int(match[1]), int(match[2])].append(int(match[3]))
    problems += [
        f"the lines of (trial, run, rank) {key} are {found}"
        for key, found in numbers.items()
        if found != list(range(1, len(found) + 1))
    ]
    ended = rows(master, "SELECT trial_id FROM logs WHERE log LIKE '%: ends behind%'")
    known = {row["trial_id"] for row in ended} | {trial_id for trial_id, _ in cut_off}
    return problems + [f"trial {key[0]} ends nowhere" for key in numbers if key[0] not in known]


def _leftovers(master: MasterForTest) -> list[str]:
    """Check the database, and that no process, token or directory is left."""
    problems = []
    if rows(master, "PRAGMA integrity_check")[0][0] != "ok" or rows(master, "PRAGMA foreign_key_check"):
        problems.append("the database is damaged")
    if rows(master, "SELECT 1 FROM tokens WHERE allocation_id IS NOT NULL"):
        problems.append("tokens of allocations are left")
    mark = f"DSTRIAL_ALLOCATION_DIR={master.state.path}".encode()
    left = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                left.append(entry.name)
    left += [path.name for path in (master.state.path / "allocations").iterdir()]
    left += [path.name for path in pathlib.Path(master.env["TMPDIR"]).glob("dstrial-*")]
    return [*problems, f"processes or directories {left} are left"] if left else problems
