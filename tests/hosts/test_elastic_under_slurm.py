"""A trial in jobs of Slurm goes on with the slots that can be had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from master_on_hosts import CONFIG, MasterOnHosts, wait_until
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as made:
        yield made


@pytest.fixture
def master(cluster: SlurmCluster, tmp_path: Path) -> Iterator[MasterOnHosts]:
    """Return a master on the first node, of which nothing is left behind."""
    variables = {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}
    made = MasterOnHosts(cluster.machines, tmp_path, slurm=variables)
    yield made
    made.down("--now")
    cluster.run("scancel", "--user=root")
    wait_until(
        lambda: cluster.run("squeue", "-h").stdout == "", 60, lambda: cluster.run("squeue", "-h").stdout
    )


def test_trial_goes_on_with_fewer_slots_and_with_all_when_it_begins_again(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    said = master.up()
    assert said.returncode == 0, said.stdout
    experiment = master.create(
        {
            "resources": {"slots_per_trial": 2},
            "slurm": {"slots_per_node": 1, "sbatch_args": ["--exclude=host1"]},
            "hyperparameters": {"zero_stage": 1, "pause_s": 0.2, "micro_batch_size": 2},
            "searcher": {**CONFIG["searcher"], "max_length": {"batches": 150}},
            "data": {"dstrial": {"min_slots": 1}},
        }
    )
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_log(trial["id"], "batch 15 loss", within_s=120)
    cluster.machines[3].cut()
    try:
        waited_s = master.wait_for_log(trial["id"], "INFO: resumed from checkpoint", within_s=120)
        log = master.log(trial["id"])
        assert "host3 (rank 1) is lost" in log
        assert "goes on from its checkpoint with 1, the most that there are for it" in log
        jobs = list(dict.fromkeys(re.findall(r"job (\d+)", log)))
        assert len(jobs) == 2, "another job, on the node that is left"
    finally:
        cluster.heal(3)
    print(f"trained again {waited_s:.0f} s after the cut")
    wait_until(lambda: _enabled(master)["host3"], 180, lambda: str(_enabled(master)))
    master.det("experiment", "pause", str(experiment))
    master.wait_for_state(experiment, ("PAUSED",))
    master.det("experiment", "activate", str(experiment))
    master.wait_for_log(trial["id"], "with 2 slots, after 1", within_s=180)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    log = master.log(trial["id"])
    assert "trial failed" not in log, "none of it counts as a restart"
    assert log.count("INFO: resumed from checkpoint") == 2
    batches = [int(number) for number in re.findall(r"batch (\d+) loss ", log)]
    assert sorted(set(batches)) == list(range(5, 151, 5))
    assert master.trials(experiment)[0]["# of Batches"] == "150"


def test_a_node_that_is_cut_is_shown_as_lost_before_slurm_says_so(tmp_path: Path) -> None:
    with slurm_cluster(3, slurmd_timeout_s=200) as cluster:
        variables = {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}
        master = MasterOnHosts(cluster.machines, tmp_path, slurm=variables)
        assert master.up().returncode == 0
        experiment = master.create(
            {
                "hyperparameters": {**CONFIG["hyperparameters"], "pause_s": 0.2},
                "searcher": {**CONFIG["searcher"], "max_length": {"batches": 2000}},
                "slurm": {"sbatch_args": ["--nodelist=host3"]},
            }
        )
        (trial,) = master.wait_for_trials(experiment, 1)
        master.wait_for_log(trial["id"], "batch 5 loss", within_s=120)
        assert _enabled(master) == {"host1": True, "host2": True, "host3": True}
        cluster.machines[3].cut()
        wait_until(lambda: not _enabled(master)["host3"], 60, lambda: str(_enabled(master)))
        said = cluster.run("sinfo", "-h", "-N", "-n", "host3", "-p", "low", "-o", "%T").stdout.strip()
        # Its jobs are as they were, those among them that the master has given back meanwhile.
        assert said.removesuffix("*") in ("mixed", "allocated", "completing"), said
        assert "host3 is silent" in master.command("dstrial", "status").stdout
        assert _enabled(master) == {"host1": True, "host2": True, "host3": False}
        cluster.heal(3)
        wait_until(lambda: _enabled(master)["host3"], 180, lambda: str(_enabled(master)))
        master.det("experiment", "kill", str(experiment))
        master.wait_for_state(experiment, ("CANCELED",))
        master.down("--now")


def _enabled(master: MasterOnHosts) -> dict[str, bool]:
    return {agent["id"]: agent["enabled"] for agent in master.json("agent", "list")}
