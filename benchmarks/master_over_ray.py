"""What happens under a master that asks Ray for nodes: how long it takes, what the log says of it, and how it ends.

A real Ray over namespaces (``tests/hosts/ray_cluster.py``): three nodes of one slot each, the master and Ray's head on the
first, which gives a node up after three seconds. Every scenario has an experiment of its own under one master; the nodes that it
has taken from the cluster are there again for the next.

``python benchmarks/master_over_ray.py [--scenario submit cut …] [--json FILE]``; needs root, sshd and the extra ``ray``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from master_on_hosts import CONFIG, MasterOnHosts
from ray_cluster import RayCluster, missing, ours_on, ray_cluster

_LIMIT_S = 180.0
_POLL_S = 0.02
_SLOW_S = 0.1
_REPORTS = (
    "SELECT 1 FROM metrics WHERE trial_id = ? AND group_name = 'training' AND steps >= ? AND archived = 0"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What one scenario came to.

    Attributes:
        seconds: from what was done to what is named, in the order of the table.
        line: of the trial's log, or of the command that was refused.
    """

    what: str
    seconds: Mapping[str, float]
    line: str
    outcome: str


class Stage:
    """A cluster with a master that runs."""

    def __init__(self, cluster: RayCluster, master: MasterOnHosts) -> None:
        self.cluster, self.master = cluster, master

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return what the master's database has."""
        path = self.master.place / "state" / "master.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query, parameters).fetchall()

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until something is so."""
        give_up_at_s = time.monotonic() + _LIMIT_S
        while not is_so():
            if time.monotonic() > give_up_at_s:
                raise SystemExit(f"not within {_LIMIT_S:g} s: {what}\n{self.master.master_log()}")
            time.sleep(_POLL_S)

    def create(self, num_batches: int, **changes: Any) -> int:
        """Submit an experiment of one trial that reports every batch; return the trial's id."""
        searcher = {**CONFIG["searcher"], "max_length": {"batches": num_batches}}
        hparams = {**CONFIG["hyperparameters"], "pause_s": _SLOW_S}
        config = {"scheduling_unit": 1, "searcher": searcher, "hyperparameters": hparams, **changes}
        experiment = self.master.create(config)
        query = "SELECT id FROM trials WHERE experiment_id = ?"
        self.wait(lambda: bool(self.rows(query, experiment)), "a trial")
        return int(self.rows(query, experiment)[0][0])

    def experiment_of(self, trial: int) -> str:
        """Return the id of a trial's experiment, as ``det`` takes it."""
        return str(self.rows("SELECT experiment_id FROM trials WHERE id = ?", trial)[0][0])

    def wait_for_batch(self, trial: int, batch: int) -> None:
        """Wait until a trial has reported a batch."""
        self.wait(lambda: bool(self.rows(_REPORTS, trial, batch)), f"batch {batch} of trial {trial}")

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

        self.wait(lambda: len(found()) >= num, f"{pattern} in\n" + "\n".join(self.log(trial)[-20:]))
        return found()[num - 1]

    def nodes_of(self, trial: int) -> list[str]:
        """Return the nodes on which a trial runs, as its log names them."""
        line = next(line for line in reversed(self.log(trial)) if " on agent " in line)
        return re.findall(r"10\.77\.0\.1\d", line)

    def wait_for_end(self, trial: int, num_batches: int) -> str:
        """Wait until a trial has ended; say how."""
        query = "SELECT state, restarts FROM trials WHERE id = ?"
        over = ("COMPLETED", "CANCELED", "ERROR")
        self.wait(lambda: self.rows(query, trial)[0][0] in over, f"the end of trial {trial}")
        state, restarts = self.rows(query, trial)[0]
        batches = self.batches(trial)
        once = (
            "each batch counts once" if batches == list(range(1, num_batches + 1)) else f"reported {batches}"
        )
        text = f"{state}, {once}, {restarts} restarts"
        begun = [line for line in self.log(trial) if "resumed from checkpoint" in line]
        return text + (f", {len(begun)} times from a checkpoint" if begun else "")

    def wait_for_nothing_left(self) -> None:
        """Wait until nothing of ours runs on the nodes that the master is not on."""
        hosts = self.cluster.machines.all[1:]
        self.wait(lambda: not any(ours_on(host) for host in hosts), "the end of all that ran on the nodes")


