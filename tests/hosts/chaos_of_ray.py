"""Cut nodes and kill the master, agents, actors and ranks under small searches of a master that asks a real Ray for nodes.

Usage: ``python tests/hosts/chaos_of_ray.py [--runs N] [--seed S]``

All runs are on one cluster of three nodes of a slot each, for its start takes longer than a run. A run's seed says what happens
and when; what is printed is what was done. The master and Ray's head are on host1, which trains, too, and is never cut; a
master that was killed is started again, and so is Ray on a node that it has given up. Afterwards every trial must be complete,
with each report stored once, the checkpoint at its end verified, no placement group in the cluster and no process of ours on
any node.
"""

from __future__ import annotations

import functools
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import seeded_runs
from chaos_of_master import NUM_BATCHES, PERIOD, WrongRunError, must, newest, problems_of, state_of, told_by
from machines import Machine
from master_on_hosts import MasterOnHosts
from ray_cluster import RayCluster, ours_on, ray_cluster, wait_until

STRIKES = (
    "cut",
    "cut and heal",
    "agent",
    "supervisor",
    "rank",
    "actor",
    "group",
    "bridge",
    "relay",
    "master",
)
_KILLED = {
    "agent": "backends.hosts.agent", "supervisor": "supervisor.py", "rank": "rank_main", "actor": "ray::NodeActor",
}  # fmt: skip
_KILLED_BESIDE_MASTER = {
    "bridge": "dstrial.ray.bridge",
    "relay": "ray/relay",
    "master": "dstrial.master.server",
}
_GROUPS = "print([one['name'] for one in ray.util.placement_group_table().values() if one['state'] != 'REMOVED'] or '')"
_REMOVE_GROUP = """
names = sorted(one['name'] for one in ray.util.placement_group_table().values() if one['state'] == 'CREATED')
name = names[int(float(sys.argv[2]) * len(names))] if names else 'nothing'
if names:
    ray.util.remove_placement_group(ray.util.get_placement_group(name))
print(name.split()[2] if names else name)
"""
_DEADLINE_S = 400.0
_TARGET_S = 60.0
_LEFT_S = 90.0
_LATE_DEATH_S = 4.0
"""So long after a cable is back Ray may still give up the node."""


def run(cluster: RayCluster, seed: int) -> tuple[list[str], float]:
    """Do one run; return what was done to it and its seconds, or raise ``WrongRunError``."""
    chance = random.Random(seed)
    planned = [chance.choice(STRIKES) for _ in range(chance.choice((1, 2, 3)))]
    slots = chance.choice((1, 1, 2))
    began_s = time.monotonic()
    told: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as text:
        master = MasterOnHosts(cluster.machines, Path(text), has_ray=True)
        cut: set[int] = set()
        try:
            must(master.up())
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
                        "pause_s": 0.05,
                        "micro_batch_size": 2,
                    },
                    "scheduling_unit": PERIOD,
                    "max_restarts": 8,
                }
            )
            for strike in planned:
                time.sleep(chance.uniform(2.0, 15.0))
                if state_of(master, experiment) != "ACTIVE":
                    break
                told.append(_strike(strike, chance, cluster, master, cut))
            while state_of(master, experiment) == "ACTIVE":
                if time.monotonic() > began_s + _DEADLINE_S:
                    raise WrongRunError(f"{told}, {slots} slots: it goes on for ever\n{told_by(master)}")
                time.sleep(0.5)
            problems = problems_of(master, experiment)
            seconds = time.monotonic() - began_s
        finally:
            down = master.down()
            _mend(cluster, cut)
        must(down)
        problems += _leftovers(cluster)
        if problems:
            raise WrongRunError(f"{told}, {slots} slots: {'; '.join(problems)}\n{told_by(master)}")
    return [f"{slots} slots", *told], seconds


def _strike(
    what: str, chance: random.Random, cluster: RayCluster, master: MasterOnHosts, cut: set[int]
) -> str:
    """Do it, and return what was done."""
    number = chance.choice((2, 3))
    host, head = cluster.machines[number], cluster.machines[1]
    if what == "group":
        return f"placement group of {cluster.ask(_REMOVE_GROUP, str(chance.random()))} removed"
    if what in _KILLED_BESIDE_MASTER:
        is_there = _kill(head, _KILLED_BESIDE_MASTER[what])
        if what == "master":
            time.sleep(1)
            must(master.up())
        return f"{what} killed" if is_there else f"no {what} there"
    if number in cut or (what == "cut" and cut):
        return f"no {what}: {', '.join(cluster.machines[one].name for one in cut)} is cut"
    if what == "cut":
        cut.add(number)
        host.cut()
        return f"{host.name} cut"
    if what == "cut and heal":
        host.cut()
        time.sleep(2)  # Ray gives a node up after three
        host.heal()
        return f"{host.name} cut and healed"
    return f"{what} killed on {host.name}" if _kill(host, _KILLED[what]) else f"no {what} on {host.name}"


def _kill(host: Machine, words: str) -> bool:
    """Kill the newest process with these words, as soon as there is any; return whether there was."""
    give_up_at_s = time.monotonic() + _TARGET_S
    while (pid := newest(host, words)) is None:
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(0.2)
    host.signal(pid, signal.SIGKILL)
    return True


def _mend(cluster: RayCluster, cut: set[int]) -> None:
    """Have Ray on all nodes again."""
    if cut:
        # Healed before that, it would go on as if nothing had been.
        wait_until(lambda: len(cluster.alive()) + len(cut) <= len(cluster.machines.all), cluster.alive)
    for number in cut:
        cluster.machines[number].heal()
    time.sleep(_LATE_DEATH_S)
    alive = cluster.alive()
    for host in cluster.machines.all:
        if host.address not in alive:
            cluster.begin_again(host)


def _leftovers(cluster: RayCluster) -> list[str]:
    give_up_at_s = time.monotonic() + _LEFT_S
    while True:
        left = {host.name: lines for host in cluster.machines.all if (lines := ours_on(host))}
        groups = "" if left else cluster.ask(_GROUPS)
        if not left and not groups:
            return []
        if time.monotonic() > give_up_at_s:
            return [f"left: {left} {groups}"]
        time.sleep(0.5)


if __name__ == "__main__":
    with ray_cluster(3, cpus=1) as made:
        sys.exit(seeded_runs.main(functools.partial(run, made), __doc__, workers=1))
