"""Preempt, cancel, cut and kill under small searches of a master that asks a real Slurm for a job for each trial.

Usage: ``python tests/hosts/chaos_of_slurm_master.py [--runs N] [--seed S] [--workers W]``

Every run has a cluster of three nodes of its own; its seed says what happens and when, what is printed is what was done. The
master and Slurm's controller are on host1, which trains, too, and is never cut; what was killed of the two is started again.
Afterwards every trial must be complete, with each report stored once, the checkpoint at its end verified, no job in the queue
and no process of ours on any node.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import seeded_runs
from chaos_of_master import NUM_BATCHES, PERIOD, WrongRunError, must, newest, problems_of, state_of, told_by
from master_on_hosts import MasterOnHosts
from slurm_cluster import SlurmCluster, slurm_cluster

STRIKES = (
    "preempt", "scancel", "scancel kill", "cut", "cut and heal", "agent", "supervisor", "rank", "master", "controller",
)  # fmt: skip
_DEADLINE_S = 400.0
_LEFT_S = 60.0


def run(seed: int) -> tuple[list[str], float]:
    """Do one run; return what was done to it and its seconds, or raise ``WrongRunError``."""
    chance = random.Random(seed)
    planned = [chance.choice(STRIKES) for _ in range(chance.choice((1, 2, 3)))]
    slots = chance.choice((1, 1, 2))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as text, slurm_cluster(3) as cluster:
        variables = {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}
        master = MasterOnHosts(cluster.machines, Path(text), slurm=variables)
        # A slot a node, so that two slots are two nodes.
        (Path(text) / "master.yaml").write_text("slurm: {sbatch_args: [--cpus-per-task=2]}\n")
        must(master.up("--config-file", "master.yaml"))
        experiment = master.create(
            {
                "resources": {"slots_per_trial": slots},
                "searcher": {
                    "name": "random",
                    "metric": "zero",
                    "max_trials": 4 if slots == 1 else 2,
                    "max_length": {"batches": NUM_BATCHES},
                },
                "hyperparameters": {
                    "zero_stage": chance.choice((1, 3)),
                    "pause_s": 0.05 * slots,  # else they are over before anything is done
                    "micro_batch_size": 2,
                },
                "scheduling_unit": PERIOD,
                "max_restarts": 8,
            }
        )
        lost: set[int] = set()
        told: list[str] = []
        for strike in planned:
            time.sleep(chance.uniform(2.0, 12.0))
            if state_of(master, experiment) != "ACTIVE":
                break
            told.append(_strike(strike, chance, cluster, master, lost))
        while state_of(master, experiment) == "ACTIVE":
            if time.monotonic() > began_s + _DEADLINE_S:
                raise WrongRunError(f"{told}, {slots} slots: it goes on for ever\n{told_by(master)}")
            time.sleep(0.5)
        problems = problems_of(master, experiment)
        must(master.down())
        problems += _leftovers(cluster, lost)
        if problems:
            raise WrongRunError(f"{told}, {slots} slots: {'; '.join(problems)}\n{told_by(master)}")
    return [f"{slots} slots", *told], time.monotonic() - began_s


def _strike(
    what: str, chance: random.Random, cluster: SlurmCluster, master: MasterOnHosts, lost: set[int]
) -> str:
    """Do it, and return what was done."""
    number = chance.choice((2, 3))
    host, head = cluster.machines[number], cluster.machines[1]
    jobs = cluster.run("squeue", "-h", "-p", "low", "-t", "running", "-o", "%i").stdout.split()
    if what == "preempt":
        tasks, seconds = 2 * chance.choice((1, 2)), chance.choice((1, 10))
        cluster.run(
            "sbatch", "-p", "high", f"--ntasks={tasks}", "--output=/dev/null", f"--wrap=sleep {seconds}"
        )
        return f"job of {tasks} tasks with a higher priority, {seconds} s"
    if what.startswith("scancel"):
        if not jobs:
            return f"no job for {what}"
        options = ["--full", "--signal=KILL"] if what == "scancel kill" else []
        cluster.run("scancel", *options, job := chance.choice(jobs))
        return f"{what} {job}"
    if what in ("master", "controller"):
        pid = head.find("dstrial.master.server" if what == "master" else "slurmctld")
        if pid is not None:
            head.signal(pid, signal.SIGKILL)
        if what == "master":
            time.sleep(1)
            must(master.up("--config-file", "master.yaml"))
        else:
            time.sleep(chance.uniform(1.0, 15.0))
            cluster.start_controller()
        return f"{what} killed" if pid is not None else f"no {what} there"
    if number in lost or (what == "cut" and lost):
        return f"no {what}: {', '.join(cluster.machines[one].name for one in lost)} is cut"
    if what == "cut":
        lost.add(number)
        host.cut()
        return f"{host.name} cut"
    if what == "cut and heal":
        host.cut()
        time.sleep(seconds := chance.choice((4, 13)))
        host.heal()
        return f"{host.name} cut for {seconds} s"
    words = {"agent": "backends.hosts.agent", "supervisor": "supervisor.py", "rank": "rank_main"}[what]
    pid = newest(host, words)
    if pid is not None:
        host.signal(pid, signal.SIGKILL)
    return f"{what} killed on {host.name}" if pid is not None else f"no {what} on {host.name}"


def _leftovers(cluster: SlurmCluster, lost: set[int]) -> list[str]:
    """Return what is left in the queue and on nodes; a node that is cut off still holds its job."""
    give_up_at_s = time.monotonic() + _LEFT_S
    while True:
        queue = cluster.run("squeue", "-h", "-p", "low", "-o", "%i %T").stdout.splitlines()
        jobs = [line for line in queue if not (lost and line.endswith("COMPLETING"))]
        left = {
            host.name: lines
            for host in cluster.machines.all
            if (lines := [words for words in host.processes().values() if "dstrial" in words])
        }
        if not jobs and not left:
            return []
        if time.monotonic() > give_up_at_s:
            return [f"left: {jobs} {left}"]
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(seeded_runs.main(run, __doc__, workers=1))