def _since(began_s: float) -> float:
    return time.monotonic() - began_s


def _submit(stage: Stage) -> Row:
    seconds = {}
    for name in ("first batch, nothing warm", "again", "and again"):
        began_s = time.monotonic()
        trial = stage.create(5, hyperparameters={**CONFIG["hyperparameters"], "pause_s": 0.0})
        stage.wait_for_batch(trial, 1)
        seconds[name] = _since(began_s)
        outcome = stage.wait_for_end(trial, 5)
    return Row("`det experiment create`", seconds, stage.wait_for_line(trial, " on agent "), outcome)


def _never_fits(stage: Stage) -> Row:
    words = stage.master.write({"resources": {"slots_per_trial": 4}})
    before = stage.rows("SELECT count(*) FROM experiments")
    began_s = time.monotonic()
    done = stage.master.command("det", "experiment", "create", *words)
    seconds = {"refused": _since(began_s)}
    is_made = stage.rows("SELECT count(*) FROM experiments") != before
    outcome = f"exit code {done.returncode}, {'an' if is_made else 'no'} experiment is made"
    return Row("4 slots of a cluster that has 3", seconds, done.stdout.strip().splitlines()[-1], outcome)


def _waits(stage: Stage) -> Row:
    first = stage.create(60, resources={"slots_per_trial": 3}, hyperparameters=_two_at_once())
    stage.wait_for_batch(first, 1)
    began_s = time.monotonic()
    second = stage.create(5)
    line = stage.wait_for_line(second, r"pending \(asks")
    seconds = {"said why": _since(began_s)}
    stage.wait_for_end(first, 60)
    began_s = time.monotonic()
    stage.wait_for_batch(second, 1)
    return Row(
        "all nodes are taken",
        {**seconds, "first batch after the other's end": _since(began_s)},
        line,
        stage.wait_for_end(second, 5),
    )


def _cut(stage: Stage) -> Row:
    trial = stage.create(80, resources={"slots_per_trial": 2}, hyperparameters=_two_at_once())
    stage.wait_for_batch(trial, 15)
    node = next(one for one in stage.nodes_of(trial) if one != stage.cluster.machines[1].address)
    host = next(one for one in stage.cluster.machines.all if one.address == node)
    began_s = time.monotonic()
    host.cut()
    try:
        line = stage.wait_for_line(trial, rf"{re.escape(node)}.*(is dead|is gone|gone:)")
        seconds = {"the loss is said": _since(began_s)}
        stage.wait_for_line(trial, "resumed from checkpoint")
        resumed_s = _since(began_s)
        outcome = stage.wait_for_end(trial, 80)
        stage.wait(lambda: not ours_on(host), f"the end of what ran on {node}")
    finally:
        stage.wait(lambda: node not in stage.cluster.alive(), f"Ray to give up {node}")
        host.heal()
        stage.cluster.begin_again(host)
    return Row(
        "the cable of one of its two nodes is cut", {**seconds, "resumed elsewhere": resumed_s}, line, outcome
    )


def _kill_master(stage: Stage) -> Row:
    trial = stage.create(120, resources={"slots_per_trial": 2}, hyperparameters=_two_at_once())
    stage.wait_for_batch(trial, 15)
    head = stage.cluster.machines[1]
    pid = head.find("dstrial.master.server")
    assert pid is not None
    began_s = time.monotonic()
    head.signal(pid, signal.SIGKILL)
    stage.wait(lambda: head.find("dstrial.ray.bridge") is None, "the end of the bridge")
    seconds = {"its bridge has ended": _since(began_s)}
    at = len(stage.batches(trial))
    begun_s = time.monotonic()
    said = stage.master.up()
    assert said.returncode == 0, said.stdout
    seconds["`dstrial up` again"] = _since(begun_s)
    stage.wait_for_batch(trial, at + 1)
    seconds["next report, from that"] = _since(begun_s)
    outcome = stage.wait_for_end(trial, 120)
    num_begun = len([line for line in stage.log(trial) if "Scheduling Trial" in line])
    return Row(
        "the master is killed, and started again",
        seconds,
        "",
        f"{outcome}, begun {num_begun} time(s)",
    )


