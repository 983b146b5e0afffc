"""Checks of a search after the chaos program has killed processes of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import re
import sqlite3
from collections.abc import Collection, Iterator
from typing import Any

from chaos_train import NUM_STEPS, undisturbed
from simulated_search import simulate

from dstrial.search import Searcher, Stop
from dstrial.testing.master import MasterForTest

RUNGS = {6, 12, 24}
_PRINTED = re.compile(r"run (\d+) rank (\d+) line (\d+): ")


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """An ended experiment as stored in the database.

    Attributes:
        connection: a connection to the database.
        row: the experiment's row.
        trials: the rows of its trials, oldest first.
    """

    connection: sqlite3.Connection
    row: sqlite3.Row
    trials: list[sqlite3.Row]

    @property
    def config(self) -> Any:
        return json.loads(self.row["config"])

    @property
    def is_halving(self) -> bool:
        return self.row["searcher_type"] != "random"

    def series(self, trial_id: int, group: str) -> list[tuple[int, dict[str, Any]]]:
        """Return (batches, metrics) of the reports that are not archived."""
        rows = self.connection.execute(
            "SELECT steps, metrics FROM metrics WHERE trial_id = ? AND group_name = ? AND archived = 0 "
            "ORDER BY steps, id",
            (trial_id, group),
        )
        return [(row["steps"], json.loads(row["metrics"])) for row in rows]


@contextlib.contextmanager
def opened(master: MasterForTest) -> Iterator[sqlite3.Connection]:
    """Open the master's database read-only."""
    # A writable connection would checkpoint the WAL of a killed master when it closes.
    connection = sqlite3.connect(f"file:{master.state.database_path}?mode=ro", uri=True, timeout=30)
    connection.row_factory = sqlite3.Row
    try:
        yield connection
    finally:
        connection.close()


