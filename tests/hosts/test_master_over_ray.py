"""``dstrial up --backend ray``: a master that asks Ray for a placement group for each trial of ``det``; a real cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_requests import refused as refused_by_master
from bad_requests import refused_at_submission
from hosts_runs import losses
from master_on_hosts import CONFIG, MasterOnHosts, wait_until
from ray_cluster import RayCluster, ray_cluster, wait_until_nothing_is_left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
_SLOW = {**CONFIG["hyperparameters"], "pause_s": 0.1}
# Longer than any test, on all three nodes.
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
    """Return a master on the first of three nodes of one processor each; nothing of it is left behind."""
    made = MasterOnHosts(cluster.machines, tmp_path, has_ray=True)
    yield made
    made.down("--now")
    wait_until_nothing_is_left(cluster)


def numbers_of(master: MasterOnHosts, trial_id: int) -> list[int]:
    """Return the batches that a trial has reported, each report once where it stands twice in a row."""
    found = [int(number) for number in re.findall(r"batch (\d+) loss ", master.log(trial_id))]
    return [number for number, before in zip(found, [0, *found], strict=False) if number != before]


def test_what_can_never_fit_is_refused_and_what_waits_says_for_what(master: MasterOnHosts) -> None:
    said = master.up()
    assert said.returncode == 0, said.stdout
    for number in (1, 2, 3):
        assert f"node:     10.77.0.1{number}: 1 slot\n" in said.stdout
    assert "slots:    3 cpu" in said.stdout
    refused = master.command(
        "det", "experiment", "create", *master.write({"resources": {"slots_per_trial": 4}})
    )
    assert refused.returncode != 0
    assert "slots_per_trial" in refused.stdout
    assert "3" in refused.stdout
    changes = {"resources": {"slots_per_trial": 2, "is_single_node": True}}
    print(
        refused_by_master(
            master, changes, "expected at most 1, which the nodes of the Ray cluster have on one node"
        )
    )

    first = master.create(_HOLDS_ALL)
    (trial,) = master.wait_for_trials(first, 1)
    master.wait_for_log(trial["id"], "batch 5 loss", within_s=120)
    second = master.create({})
    (waiting,) = master.wait_for_trials(second, 1)
    master.wait_for_log(waiting["id"], "pending (asks for 1 CPU on one node; free now: 10.77.0.11 0 of 1")
    assert "pending (asks for 1 CPU" in master.det("job", "list")
    assert "pending (asks for 1 CPU" in master.command("dstrial", "status").stdout
    master.det("experiment", "kill", str(first))
    master.wait_for_state(first, ("CANCELED",))
    master.wait_for_state(second, ("COMPLETED",), within_s=180)
    assert "on agent 10.77.0.1" in master.log(waiting["id"])


def test_what_an_experiment_cannot_have_is_told_once(master: MasterOnHosts) -> None:
    (master.place / "master.yaml").write_text("hosts_python: /opt/nowhere/bin/python\n")
    assert master.up("--config-file", "master.yaml").returncode == 0
    print("\n".join(refused_at_submission(master)))
    experiment = master.create({})
    master.wait_for_state(experiment, ("ERROR",), within_s=200)
    (trial,) = master.trials(experiment)
    (line,) = [line for line in master.log(trial["id"]).splitlines() if "it can never start: " in line]
    print(line)
    assert "without Python at /opt/nowhere/bin/python. Put the environment" in line


def test_what_needs_a_node_that_is_switched_off_waits_for_it(master: MasterOnHosts) -> None:
    assert master.up().returncode == 0
    master.det("agent", "disable", "10.77.0.13")
    waits = master.create({"resources": {"slots_per_trial": 3}})
    (trial,) = master.wait_for_trials(waits, 1)
    master.wait_for_log(trial["id"], "Ray has nothing for it now without 10.77.0.13, and is asked again: ")
    master.det("agent", "enable", "10.77.0.13")
    master.wait_for_state(waits, ("COMPLETED",), within_s=180)


def test_who_waits_longest_is_the_next(master: MasterOnHosts) -> None:
    """Ray itself begins with the group that was asked for last."""
    assert master.up().returncode == 0
    first = master.create(_HOLDS_ALL)
    (trial,) = master.wait_for_trials(first, 1)
    master.wait_for_log(trial["id"], "batch 5 loss", within_s=120)
    others = [master.create({"resources": {"slots_per_trial": slots}}) for slots in (3, 3, 1)]
    waiting = [master.wait_for_trials(one, 1)[0]["id"] for one in others]
    master.wait_for_log(waiting[0], "pending (asks for 1 CPU on each of 3 nodes; free now: ")
    for one in waiting[1:]:
        master.wait_for_log(one, "waits for its turn to ask Ray")
    master.det("experiment", "kill", str(first))
    for one in others:
        master.wait_for_state(one, ("COMPLETED",), within_s=180)
    begun = [re.search(r"\[(\S+)\] .*Scheduling Trial", master.log(one)) for one in (trial["id"], *waiting)]
    times = [one[1] for one in begun if one is not None]
    assert len(times) == 4
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("entrypoint", "zero_stage"),
    [("small_trial:SmallTrial", 3), ("small_pipeline:SmallPipeline", 0)],
)
def test_two_nodes_compute_the_bits_of_one_machine(
    master: MasterOnHosts, entrypoint: str, zero_stage: int
) -> None:
    changes = {
        "entrypoint": entrypoint,
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {**CONFIG["hyperparameters"], "zero_stage": zero_stage},
        **({"data": {"dstrial": {"pipeline_stages": 2}}} if zero_stage == 0 else {}),
    }
    master.write(changes)
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "DSTRIAL_STATE_DIR": str(master.place / "here")}

    def on_this_machine(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dstrial", *words]
        return subprocess.run(
            command, cwd=master.place, env=environ, capture_output=True, text=True, timeout=200, check=False
        )

    here = on_this_machine("run", "exp.yaml", "model", "--slots", "2")
    on_this_machine("down", "--now")
    assert here.returncode == 0, here.stdout + here.stderr
    assert master.up().returncode == 0
    experiment = master.create(changes)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    log = master.log(master.trials(experiment)[0]["id"])
    assert re.search(r"on agent 10\.77\.0\.1\d, 10\.77\.0\.1\d\n", log)
    assert len(losses(log)) > 3
    assert losses(log) == losses(here.stdout)


def test_a_killed_master_finds_its_trial_in_its_placement_group(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    experiment, trial = master.train(150, 0.1, resources={"slots_per_trial": 2})
    pid = cluster.machines[1].find("dstrial.master.server")
    assert pid is not None
    cluster.machines[1].signal(pid, signal.SIGKILL)
    wait_until(
        lambda: cluster.machines[1].find("dstrial.ray.bridge") is None, 30, lambda: "the bridge lives on"
    )
    said = master.up()
    assert said.returncode == 0, said.stdout
    master.wait_for_state(experiment, ("COMPLETED",), within_s=240)
    assert numbers_of(master, trial) == list(range(5, 151, 5))
    log = master.log(trial)
    assert log.count("Scheduling Trial") == 1
    assert "resumed from checkpoint" not in log


def test_removed_placement_group_ends_its_trial_which_resumes(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    """Ray kills the actor only: the agent ends the trial there, before another job gets the node."""
    assert master.up().returncode == 0
    experiment, trial = master.train(60, 0.1, resources={"slots_per_trial": 2})
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
    master.wait_for_state(experiment, ("COMPLETED",), within_s=240)
    assert "resumed from checkpoint" in master.log(trial)


def test_a_search_of_eight_trials_ends_right_though_a_node_is_cut_in_its_middle(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    experiment = master.create(
        {
            "hyperparameters": {
                "zero_stage": {"type": "categorical", "vals": [1, 2]}, "pause_s": 0.1, "micro_batch_size": 2,
            },
            "searcher": {
                **CONFIG["searcher"], "name": "random", "max_trials": 8, "max_concurrent_trials": 4,
                "max_length": {"batches": 40},
            },
        }
    )  # fmt: skip
    trials = master.wait_for_trials(experiment, 3)

    def at_work() -> list[tuple[int, str]]:
        """Return trials on another node than the master's, with their nodes, once they have a checkpoint."""
        found = []
        for one in trials:
            log = master.log_now(one["id"])
            node = re.search(r"on agent (10\.77\.0\.1[23])\n", log)
            if node is not None and "Reported checkpoint" in log:
                found.append((one["id"], node[1]))
        return found

    wait_until(lambda: bool(at_work()), 180, lambda: str([master.log(one["id"]) for one in trials]))
    lost, node = at_work()[-1]
    machine = cluster.machines[int(node[-1])]
    machine.cut()
    try:
        master.wait_for_log(lost, f"{node} is dead", within_s=60)
        master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    finally:
        machine.heal()
    cluster.begin_again(machine)
    assert "resumed from checkpoint" in master.log(lost)
    assert [trial["# of Batches"] for trial in master.trials(experiment)] == ["40"] * 8


