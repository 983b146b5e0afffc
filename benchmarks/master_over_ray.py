"""What happens under a master that asks Ray for nodes: how long it takes, what the log says of it, and how it ends.

A real Ray over namespaces (``tests/hosts/ray_cluster.py``): three nodes of one slot each, the master and Ray's head on the
first, which gives a node up after three seconds. Every scenario has an experiment of its own under one master; the nodes that it
has taken from the cluster are there again for the next.

``python benchmarks/master_over_ray.py [--scenario submit cut …] [--json FILE]``; needs root, sshd and the extra ``ray``.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

import master_scenarios
from master_on_hosts import MasterOnHosts
from master_scenarios import RESUMED, Row, Stage, since
from ray_cluster import RayCluster, missing, ours_on, ray_cluster


class RayStage(Stage):
    """The cluster is Ray's."""

    def __init__(self, cluster: RayCluster, master: MasterOnHosts) -> None:
        super().__init__(cluster.machines, master, r"10\.77\.0\.1\d")
        self.cluster = cluster

    def left(self) -> Sequence[str]:
        """Return what of ours is on the nodes that the master is not on."""
        return [line for host in self.machines.all[1:] for line in ours_on(host)]

    def far_node_of(self, trial: int) -> str:
        """Return the node of a trial that the master is not on."""
        return next(one for one in self.nodes_of(trial) if one != self.machines[1].address)


def _never_fits(stage: RayStage) -> Row:
    changes = {"resources": {"slots_per_trial": 4}}
    return master_scenarios.refused(stage, "4 slots of a cluster that has 3", changes)


def _waits(stage: RayStage) -> Row:
    first = stage.create(60, 3)
    stage.wait_for_batch(first, 1)
    began_s = time.monotonic()
    second = stage.create(5)
    line = stage.wait_for_line(second, r"pending \(asks")
    seconds = {"said why": since(began_s)}
    stage.wait_for_end(first, 60)
    began_s = time.monotonic()
    stage.wait_for_batch(second, 1)
    seconds["first batch after the other's end"] = since(began_s)
    return Row("all nodes are taken", seconds, line, stage.wait_for_end(second, 5))


def _cut(stage: RayStage) -> Row:
    trial = stage.create(80, 2)
    stage.wait_for_batch(trial, 15)
    node = stage.far_node_of(trial)
    host = next(one for one in stage.machines.all if one.address == node)
    began_s = time.monotonic()
    host.cut()
    try:
        line = stage.wait_for_line(trial, rf"{re.escape(node)}.*(is dead|is gone|gone:)")
        seconds = {"the loss is said": since(began_s)}
        stage.wait_for_line(trial, RESUMED)
        seconds["resumed elsewhere"] = since(began_s)
        outcome = stage.wait_for_end(trial, 80)
        stage.wait(lambda: not ours_on(host), f"the end of what ran on {node}")
    finally:
        stage.wait(lambda: node not in stage.cluster.alive(), f"Ray to give up {node}")
        host.heal()
        stage.cluster.begin_again(host)
    return Row("the cable of one of its two nodes is cut", seconds, line, outcome)


def _kill_master(stage: RayStage) -> Row:
    def then(began_s: float) -> dict[str, float]:
        head = stage.machines[1]
        stage.wait(lambda: head.find("dstrial.ray.bridge") is None, "the end of the bridge")
        return {"its bridge has ended": since(began_s)}

    return master_scenarios.kill_master(stage, stage.create(150, 2), 150, then)


def _drain(stage: RayStage) -> Row:
    trial = stage.create(120, 2, min_checkpoint_period={"batches": 1000})
    stage.wait_for_batch(trial, 15)
    node = stage.far_node_of(trial)
    began_s = time.monotonic()
    stage.cluster.drain(node)
    line = stage.wait_for_line(trial, "gracefully terminating allocation")
    seconds = {"asked to save": since(began_s)}
    stage.wait_for_line(trial, RESUMED)
    seconds["resumed elsewhere"] = since(began_s)
    return Row("`ray drain-node` of one of its two nodes", seconds, line, stage.wait_for_end(trial, 120))


SCENARIOS: dict[str, Callable[[RayStage], Row]] = {
    "submit": master_scenarios.submit,
    "never fits": _never_fits,
    "waits": _waits,
    "pause": master_scenarios.pause,
    "kill": master_scenarios.kill_trial,
    "disable": master_scenarios.disable,
    "master": _kill_master,
    "cut": _cut,
    "drain": _drain,  # the last: the node takes nothing more
}


@contextlib.contextmanager
def _stage() -> Iterator[RayStage]:
    with (
        ray_cluster(3, cpus=1) as cluster,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory,
    ):
        master = MasterOnHosts(cluster.machines, Path(directory), has_ray=True)
        master_scenarios.begin(master, "dstrial up --backend ray")
        yield RayStage(cluster, master)
        master.down("--now")


if __name__ == "__main__":
    master_scenarios.measure(__doc__, missing, _stage, SCENARIOS)
