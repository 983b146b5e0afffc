"""What happens under a master that asks somebody for nodes: the table, and the scenarios that are the same whoever is asked.

``master_over_ray.py`` and ``master_over_slurm.py`` have the others, and the clusters.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import json
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from machines import Machines
from master_on_hosts import CONFIG, MasterOnHosts

_LIMIT_S = 180.0
_POLL_S = 0.02
_SLOW_S = 0.2
_RECORDS = 12  # of a batch, by `small_trial.py`
_ENDED = ("COMPLETED", "CANCELED", "ERROR")
_REPORTS = (
    "SELECT 1 FROM metrics WHERE trial_id = ? AND group_name = 'training' AND steps >= ? AND archived = 0"
)
RESUMED = "resumed from checkpoint"
"""What a trial's log says when it goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What one scenario came to.

    Attributes:
        seconds: from what was done to what is named, in the order of the table.
        line: of the log, or of the command that was refused.
    """

    what: str
    seconds: Mapping[str, float]
    line: str
    outcome: str


class Stage(abc.ABC):
    """A cluster with a master that runs.

    Args:
        machines: with the master on the first.
        master: asks for them.
        node: a pattern of the nodes' names, as a trial's log has them.
    """

    def __init__(self, machines: Machines, master: MasterOnHosts, node: str) -> None:
        self.machines, self.master, self._node = machines, master, node

    @abc.abstractmethod
    def left(self) -> Sequence[str]:
        """Return what of a trial is still on nodes."""

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return what the master's database has."""
        path = self.master.place / "state" / "master.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query, parameters).fetchall()

    def wait(self, is_so: Callable[[], bool], what: str, trial: int | None = None) -> None:
        """Wait until something is so; a trial's log tells why it is not."""
        give_up_at_s = time.monotonic() + _LIMIT_S
        while not is_so():
            if time.monotonic() > give_up_at_s:
                lines = [] if trial is None else self.log(trial)[-40:]
                text = "\n".join([*lines, self.master.master_log()])
                raise SystemExit(f"not within {_LIMIT_S:g} s: {what}\n{text}")
            time.sleep(_POLL_S)

    def create(self, num_batches: int, num_slots: int = 1, pause_s: float = _SLOW_S, **changes: Any) -> int:
        """Submit an experiment of one trial that reports every batch; return the trial's id.

        Args:
            num_batches: to train.
            num_slots: that share a batch.
            pause_s: of a batch, so that something can happen in its middle.
            changes: of the config.
        """
        searcher = {**CONFIG["searcher"], "max_length": {"batches": num_batches}}
        sizes = {"pause_s": pause_s, "micro_batch_size": _RECORDS // num_slots}
        config = {
            "scheduling_unit": 1,
            "searcher": searcher,
            "resources": {"slots_per_trial": num_slots},
            "hyperparameters": {**CONFIG["hyperparameters"], **sizes},
            **changes,
        }
        experiment = self.master.create(config)
        query = "SELECT id FROM trials WHERE experiment_id = ?"
        self.wait(lambda: bool(self.rows(query, experiment)), "a trial")
        return int(self.rows(query, experiment)[0][0])

    def experiment_of(self, trial: int) -> str:
        """Return the id of a trial's experiment, as ``det`` takes it."""
        return str(self.rows("SELECT experiment_id FROM trials WHERE id = ?", trial)[0][0])

    def wait_for_batch(self, trial: int, batch: int) -> None:
        """Wait until a trial has reported a batch."""
        self.wait(lambda: bool(self.rows(_REPORTS, trial, batch)), f"batch {batch}", trial)

    def batches(self, trial: int) -> list[int]:
        """Return the batches that count, in the order of their reports."""
        query = "SELECT steps FROM metrics WHERE trial_id = ? AND group_name = 'training' AND archived = 0 ORDER BY id"
        return [int(row[0]) for row in self.rows(query, trial)]

    def log(self, trial: int) -> list[str]:
        """Return the lines of a trial's log."""
        query = "SELECT log FROM logs WHERE trial_id = ? ORDER BY id"
        return [str(row[0]).rstrip() for row in self.rows(query, trial)]

    def wait_for_line(self, trial: int, pattern: str, num: int = 1) -> str:
        """Wait until so many lines of a trial's log have something; return the last of them."""

        def found() -> list[str]:
            return [line for line in self.log(trial) if re.search(pattern, line)]

        self.wait(lambda: len(found()) >= num, pattern, trial)
        return found()[num - 1]

    def nodes_of(self, trial: int) -> list[str]:
        """Return the nodes on which a trial runs, as its log names them."""
        line = next(line for line in reversed(self.log(trial)) if " on agent " in line)
        return re.findall(self._node, line.partition(" on agent ")[2])

    def num_begun(self, trial: int) -> int:
        """Return how often a trial's ranks have been started."""
        return len([line for line in self.log(trial) if "Scheduling Trial" in line])

    def state_of(self, trial: int) -> str:
        """Return a trial's state."""
        return str(self.rows("SELECT state FROM trials WHERE id = ?", trial)[0][0])

    def wait_for_end(self, trial: int, num_batches: int) -> str:
        """Wait until a trial has ended; say how."""
        self.wait(lambda: self.state_of(trial) in _ENDED, "the end of a trial", trial)
        (restarts,) = self.rows("SELECT restarts FROM trials WHERE id = ?", trial)[0]
        text = f"{self.state_of(trial)}, {counted(self.batches(trial), num_batches)}, {restarts} restarts"
        resumed = [line for line in self.log(trial) if RESUMED in line]
        return text + (f", {len(resumed)} times from a checkpoint" if resumed else "")

    def wait_for_nothing_left(self) -> None:
        """Wait until nothing of ours runs for a trial."""
        self.wait(lambda: not self.left(), "the end of all that ran on the nodes")


StageT = TypeVar("StageT", bound=Stage)


def since(began_s: float) -> float:
    """Return the seconds since a time of ``time.monotonic``."""
    return time.monotonic() - began_s


def counted(batches: Sequence[int], num_batches: int) -> str:
    """Say whether each of so many batches is among the reports once, in order."""
    is_right = list(batches) == list(range(1, num_batches + 1))
    return "each batch counts once" if is_right else f"reported {list(batches)}"


def submit(stage: Stage) -> Row:
    """Submit three experiments, one after the other."""
    seconds = {}
    for name in ("first batch, nothing warm", "again", "and again"):
        began_s = time.monotonic()
        trial = stage.create(5, pause_s=0.0)
        stage.wait_for_batch(trial, 1)
        seconds[name] = since(began_s)
        outcome = stage.wait_for_end(trial, 5)
    return Row("`det experiment create`", seconds, stage.wait_for_line(trial, " on agent "), outcome)


def refused(stage: Stage, what: str, changes: Mapping[str, Any]) -> Row:
    """Submit what can never run."""
    words = stage.master.write(changes)
    before = stage.rows("SELECT count(*) FROM experiments")
    began_s = time.monotonic()
    done = stage.master.command("det", "experiment", "create", *words)
    seconds = {"refused": since(began_s)}
    is_made = stage.rows("SELECT count(*) FROM experiments") != before
    outcome = f"exit code {done.returncode}, {'an' if is_made else 'no'} experiment is made"
    return Row(what, seconds, done.stdout.strip().splitlines()[-1], outcome)


def pause(stage: Stage) -> Row:
    """Pause an experiment and activate it."""
    trial = stage.create(60)
    stage.wait_for_batch(trial, 15)
    experiment = stage.experiment_of(trial)
    began_s = time.monotonic()
    stage.master.det("experiment", "pause", experiment)
    stage.wait_for_nothing_left()
    stage.wait(
        lambda: not stage.rows("SELECT 1 FROM allocations WHERE state != 'TERMINATED'"),
        "the end of the allocation",
    )
    seconds = {"saved, and its node given back": since(began_s)}
    at = len(stage.batches(trial))
    began_s = time.monotonic()
    stage.master.det("experiment", "activate", experiment)
    stage.wait_for_batch(trial, at + 1)
    seconds["next batch after `activate`"] = since(began_s)
    outcome = stage.wait_for_end(trial, 60)
    return Row("`det experiment pause`, `activate`", seconds, stage.wait_for_line(trial, RESUMED), outcome)


def kill_trial(stage: Stage) -> Row:
    """Kill a trial."""
    trial = stage.create(400)
    stage.wait_for_batch(trial, 15)
    began_s = time.monotonic()
    stage.master.det("trial", "kill", str(trial))
    stage.wait(lambda: stage.state_of(trial) == "CANCELED", "the end of a trial", trial)
    seconds = {"CANCELED": since(began_s)}
    stage.wait_for_nothing_left()
    seconds["nothing of it is left"] = since(began_s)
    return Row("`det trial kill`", seconds, stage.wait_for_line(trial, "kill|Kill"), stage.state_of(trial))


def disable(stage: Stage) -> Row:
    """Disable the node of a trial."""
    trial = stage.create(80)
    stage.wait_for_batch(trial, 15)
    (node,) = stage.nodes_of(trial)
    began_s = time.monotonic()
    stage.master.det("agent", "disable", node)
    stage.wait_for_line(trial, " on agent ", 2)
    seconds = {"begins elsewhere": since(began_s)}
    outcome = stage.wait_for_end(trial, 80)
    where = ", ".join(stage.nodes_of(trial))
    stage.master.det("agent", "enable", node)
    line = stage.wait_for_line(trial, "disabled|terminating")
    return Row(f"`det agent disable` of its node ({node}, then {where})", seconds, line, outcome)


def kill_master(
    stage: Stage, trial: int, num_batches: int, then: Callable[[float], Mapping[str, float]]
) -> Row:
    """Kill the master under a trial and start it again.

    Args:
        stage: where.
        trial: runs or is about to.
        num_batches: of the trial.
        then: waits until what has to end with the master has ended; is told when it was killed.
    """
    stage.wait_for_batch(trial, 15)
    head = stage.machines[1]
    pid = head.find("dstrial.master.server")
    assert pid is not None
    began_s = time.monotonic()
    head.signal(pid, signal.SIGKILL)
    seconds = dict(then(began_s))
    at = len(stage.batches(trial))
    begun_s = time.monotonic()
    said = stage.master.up()
    assert said.returncode == 0, said.stdout
    seconds["`dstrial up` again"] = since(begun_s)
    stage.wait_for_batch(trial, at + 1)
    seconds["next report, from that"] = since(begun_s)
    outcome = f"{stage.wait_for_end(trial, num_batches)}, begun {stage.num_begun(trial)} time(s)"
    return Row("the master is killed, and started again", seconds, "", outcome)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what happens | seconds | what is said of it | outcome |", "|---|---|---|---|"]
    for row in rows:
        seconds = "; ".join(f"{name} {value:.1f}" for name, value in row.seconds.items())
        line = row.line.strip().replace("|", "/") or "-"
        lines.append(f"| {row.what} | {seconds} | {line} | {row.outcome} |")
    return "\n".join(lines)


def begin(master: MasterOnHosts, what: str) -> None:
    """Start a master, and print how long that took."""
    began_s = time.monotonic()
    said = master.up()
    assert said.returncode == 0, said.stdout
    print(f"{what}: {since(began_s):.1f} s", flush=True)


def measure(
    doc: str | None,
    lacking: Callable[[], str],
    stage: Callable[[], contextlib.AbstractContextManager[StageT]],
    scenarios: Mapping[str, Callable[[StageT], Row]],
) -> None:
    """Measure what the command line names, in the order of the scenarios, and print the table.

    Args:
        doc: of the program.
        lacking: says what this machine lacks for it.
        stage: gives the cluster with its master for a block.
        scenarios: by their names.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="+", choices=scenarios, default=list(scenarios))
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    if absent := lacking():
        parser.exit(2, f"Requires: {absent}\n")
    rows = []
    with stage() as made:
        for name, scenario in scenarios.items():
            if name in args.scenario:
                rows.append(scenario(made))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=2))
    print(f"\n{table(rows)}")
