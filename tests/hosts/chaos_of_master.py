"""Cut cables and kill hosts, agents, supervisors, ranks and the master at random moments of small searches over three hosts.

Usage: ``python tests/hosts/chaos_of_master.py [--runs N] [--seed S] [--workers W]``

Every run has machines of its own; its seed says what happens and when. The master is on host1, trials of one or two ranks on
host2 to host4; a master that was killed is started again. Afterwards every trial must be complete, with every report stored
once, the checkpoint at its end verified, and no process of it on any host.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import seeded_runs
from machines import Machine, Machines, machines
from master_on_hosts import MasterOnHosts, left_on

STRIKES = ("cut", "cut and heal", "host", "host and back", "agent", "supervisor", "rank", "master")
NUM_BATCHES, PERIOD = 60, 5
_DEADLINE_S = 300.0
_LEFT_S = 30.0
NEVER_MIND = ("fork_server", "sh -c")


class WrongRunError(Exception):
    pass


def run(seed: int) -> tuple[list[str], float]:
    """Do one run; return what was done to it and its seconds, or raise ``WrongRunError``."""
    chance = random.Random(seed)
    planned = [chance.choice(STRIKES) for _ in range(chance.choice((1, 2, 3)))]
    slots = chance.choice((1, 1, 2))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as text, machines(4) as made:
        master = MasterOnHosts(made, Path(text))
        must(master.up())
        searcher = {
            "name": "random",
            "metric": "zero",
            "max_trials": 4 if slots == 1 else 2,
            "max_length": {"batches": NUM_BATCHES},
        }
        hparams = {"zero_stage": chance.choice((1, 3)), "pause_s": 0.06, "micro_batch_size": 2}
        experiment = master.create(
            {
                "resources": {"slots_per_trial": slots},
                "searcher": searcher,
                "hyperparameters": hparams,
                "scheduling_unit": PERIOD,
                "max_restarts": 8,
            }
        )
        lost: set[int] = set()
        for strike in planned:
            time.sleep(chance.uniform(2.0, 14.0))
            if state_of(master, experiment) != "ACTIVE":
                break
            _strike(strike, chance.choice((2, 3, 4)), made, master, lost)
        while state_of(master, experiment) == "ACTIVE":
            if time.monotonic() > began_s + _DEADLINE_S:
                raise WrongRunError(f"{planned}, {slots} slots: it goes on for ever\n{told_by(master)}")
            time.sleep(0.5)
        problems = problems_of(master, experiment)
        problems += _leftovers([one for one in made.all[1:] if one.is_up and int(one.name[4:]) not in lost])
        if problems:
            raise WrongRunError(f"{planned}, {slots} slots: {'; '.join(problems)}\n{told_by(master)}")
        must(master.down())
    return planned, time.monotonic() - began_s


def must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise WrongRunError(done.stdout)


def _strike(what: str, number: int, made: Machines, master: MasterOnHosts, lost: set[int]) -> None:
    host = made[number]
    if what == "master":
        pid = made[1].find("dstrial.master.server")
        if pid is not None:
            made[1].signal(pid, signal.SIGKILL)
        time.sleep(1)
        must(master.up())
    elif number in lost:
        return
    elif what in ("cut", "host"):
        if not lost:
            lost.add(number)
            (host.cut if what == "cut" else host.kill)()
    elif what == "cut and heal":
        host.cut()
        time.sleep(4 if number % 2 else 13)
        host.heal()
    elif what == "host and back":
        host.kill()
        time.sleep(3)
        host.boot()
    else:
        words = {"agent": "backends.hosts.agent", "supervisor": "supervisor.py", "rank": "rank_main"}[what]
        pid = newest(host, words)
        if pid is not None:
            host.signal(pid, signal.SIGKILL)


def newest(host: Machine, words: str) -> int | None:
    """Return the process with these words that began last."""
    found = [
        pid
        for pid, line in host.processes().items()
        if words in line and not any(one in line for one in NEVER_MIND)
    ]
    return max(found, default=None)


def state_of(master: MasterOnHosts, experiment: int) -> str:
    row = _rows(master, "SELECT state FROM experiments WHERE id = ?", experiment)[0]
    return "ACTIVE" if row["state"] in ("ACTIVE", "STOPPING_COMPLETED") else str(row["state"])


def _rows(master: MasterOnHosts, query: str, *parameters: object) -> list[sqlite3.Row]:
    path = master.place / "state" / "master.db"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute(query, parameters).fetchall()


def told_by(master: MasterOnHosts) -> str:
    """Return the end of all logs, and of the master's own."""
    lines = [str(row["log"]).rstrip() for row in _rows(master, "SELECT log FROM logs ORDER BY id")]
    told = [line for line in lines if " loss " not in line and not line.startswith("report_")]
    return "\n".join([*told[-60:], *master.master_log().splitlines()[-40:]])


def problems_of(master: MasterOnHosts, experiment: int) -> list[str]:
    """Return what is wrong with an experiment that has ended."""
    found = []
    state = state_of(master, experiment)
    if state != "COMPLETED":
        found.append(f"the experiment is {state}")
    for trial in _rows(master, "SELECT * FROM trials WHERE experiment_id = ? ORDER BY id", experiment):
        if trial["state"] != "COMPLETED":
            found.append(f"trial {trial['id']} is {trial['state']}")
        rows = _rows(
            master,
            "SELECT steps FROM metrics WHERE trial_id = ? AND group_name = 'training' AND archived = 0 ORDER BY id",
            trial["id"],
        )
        steps = [row["steps"] for row in rows]
        if steps != list(range(PERIOD, NUM_BATCHES + 1, PERIOD)):
            found.append(f"trial {trial['id']} reported at {steps}")
        last = _rows(
            master,
            "SELECT uuid, steps FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED' ORDER BY steps DESC",
            trial["id"],
        )
        if not last or last[0]["steps"] != NUM_BATCHES:
            found.append(f"trial {trial['id']} has no checkpoint at its end")
            continue
        path = master.place / "state" / "checkpoints" / last[0]["uuid"]
        words = [sys.executable, "-m", "dstrial.cli", "checkpoint", "verify", str(path)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            found.append(f"{path.name} does not verify")
    if _rows(master, "SELECT 1 FROM allocations WHERE state != 'TERMINATED'"):
        found.append("an allocation has not ended")
    return found


def _leftovers(hosts: list[Machine]) -> list[str]:
    give_up_at_s = time.monotonic() + _LEFT_S
    while True:
        left = {
            host.name: lines
            for host in hosts
            if (lines := [one for one in left_on(host).values() if not any(w in one for w in NEVER_MIND)])
        }
        if not left:
            return []
        if time.monotonic() > give_up_at_s:
            return [f"left: {left}"]
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(seeded_runs.main(run, __doc__))
