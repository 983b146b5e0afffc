"""``dstrial up --backend ray`` on a Ray cluster: a placement group for each trial."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from master_on_hosts import CONFIG, MasterOnHosts, wait_until
from ray_cluster import RayCluster, ray_cluster, wait_until_nothing_is_left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
_SLOW = {**CONFIG["hyperparameters"], "pause_s": 0.1}
# A trial that occupies all three nodes for longer than any test.
_HOLDS_ALL = {
    "resources": {"slots_per_trial": 3},
    "hyperparameters": {**_SLOW, "micro_batch_size": 2, "pause_s": 0.3},
    "searcher": {**CONFIG["searcher"], "max_length": {"batches": 2000}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3, cpus=1) as made:
        yield made


@pytest.fixture
def master(cluster: RayCluster, tmp_path: Path) -> Iterator[MasterOnHosts]:
    """Return a master on three nodes of one CPU; teardown waits for its processes."""
    made = MasterOnHosts(cluster.machines, tmp_path, has_ray=True)
    yield made
    made.down("--now")
    wait_until_nothing_is_left(cluster)


def test_ray_oversized_job_rejected_pending_job_explained(master: MasterOnHosts) -> None:
    said = master.up()
    assert said.returncode == 0, said.stdout
    for number in (1, 2, 3):
        assert f"node:     10.77.0.1{number}: 1 slot\n" in said.stdout
    assert "slots:    3 cpu" in said.stdout
    master.refused({"resources": {"slots_per_trial": 4}}, "at most 3, the slots of this master")
    changes = {"resources": {"slots_per_trial": 2, "is_single_node": True}}
    master.refused(changes, "expected at most 1, which the nodes of the Ray cluster have on one node")

    first = master.create(_HOLDS_ALL)
    (trial,) = master.wait_for_trials(first, 1)
    master.wait_for_log(trial["id"], "batch 5 loss", within_s=120)
    second = master.create({})
    (waiting,) = master.wait_for_trials(second, 1)
    master.wait_for_log(waiting["id"], "pending (asks for 1 CPU; 0 free)")
    assert "pending (asks for 1 CPU" in master.det("job", "list")
    assert "pending (asks for 1 CPU" in master.command("dstrial", "status").stdout
    master.det("experiment", "kill", str(first))
    master.wait_for_state(first, ("CANCELED",))
    master.wait_for_state(second, ("COMPLETED",), within_s=180)
    assert "on agent 10.77.0.1" in master.log(waiting["id"])


def test_ray_node_without_python_is_reported(master: MasterOnHosts) -> None:
    (master.place / "master.yaml").write_text("hosts_python: /opt/nowhere/bin/python\n")
    assert master.up("--config-file", "master.yaml").returncode == 0
    experiment = master.create({})
    master.wait_for_state(experiment, ("ERROR",), within_s=200)
    (trial,) = master.trials(experiment)
    (line,) = [line for line in master.log(trial["id"]).splitlines() if "it can never start: " in line]
    assert "without Python at /opt/nowhere/bin/python. Put the environment" in line


def test_ray_trial_waits_for_disabled_node(master: MasterOnHosts) -> None:
    assert master.up().returncode == 0
    master.det("agent", "disable", "10.77.0.13")
    waits = master.create({"resources": {"slots_per_trial": 3}})
    (trial,) = master.wait_for_trials(waits, 1)
    master.wait_for_log(trial["id"], "Ray rejects its job without 10.77.0.13; retrying: ")
    master.det("agent", "enable", "10.77.0.13")
    master.wait_for_state(waits, ("COMPLETED",), within_s=180)


def test_ray_pending_trials_start_in_submission_order(master: MasterOnHosts) -> None:
    """Ray alone would create the placement group that was requested last."""
    assert master.up().returncode == 0
    first = master.create(_HOLDS_ALL)
    (trial,) = master.wait_for_trials(first, 1)
    master.wait_for_log(trial["id"], "batch 5 loss", within_s=120)
    others = [master.create({"resources": {"slots_per_trial": slots}}) for slots in (3, 3, 1)]
    waiting = [master.wait_for_trials(one, 1)[0]["id"] for one in others]
    master.wait_for_log(waiting[0], "pending (asks for 1 + 1 + 1 CPU; ")
    for one in waiting[1:]:
        master.wait_for_log(one, "waits until fewer jobs are pending in Ray")
    master.det("experiment", "kill", str(first))
    for one in others:
        master.wait_for_state(one, ("COMPLETED",), within_s=180)
    begun = [re.search(r"\[(\S+)\] .*Scheduling Trial", master.log(one)) for one in (trial["id"], *waiting)]
    times = [one[1] for one in begun if one is not None]
    assert len(times) == 4
    assert times == sorted(times)


def test_ray_trial_survives_removed_group_and_killed_bridge(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    """Ray kills only the actor; the agent must end the trial's processes on the node."""
    assert master.up().returncode == 0
    experiment, trial = master.train(150, 0.1, resources={"slots_per_trial": 2})
    supervisors = {
        (machine, pid)
        for machine in cluster.machines.all
        for pid, words in machine.processes().items()
        if "supervisor" in words
    }
    assert len(supervisors) == 2
    cluster.ask(
        "(name,) = [one['name'] for one in ray.util.placement_group_table().values() if one['state'] == 'CREATED']\n"
        "ray.util.remove_placement_group(ray.util.get_placement_group(name))\nprint(name)"
    )
    wait_until(
        lambda: not any(pid in machine.processes() for machine, pid in supervisors),
        20,
        lambda: str(cluster.machines.processes()),
    )
    master.wait_for_log(trial, "resumed from checkpoint", within_s=120)
    bridge = cluster.machines[1].find("-m dstrial.ray.bridge")
    assert bridge is not None
    cluster.machines[1].signal(bridge, signal.SIGKILL)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=240)


def test_ray_node_drain_checkpoints_and_resumes_trial(cluster: RayCluster, master: MasterOnHosts) -> None:
    """Must be the last test of the module: the node stays drained."""
    assert master.up().returncode == 0
    experiment, trial = master.train(
        100, 0.1, resources={"slots_per_trial": 2}, min_checkpoint_period={"batches": 1000}
    )
    nodes = re.findall(r"10\.77\.0\.1\d", master.log(trial).split("on agent ")[1].splitlines()[0])
    drained = next(node for node in nodes if node != cluster.machines[1].address)
    cluster.drain(drained)
    master.wait_for_log(trial, "gracefully terminating allocation: ", f"(Ray drains {drained})", within_s=60)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    assert master.batches(trial) == list(range(5, 101, 5))
    assert "resumed from checkpoint" in master.log(trial)