def num_rows(master: MasterForTest, table: str) -> int:
    with opened(master) as connection:
        return int(connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def look(
    master: MasterForTest,
    connection: sqlite3.Connection,
    experiment_id: int,
    journals: pathlib.Path | None,
    cut_off: Collection[tuple[int, int]] = (),
) -> tuple[Search, list[str]]:
    """Read an ended experiment; return it and a list of its problems.

    Args:
        master: the experiment's master.
        connection: a connection to the master's database.
        experiment_id: the experiment to check.
        journals: the directory of the ranks' journals; None skips their comparison.
        cut_off: (trial id, run id) of runs whose supervisor was killed; their last printed lines may be lost.
    """
    row = connection.execute("SELECT * FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
    trials = connection.execute(
        "SELECT * FROM trials WHERE experiment_id = ? ORDER BY id", (experiment_id,)
    ).fetchall()
    search = Search(connection, row, trials)
    return search, [
        *_check_search(search),
        *_check_training(search, RUNGS if search.is_halving else {NUM_STEPS}),
        *([] if journals is None else _check_journals(search, journals, cut_off)),
        *_check_allocations(search),
        *_check_leftovers(master, connection),
    ]


def _check_search(search: Search) -> list[str]:
    """Compare a search with the undisturbed search and a replay of its validations."""
    problems = []
    if search.row["state"] != "COMPLETED":
        problems.append(f"the experiment is {search.row['state']}: {search.row['end_reason']}")
    seed = search.config["reproducibility"]["experiment_seed"]
    wanted = [trial.hparams for trial in simulate(search.config, seed, lambda *_: 0.0).trials]
    found = [json.loads(trial["hparams"]) for trial in search.trials]
    if found != wanted:
        problems.append(f"{len(found)} trials {found}; undisturbed {len(wanted)} {wanted}")
    for trial in search.trials:
        if trial["state"] != "COMPLETED":
            problems.append(f"trial {trial['id']} is {trial['state']}")
    return [*problems, *_check_replay(search)] if search.is_halving else problems


def _check_replay(search: Search) -> list[str]:
    """Compare the stored searcher with a new one that gets the stored validations."""
    searcher = Searcher.new(search.config, search.config["reproducibility"]["experiment_seed"])
    searcher.initial_trials()
    request_ids = {trial["id"]: trial["request_id"] for trial in search.trials}
    ends: dict[str, int] = {}
    for row in search.connection.execute(
        "SELECT * FROM metrics WHERE group_name = 'validation' AND trial_id IN "
        "(SELECT id FROM trials WHERE experiment_id = ?) ORDER BY id",
        (search.row["id"],),
    ):
        request_id, metrics = request_ids[row["trial_id"]], json.loads(row["metrics"])
        for action in searcher.validation_completed(request_id, metrics):
            if isinstance(action, Stop):
                ends[action.request_id] = metrics[search.config["searcher"]["time_metric"]]
    for request_id in request_ids.values():
        searcher.trial_exited(request_id)
    problems = []
    found, wanted = json.loads(search.row["searcher_snapshot"]), searcher.snapshot()
    problems += [
        f"the searcher's {name!r} is {found[name]}; told again {wanted[name]}"
        for name in wanted
        if found[name] != wanted[name]
    ]
    max_time = search.config["searcher"]["max_time"]
    if max_time not in ends.values():
        problems.append(f"no trial has reached {max_time}: {ends}")
    for trial in search.trials:
        series = search.series(trial["id"], "validation")
        length = series[-1][1][search.config["searcher"]["time_metric"]] if series else 0
        end = ends.get(trial["request_id"], 0)
        if not end or length != end:
            problems.append(f"trial {trial['id']} ends at {length}; the searcher ended it at {end}")
    return problems


def _check_training(search: Search, rungs: set[int]) -> list[str]:
    """Check that each trial reported every batch once, with undisturbed losses."""
    problems = []
    for trial in search.trials:
        name = f"trial {trial['id']}"
        series = search.series(trial["id"], "training")
        steps = [step for step, _ in series]
        if not steps or steps != list(range(1, len(steps) + 1)):
            problems.append(f"{name} has reported {steps}")
            continue
        if steps[-1] not in rungs:
            problems.append(f"{name} ends at {steps[-1]}; expected one of {sorted(rungs)}")
        losses = undisturbed(json.loads(trial["hparams"])["lr"])
        if [metrics["loss"] for _, metrics in series] != losses[: len(steps)]:
            problems.append(f"{name} has other losses than undisturbed training")
        for group, name_of_metric in (("training", "loss"), ("validation", "validation_loss")):
            values = [metrics[name_of_metric] for _, metrics in search.series(trial["id"], group)]
            row = search.connection.execute(
                "SELECT summary FROM metric_summaries WHERE trial_id = ? AND group_name = ? AND name = ?",
                (trial["id"], group, name_of_metric),
            ).fetchone()
            of = {} if row is None else json.loads(row["summary"])
            if (of.get("count"), of.get("min"), of.get("last")) != (len(values), min(values), values[-1]):
                problems.append(f"{name} has the summary {of} of {len(values)} {group} reports")
        if trial["total_batches"] != steps[-1]:
            problems.append(f"{name} has {trial['total_batches']} total batches; expected {steps[-1]}")
        problems += _check_last_checkpoint(search, trial, steps[-1], losses[steps[-1] - 1])
    return problems


def _check_last_checkpoint(search: Search, trial: sqlite3.Row, end: int, loss: float) -> list[str]:
    row = search.connection.execute(
        "SELECT * FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED' ORDER BY steps DESC, report_us DESC",
        (trial["id"],),
    ).fetchone()
    if row is None or row["steps"] != end:
        at = None if row is None else row["steps"]
        return [f"trial {trial['id']} has its last checkpoint at {at}; expected {end}"]
    storage = search.config["checkpoint_storage"]
    path = pathlib.Path(storage["host_path"], storage.get("storage_path") or "", row["uuid"], "state.json")
    if not path.exists() or json.loads(path.read_text()) != [end, loss]:
        return [f"trial {trial['id']} has a checkpoint of something else in {path}"]
    return []


def _check_journals(
    search: Search, journals: pathlib.Path, cut_off: Collection[tuple[int, int]]
) -> list[str]:
    """Compare the ranks' journals with the stored lines, reports and checkpoints."""
    problems = []
    stored = collections.Counter(
        (row["trial_id"], row["log"].removesuffix("\n"), row["rank"], row["stdtype"])
        for row in search.connection.execute("SELECT * FROM logs WHERE source = 'task'")
        if _PRINTED.match(row["log"])
    )
    problems += [f"{line} is stored {count} times" for line, count in stored.items() if count > 1]
    reported = {
        (row["trial_id"], row["run_id"], row["group_name"], row["steps"]): json.loads(row["metrics"])
        for row in search.connection.execute("SELECT * FROM metrics")
    }
    checkpoints = {
        (row["trial_id"], row["uuid"]): row["steps"]
        for row in search.connection.execute("SELECT * FROM checkpoints")
    }
    known = set()
    for path in sorted(journals.glob("*.jsonl")):
        trial_id, run_id, rank = map(int, path.stem.split("-"))
        printed: list[tuple[int, str, int, str]] = []
        for text in path.read_text().splitlines():
            kind, *fact = json.loads(text)
            if kind in ("printing", "printed"):
                line = (trial_id, fact[0], rank, "stdout" if rank == 0 else "stderr")
                known.add(line)
                if kind == "printed":
                    printed.append(line)
            elif kind == "checkpoint":
                if checkpoints.get((trial_id, fact[1])) != fact[0]:
                    problems.append(f"checkpoint {fact} of trial {trial_id} is not stored")
            else:
                metrics = reported.get((trial_id, run_id, kind, fact[0]), {})
                if metrics.get("loss" if kind == "training" else "validation_loss") != fact[1]:
                    problems.append(
                        f"{kind} {fact} of trial {trial_id}, run {run_id}, is stored as {metrics}"
                    )
        if (trial_id, run_id) in cut_off:
            printed = printed[:-1]
        problems += [f"{line} is not stored" for line in printed if line not in stored]
    problems += [f"{line} is stored, but nobody has printed it" for line in stored if line not in known]
    return problems


def _check_allocations(search: Search) -> list[str]:
    """Check that each run logged one start and one end, and that no token is left."""
    problems = []
    said: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in search.connection.execute(
        "SELECT * FROM logs WHERE source = 'master' AND allocation_id IS NOT NULL"
    ):
        said[row["allocation_id"]][row["log"]] += 1
    for row in search.connection.execute("SELECT * FROM allocations"):
        texts = said[row["id"]]
        if row["state"] != "TERMINATED":
            problems.append(f"allocation {row['id']} is {row['state']}")
        problems += [f"{row['id']} says {text!r} {count} times" for text, count in texts.items() if count > 1]
        for needed in ("Scheduling Trial", r"(?=Trial).*(was terminated: |crashed: )"):
            if sum(bool(re.match(needed, text)) for text in texts) != 1:
                problems.append(f"{row['id']} says {needed!r} not once: {sorted(texts)}")
    tokens = search.connection.execute("SELECT * FROM tokens WHERE allocation_id IS NOT NULL").fetchall()
    if tokens:
        problems.append(f"{len(tokens)} tokens of allocations are left")
    return problems


def _check_leftovers(master: MasterForTest, connection: sqlite3.Connection) -> list[str]:
    """Check the database, and that no process or directory is left."""
    problems = []
    if connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
        problems.append("the database is damaged")
    if connection.execute("PRAGMA foreign_key_check").fetchall():
        problems.append("rows of the database refer to nothing")
    mark = f"DSTRIAL_ALLOCATION_DIR={master.state.path}".encode()
    left = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                left.append(entry.name)
    if left:
        problems.append(f"processes {left} are left")
    directories = [path.name for path in (master.state.path / "allocations").iterdir()]
    directories += [path.name for path in pathlib.Path(master.env["TMPDIR"]).glob("dstrial-*")]
    if directories:
        problems.append(f"directories {directories} are left")
    return problems
