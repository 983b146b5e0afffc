"""A trial in placement groups of Ray grows back, takes what nobody wants, and gives back what was not worth it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from master_on_hosts import CONFIG, MasterOnHosts, wait_until
from ray_cluster import RayCluster, ray_cluster, wait_until_nothing_is_left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


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


def _trial(slots: int, batches: int, **section: object) -> dict[str, Any]:
    """Return a trial of which a batch takes 0.4 s on one slot, and half of that on two."""
    return {
        "resources": {"slots_per_trial": slots},
        "hyperparameters": {"zero_stage": 1, "pause_s": 0.2, "micro_batch_size": 6},
        "searcher": {**CONFIG["searcher"], "max_length": {"batches": batches}},
        "min_checkpoint_period": {"batches": 5},
        "data": {"dstrial": section},
    }


def _batches(log: str) -> list[int]:
    return sorted({int(number) for number in re.findall(r"batch (\d+) loss ", log)})


def _groups(master: MasterOnHosts) -> list[str]:
    """Return what the master knows of its placement groups."""
    return re.findall(r"placement group .*", master.command("dstrial", "status").stdout)


def test_a_trial_takes_what_nobody_has_reserved(
    master: MasterOnHosts,
) -> None:
    assert master.up().returncode == 0
    experiment = master.create(_trial(1, 150, max_slots=2, resize_period=5))
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_log(trial["id"], "(Ray is asked for 1 slot for trial", within_s=60)
    master.wait_for_log(trial["id"], "it grows to 2 slots, which are there for it", within_s=120)
    again_s = master.wait_for_log(trial["id"], "with 2 slots, after 1", "INFO: resumed from", within_s=120)
    wait_until(lambda: len(_groups(master)) == 1, 60, lambda: str(_groups(master)))
    print(f"in a larger group {again_s:.0f} s after its decision")
    master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    log = master.log(trial["id"])
    assert log.count("it grows to") == 1
    assert log.count("INFO: resumed from checkpoint") == 1
    assert _batches(log) == list(range(5, 151, 5))
    assert "trial failed" not in log
    warnings = [line for line in master.master_log().splitlines() if "WARNING" in line]
    assert warnings == [], "what is given back is no trouble"


def test_a_trial_that_has_lost_its_nodes_grows_back_when_they_are_there_again(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    """The last but one: it cuts nodes off."""
    assert master.up().returncode == 0
    experiment = master.create(_trial(2, 300, min_slots=1, resize_period=10))
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_log(trial["id"], "batch 15 loss", within_s=120)
    others = cluster.machines.all[1:]
    for machine in others:
        machine.cut()
    try:
        left_s = master.wait_for_log(
            trial["id"], "goes on from its checkpoint with 1, the most", within_s=120
        )
        wait_until(
            lambda: master.det("agent", "list").count("False") >= 2, 60, lambda: master.det("agent", "list")
        )
    finally:
        for machine in others:
            machine.heal()
    for machine in others:
        cluster.begin_again(machine)
    grown_s = master.wait_for_log(
        trial["id"], "it grows to 2 slots, which are there for it", "with 2 slots, after 1", within_s=300
    )
    print(
        f"goes on with what is left {left_s:.0f} s after the cut, grows {grown_s:.0f} s after the nodes are back"
    )
    master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    log = master.log(trial["id"])
    assert log.count("INFO: resumed from checkpoint") >= 2
    assert "trial failed" not in log
    assert _batches(log) == list(range(5, 301, 5))
    # What the job that lost a node had of the head was given back, which is no trouble.
    warnings = [line for line in master.master_log().splitlines() if "WARNING" in line]
    assert [line for line in warnings if cluster.machines[1].address in line.split(": ")[1]] == []


def test_a_trial_of_all_nodes_grows_back_though_there_is_no_room_for_two_jobs(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    experiment = master.create(
        {
            **_trial(3, 200, min_slots=1, resize_period=10),
            "hyperparameters": {"zero_stage": 1, "pause_s": 0.2, "micro_batch_size": 2},
        }
    )
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_log(trial["id"], "batch 15 loss", within_s=120)
    machine = cluster.machines[3]
    machine.cut()
    try:
        left_s = master.wait_for_log(
            trial["id"], "goes on from its checkpoint with 2, the most", within_s=120
        )
    finally:
        machine.heal()
    cluster.begin_again(machine)
    grown_s = master.wait_for_log(
        trial["id"],
        "it grows to 3 slots, which are there for it, for which it gives back those that it has",
        "with 3 slots, after 2",
        within_s=300,
    )
    print(
        f"goes on with what is left {left_s:.0f} s after the cut, with all {grown_s:.0f} s after the node is back"
    )
    master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    log = master.log(trial["id"])
    assert log.count("INFO: resumed from checkpoint") >= 2
    assert "trial failed" not in log
    assert _batches(log) == list(range(5, 201, 5))