def _pause(stage: Stage) -> Row:
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
    seconds = {"saved, and its node given back": _since(began_s)}
    at = len(stage.batches(trial))
    began_s = time.monotonic()
    stage.master.det("experiment", "activate", experiment)
    stage.wait_for_batch(trial, at + 1)
    seconds["next batch after `activate`"] = _since(began_s)
    outcome = stage.wait_for_end(trial, 60)
    return Row(
        "`det experiment pause`, `activate`",
        seconds,
        stage.wait_for_line(trial, "resumed from checkpoint"),
        outcome,
    )


def _kill_trial(stage: Stage) -> Row:
    trial = stage.create(400)
    stage.wait_for_batch(trial, 15)
    began_s = time.monotonic()
    stage.master.det("trial", "kill", str(trial))
    query = "SELECT state FROM trials WHERE id = ?"
    stage.wait(lambda: stage.rows(query, trial)[0][0] == "CANCELED", f"the end of trial {trial}")
    seconds = {"CANCELED": _since(began_s)}
    stage.wait_for_nothing_left()
    seconds["nothing of it is left"] = _since(began_s)
    line = stage.wait_for_line(trial, "kill|Kill")
    return Row("`det trial kill`", seconds, line, str(stage.rows(query, trial)[0][0]))


def _disable(stage: Stage) -> Row:
    trial = stage.create(80)
    stage.wait_for_batch(trial, 15)
    (node,) = stage.nodes_of(trial)
    began_s = time.monotonic()
    stage.master.det("agent", "disable", node)
    stage.wait_for_line(trial, " on agent ", 2)
    seconds = {"begins elsewhere": _since(began_s)}
    outcome = stage.wait_for_end(trial, 80)
    where = ", ".join(stage.nodes_of(trial))
    stage.master.det("agent", "enable", node)
    line = stage.wait_for_line(trial, "disabled|terminating")
    return Row(f"`det agent disable` of its node ({node}, then {where})", seconds, line, outcome)


def _drain(stage: Stage) -> Row:
    trial = stage.create(
        80,
        resources={"slots_per_trial": 2},
        hyperparameters=_two_at_once(),
        min_checkpoint_period={"batches": 1000},
    )
    stage.wait_for_batch(trial, 15)
    node = next(one for one in stage.nodes_of(trial) if one != stage.cluster.machines[1].address)
    began_s = time.monotonic()
    stage.cluster.drain(node)
    line = stage.wait_for_line(trial, "gracefully terminating allocation")
    seconds = {"asked to save": _since(began_s)}
    stage.wait_for_line(trial, "resumed from checkpoint")
    seconds["resumed elsewhere"] = _since(began_s)
    return Row("`ray drain-node` of one of its two nodes", seconds, line, stage.wait_for_end(trial, 80))


def _two_at_once() -> dict[str, Any]:
    return {**CONFIG["hyperparameters"], "pause_s": _SLOW_S, "micro_batch_size": 2}


SCENARIOS: dict[str, Callable[[Stage], Row]] = {
    "submit": _submit,
    "never fits": _never_fits,
    "waits": _waits,
    "pause": _pause,
    "kill": _kill_trial,
    "disable": _disable,
    "master": _kill_master,
    "cut": _cut,
    "drain": _drain,  # the last: the node takes nothing more
}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what happens | seconds | what is said of it | outcome |", "|---|---|---|---|"]
    for row in rows:
        seconds = "; ".join(f"{name} {value:.1f}" for name, value in row.seconds.items())
        lines.append(
            f"| {row.what} | {seconds} | {row.line.strip().replace('|', '/') or '-'} | {row.outcome} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what the command line names, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    if lacking := missing():
        parser.exit(2, f"Requires: {lacking}\n")
    rows = []
    with (
        ray_cluster(3, cpus=1) as cluster,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory,
    ):
        master = MasterOnHosts(cluster.machines, Path(directory), has_ray=True)
        began_s = time.monotonic()
        said = master.up()
        assert said.returncode == 0, said.stdout
        print(f"dstrial up --backend ray: {_since(began_s):.1f} s", flush=True)
        for name in SCENARIOS:
            if name in args.scenario:
                rows.append(SCENARIOS[name](Stage(cluster, master)))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        master.down("--now")
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=2))
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