def test_a_trial_of_three_nodes_goes_on_with_two_where_it_may(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    experiment, trial = master.train(
        100, 0.1, resources={"slots_per_trial": 3}, data={"dstrial": {"min_slots": 1}}
    )
    machine = cluster.machines[3]
    machine.cut()
    try:
        master.wait_for_log(trial, "goes on from its checkpoint with 2, the most", within_s=120)
        master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    finally:
        machine.heal()
    cluster.begin_again(machine)
    log = master.log(trial)
    assert "resumed from checkpoint" in log
    assert "trial failed" not in log
    assert master.trials(experiment)[0]["# of Batches"] == "100"


def test_a_node_that_ray_drains_is_left_with_a_checkpoint(cluster: RayCluster, master: MasterOnHosts) -> None:
    """The last: the node takes nothing more."""
    assert master.up().returncode == 0
    experiment, trial = master.train(
        100, 0.1, resources={"slots_per_trial": 2}, min_checkpoint_period={"batches": 1000}
    )
    nodes = re.findall(r"10\.77\.0\.1\d", master.log(trial).split("on agent ")[1].splitlines()[0])
    drained = next(node for node in nodes if node != cluster.machines[1].address)
    cluster.drain(drained)
    master.wait_for_log(trial, "gracefully terminating allocation: ", f"(Ray drains {drained})", within_s=60)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    assert numbers_of(master, trial) == list(range(5, 101, 5))
    assert "resumed from checkpoint" in master.log(trial)
