"""Cut and kill what runs under small searches of a master over hosts, Slurm or Ray, at random moments.

Usage: ``python tests/hosts/chaos.py {hosts,slurm,ray} [--runs N] [--seed S]``

A run's seed decides what happens and when; what was done is printed. The master is on host1, which is never cut; a master or
controller that was killed is started again. Afterwards every trial must be complete, with each report stored once, the
checkpoint at its end verified, and no process or job of ours left.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machines import Machine
from master_on_hosts import MasterOnHosts
from sites import SITES, Hosts, Ray, Slurm

NUM_BATCHES, PERIOD = 60, 5
_DEADLINE_S = 400.0
_LEFT_S = 90.0
_TARGET_S = 60.0  # until a process that is to be killed exists
_IDLE = ("fork_server", "sh -c")  # parts of command lines of processes that are not the target
_TARGETS = {
    "agent": "backends.hosts.agent", "supervisor": "supervisor.py", "rank": "rank_main", "actor": "ray::NodeActor",
}  # fmt: skip
_HEAD_TARGETS = {
    "bridge": "dstrial.ray.bridge", "relay": "ray/relay", "controller": "slurmctld", "master": "dstrial.master.server",
}  # fmt: skip
_REMOVE_GROUP = """
names = sorted(one['name'] for one in ray.util.placement_group_table().values() if one['state'] == 'CREATED')
name = names[int(float(sys.argv[2]) * len(names))] if names else 'nothing'
if names:
    ray.util.remove_placement_group(ray.util.get_placement_group(name))
