"""A trial in placement groups of Ray goes on with the slots that can be had."""

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


def _num_enabled(master: MasterOnHosts) -> int:
    """Return how many agents are enabled and not draining."""
    return len(re.findall(r"\| True +\| False", master.det("agent", "list")))


def test_trial_goes_on_with_fewer_slots_and_with_all_when_it_begins_again(
    cluster: RayCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    experiment = master.create(_trial(2, 300, min_slots=1))
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_log(trial["id"], "batch 15 loss", within_s=120)
    others = cluster.machines.all[1:]
    for machine in others:
        machine.cut()
    try:
        left_s = master.wait_for_log(
            trial["id"], "goes on from its checkpoint with 1, the most", within_s=120
        )
        wait_until(lambda: _num_enabled(master) == 1, 60, lambda: master.det("agent", "list"))
    finally:
        for machine in others:
            machine.heal()
    for machine in others:
        cluster.begin_again(machine)
    print(f"goes on with what is left {left_s:.0f} s after the cut")
    wait_until(lambda: _num_enabled(master) == 3, 180, lambda: master.det("agent", "list"))
    master.det("experiment", "pause", str(experiment))
    master.wait_for_state(experiment, ("PAUSED",))
    master.det("experiment", "activate", str(experiment))
    master.wait_for_log(trial["id"], "with 2 slots, after 1", within_s=300)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    log = master.log(trial["id"])
    assert log.count("INFO: resumed from checkpoint") >= 2
    assert "trial failed" not in log
    assert _batches(log) == list(range(5, 301, 5))
    # What the job that lost a node had of the head was given back, which is no trouble.
    warnings = [line for line in master.master_log().splitlines() if "WARNING" in line]
    assert [line for line in warnings if cluster.machines[1].address in line.split(": ")[1]] == []
