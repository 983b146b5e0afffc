"""``dstrial up --slurm``: a master in an allocation, whose nodes run the trials of the unmodified ``det``; a real cluster."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from master_on_hosts import CONFIG, MasterOnHosts
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as made:
        yield made


@pytest.fixture
def master(cluster: SlurmCluster, tmp_path: Path) -> Iterator[MasterOnHosts]:
    """Return a master on the first of three nodes of an allocation, with a slot on each."""
    told = tmp_path / "allocation"
    words = [
        "salloc",
        "-N3",
        "--no-kill",
        "--ntasks-per-node=1",
        "bash",
        "-c",
        f"env -0 > {told}; exec sleep 12345",
    ]
    salloc = cluster.popen(words, cwd=tmp_path)
    give_up_at_s = time.monotonic() + 30
    while not (told.exists() and told.read_bytes().endswith(b"\0")):
        assert time.monotonic() < give_up_at_s, "no allocation"
        time.sleep(0.1)
    pairs = [pair.split("=", 1) for pair in told.read_text().split("\0") if "=" in pair]
    variables = {name: value for name, value in pairs if name.startswith("SLURM_") or name == "PATH"}
    made = MasterOnHosts(cluster.machines, tmp_path, allocation=variables)
    yield made
    made.down("--now")
    cluster.run("scancel", variables["SLURM_JOB_ID"])
    for pid, line in cluster.machines[1].processes().items():
        if "sleep 12345" in line:
            cluster.machines[1].signal(pid, signal.SIGKILL)
    salloc.communicate(timeout=60)
    cluster.wait_for_idle(3, timeout=60)


def test_a_search_uses_all_nodes_and_goes_on_without_one_that_is_cut_off(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    said = master.up()
    assert said.returncode == 0, said.stdout
    for number in (1, 2, 3):
        assert f"host{number}: 1 slot at 10.77.0.1{number} (eth0)" in said.stdout
    assert master.det("slot", "list").count("FREE            | FREE") == 3

    experiment = master.create(
        {
            "hyperparameters": {
                "zero_stage": {"type": "categorical", "vals": [1, 2]},
                "pause_s": 0.1,
                "micro_batch_size": 2,
            },
            "searcher": {
                **CONFIG["searcher"], "name": "random", "max_trials": 4, "max_concurrent_trials": 3,
                "max_length": {"batches": 60},
            },
        }
    )  # fmt: skip
    trials = master.wait_for_trials(experiment, 3)
    for trial in trials:
        master.wait_for_log(trial["id"], "batch 15 loss", within_s=90)
    on_third = next(trial["id"] for trial in trials if "on agent host3" in master.log(trial["id"]))
    cluster.machines[3].cut()
    try:
        master.wait_for_log(on_third, "host3 (rank 0) is lost", within_s=30)
        master.wait_for_state(experiment, ("COMPLETED",), within_s=150)
    finally:
        cluster.heal(3)
    log = master.log(on_third)
    assert "resumed from checkpoint" in log
    assert [trial["# of Batches"] for trial in master.trials(experiment)] == ["60"] * 4


def test_two_nodes_train_one_trial_which_a_killed_master_finds_or_begins_again_from_its_checkpoint(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    experiment, trial = master.train(60, 0.1, resources={"slots_per_trial": 2})
    pid = cluster.machines[1].find("dstrial.master.server")
    assert pid is not None
    cluster.machines[1].run(["kill", "-9", str(pid)])
    assert master.up().returncode == 0
    master.wait_for_state(experiment, ("COMPLETED",), within_s=150)
    # Slurm may kill what the master has started with the step of its agent, or not (ProctrackType).
    found = re.findall(r"batch (\d+) loss ", master.log(trial))
    numbers = [int(number) for number, before in zip(found, ["", *found], strict=False) if number != before]
    again = numbers[numbers.index(15) + 1 :]
    assert again == list(range(again[0], 61, 5)), numbers
    assert again[0] <= 20 or "resumed from checkpoint" in master.log(trial)
    assert "on agent host1, host2" in master.log(trial)


def test_outside_of_an_allocation_it_says_so(cluster: SlurmCluster, tmp_path: Path) -> None:
    master = MasterOnHosts(cluster.machines, tmp_path, allocation={})
    said: subprocess.CompletedProcess[str] = master.up()
    assert said.returncode == 1
    assert "--slurm is given, and this is in no allocation" in said.stdout
    assert master.command("dstrial", "status").returncode != 0, "nothing was started"