print(name.split()[2] if names else name)
"""


class WrongRunError(Exception):
    pass


COMMON = ("cut", "cut and heal", "agent", "supervisor", "rank", "master")
STRIKES = {
    "hosts": (*COMMON, "host", "host and back"),
    "slurm": (*COMMON, "preempt", "scancel", "scancel kill", "controller"),
    "ray": (*COMMON, "actor", "group", "bridge", "relay"),
}


def _strike(what: str, chance: random.Random, site: Hosts, master: MasterOnHosts) -> str:
    """Do it; return what was done."""
    number = chance.choice(range(2, len(site.machines.all) + 1))
    host = site.machines[number]
    if what in _HEAD_TARGETS:
        is_there = _kill(site.machines[1], _HEAD_TARGETS[what])
        time.sleep(1)
        if what == "master":
            must(master.up())
        elif what == "controller" and isinstance(site, Slurm):
            time.sleep(chance.uniform(0.0, 14.0))
            site.cluster.start_controller()
        return what if is_there else f"no {what}"
    if isinstance(site, Slurm) and what == "preempt":
        wrap = f"--wrap=sleep {chance.choice((1, 10))}"
        site.cluster.run(
            "sbatch", "-p", "high", f"--ntasks={2 * chance.choice((1, 2))}", "--output=/dev/null", wrap
        )
        return what
    if isinstance(site, Slurm) and what.startswith("scancel"):
        jobs = site.cluster.run("squeue", "-h", "-p", "low", "-t", "running", "-o", "%i").stdout.split()
        options = ["--full", "--signal=KILL"] if what == "scancel kill" else []
        if jobs:
            site.cluster.run("scancel", *options, chance.choice(jobs))
        return what if jobs else f"no job for {what}"
    if isinstance(site, Ray) and what == "group":
        return f"placement group of {site.cluster.ask(_REMOVE_GROUP, str(chance.random()))} removed"
    if number in site.cut or (what in ("cut", "host") and site.cut):
        return f"no {what}: a host is cut"
    if what == "cut":
        site.cut_off(number)
    elif what == "cut and heal":
        host.cut()
        time.sleep(2 if isinstance(site, Ray) else chance.choice((4, 13)))  # Ray gives a node up after three
        host.heal()
    elif what == "host":
        site.cut.add(number)
        host.kill()
    elif what == "host and back":
        host.kill()
        time.sleep(3)
        host.boot()
    elif not _kill(host, _TARGETS[what]):
        return f"no {what} on {host.name}"
    return f"{what} on {host.name}"


def run(name: str, seed: int) -> list[str]:
    """Do one run; return what was done to it, or raise ``WrongRunError``."""
    chance = random.Random(seed)
    slots = chance.choice((1, 1, 2))
    began_s = time.monotonic()
    done: list[str] = [f"{slots} slots"]
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as text, SITES[name]() as site:
        master = site.new_master(Path(text))
        must(master.up())
        experiment = master.create(
            {
                "resources": {"slots_per_trial": slots},
                "searcher": {
                    "name": "random", "metric": "zero", "max_trials": 4 if slots == 1 else 2,
                    "max_length": {"batches": NUM_BATCHES},
                },
                "hyperparameters": {"zero_stage": chance.choice((1, 3)), "pause_s": 0.05 * slots, "micro_batch_size": 2},
                "scheduling_unit": PERIOD,
                "max_restarts": 8,
            }
        )  # fmt: skip
        for strike in [chance.choice(STRIKES[name]) for _ in range(chance.choice((1, 2, 3)))]:
            time.sleep(chance.uniform(2.0, 14.0))
            if _state(master, experiment) != "ACTIVE":
                break
            done.append(_strike(strike, chance, site, master))
        while _state(master, experiment) == "ACTIVE" and time.monotonic() < began_s + _DEADLINE_S:
            time.sleep(0.5)
        problems = _problems(master, experiment)
        must(master.down())
        if name == "ray":
            site.heal()
        give_up_at_s = time.monotonic() + _LEFT_S
        while (left := site.left()) and time.monotonic() < give_up_at_s:
            time.sleep(0.5)
        if problems or left:
            lines = [str(row["log"]).rstrip() for row in _rows(master, "SELECT log FROM logs ORDER BY id")]
            log = [line for line in lines if " loss " not in line and not line.startswith("report_")][-60:]
            log += master.master_log().splitlines()[-40:]
            raise WrongRunError("\n".join([f"{done}: {problems}, left: {left}", *log]))
    return done


def must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise WrongRunError(done.stdout)


def _kill(host: Machine, words: str) -> bool:
    """Kill the newest process with these words once there is one; return whether there was."""
    give_up_at_s = time.monotonic() + _TARGET_S
    while time.monotonic() < give_up_at_s:
        found = [
            pid
            for pid, line in host.processes().items()
            if words in line and not any(one in line for one in _IDLE)
        ]
        if found:
            host.signal(max(found), signal.SIGKILL)
            return True
        time.sleep(0.2)
    return False


def _state(master: MasterOnHosts, experiment: int) -> str:
    state = str(_rows(master, "SELECT state FROM experiments WHERE id = ?", experiment)[0]["state"])
    return "ACTIVE" if state == "STOPPING_COMPLETED" else state


def _rows(master: MasterOnHosts, query: str, *parameters: object) -> list[sqlite3.Row]:
    path = master.place / "state" / "master.db"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute(query, parameters).fetchall()


def _problems(master: MasterOnHosts, experiment: int) -> list[str]:
    """Return what is wrong with an experiment that has ended."""
    found = []
    if (state := _state(master, experiment)) != "COMPLETED":
        found.append(f"the experiment is {state}")
    for trial in _rows(master, "SELECT * FROM trials WHERE experiment_id = ? ORDER BY id", experiment):
        if trial["state"] != "COMPLETED":
            found.append(f"trial {trial['id']} is {trial['state']}")
        reports = "SELECT steps FROM metrics WHERE trial_id = ? AND group_name = 'training' AND archived = 0 ORDER BY id"
        steps = [row["steps"] for row in _rows(master, reports, trial["id"])]
        if steps != list(range(PERIOD, NUM_BATCHES + 1, PERIOD)):
            found.append(f"trial {trial['id']} reported at {steps}")
        saved = "SELECT uuid, steps FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED' ORDER BY steps DESC"
        last = _rows(master, saved, trial["id"])
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", choices=STRIKES)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_right = 0
    for seed in range(args.seed, args.seed + args.runs):
        began_s = time.monotonic()
        try:
            outcome = f"right ({', '.join(run(args.site, seed))})"
            num_right += 1
        except Exception as error:  # noqa: BLE001  # reported, and the other runs follow
            outcome = f"WRONG: {type(error).__name__}: {error}"
        print(f"seed {seed}: {outcome}, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{num_right} of {args.runs} runs ended right")
    return int(num_right != args.runs)


if __name__ == "__main__":
    sys.exit(main())
