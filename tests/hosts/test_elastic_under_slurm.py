"""A trial in a job of Slurm's goes on with the rest of it, takes what nobody wants, and gives back what was not worth it."""

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


def test_a_trial_goes_on_with_the_node_that_is_left_and_moves_to_a_larger_job_later(
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
            # So long that two slots are worth their restart.
            "data": {"dstrial": {"min_slots": 1, "resize_period": 40}},
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
        assert set(re.findall(r"job (\d+)", log)) == {re.findall(r"job (\d+)", log)[0]}, "no other job"
    finally:
        cluster.heal(3)
    grown_s = master.wait_for_log(
        trial["id"], "it grows to 2 slots, which are there for it", "with 2 slots, after 1", within_s=180
    )
    print(f"trained again {waited_s:.0f} s after the cut, and with both {grown_s:.0f} s after the heal")
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    log = master.log(trial["id"])
    assert "trial failed" not in log, "none of it counts as a restart"
    assert log.count("INFO: resumed from checkpoint") == 2
    batches = [int(number) for number in re.findall(r"batch (\d+) loss ", log)]
    assert sorted(set(batches)) == list(range(5, 151, 5))
    assert master.trials(experiment)[0]["# of Batches"] == "150"


def _elastic(batches: int, micro_batch_size: int, pause_s: float, **section: object) -> dict[str, object]:
    """Return a trial that asks for one slot and goes on with two; a pause is for a micro batch."""
    return {
        "resources": {"slots_per_trial": 1},
        "hyperparameters": {"zero_stage": 1, "pause_s": pause_s, "micro_batch_size": micro_batch_size},
        "searcher": {**CONFIG["searcher"], "max_length": {"batches": batches}},
        "min_checkpoint_period": {"batches": 5},
        "data": {"dstrial": {"max_slots": 2, **section}},
    }


def _jobs(cluster: SlurmCluster) -> dict[str, int]:
    """Return the processors of each job of the master's."""
    lines = cluster.run("squeue", "-h", "-o", "%i %C %j").stdout.splitlines()
    return {words[0]: int(words[1]) for words in map(str.split, lines) if "@" in words[2]}


def test_a_trial_takes_what_nobody_uses_or_waits_for(cluster: SlurmCluster, master: MasterOnHosts) -> None:
    assert master.up().returncode == 0
    hold = ["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 900"]
    uses = cluster.run(*hold, "--ntasks=3").stdout.strip()
    cluster.wait_for_state(int(uses), "RUNNING")
    experiment = master.create(_elastic(150, 2, 0.1, resize_period=40))
    (trial,) = master.wait_for_trials(experiment, 1)
    wait_until(lambda: list(_jobs(cluster).values()) == [1], 60, lambda: master.log(trial["id"]))
    # Before the trial may grow.
    waits = cluster.run(*hold, "--ntasks=4").stdout.strip()
    cluster.wait_for_state(int(waits), "PENDING")
    master.wait_for_log(trial["id"], "batch 75 loss", within_s=180)
    assert list(_jobs(cluster).values()) == [1], "two processors are free, for which somebody else waits"
    assert "it grows" not in master.log(trial["id"])

    cluster.run("scancel", waits)
    grown_s = master.wait_for_log(trial["id"], "it grows to 2 slots, which are there for it", within_s=90)
    again_s = master.wait_for_log(trial["id"], "with 2 slots, after 1", "INFO: resumed from", within_s=90)
    wait_until(lambda: list(_jobs(cluster).values()) == [2], 60, lambda: str(_jobs(cluster)))
    print(f"grows {grown_s:.0f} s after nobody waits any more, trains again {again_s:.0f} s later")
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    log = master.log(trial["id"])
    assert log.count("INFO: resumed from checkpoint") == 1
    batches = [int(number) for number in re.findall(r"batch (\d+) loss ", log)]
    assert sorted(set(batches)) == list(range(5, 151, 5))


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
        wait_until(lambda: _enabled(master)["host3"], 90, lambda: str(_enabled(master)))
        master.det("experiment", "kill", str(experiment))
        master.wait_for_state(experiment, ("CANCELED",))
        master.down("--now")


def _enabled(master: MasterOnHosts) -> dict[str, bool]:
    return {agent["id"]: agent["enabled"] for agent in master.json("agent", "list")}


def test_a_number_of_slots_that_its_own_code_cannot_use_is_tried_once(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    # A micro batch of twelve records, which is the whole batch: nothing is left for a second slot.
    experiment = master.create({**_elastic(60, 12, 0.3, resize_period=5), "max_restarts": 0})
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=240)
    log = master.log(trial["id"])
    assert log.count("it grows to 2 slots") == 1
    assert (
        log.count("the trial cannot go on with 2 slots, which counts as no restart and is not tried again")
        == 1
    )
    assert log.count("INFO: resumed from checkpoint") == 1
    batches = [int(number) for number in re.findall(r"batch (\d+) loss ", log)]
    assert sorted(set(batches)) == list(range(5, 61, 5))
