"""Behaviour common to masters over ssh hosts, Slurm jobs, Slurm allocations, Ray."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts_runs import copy_into, losses
from master_on_hosts import CONFIG, MasterOnHosts, wait_until
from sites import SITES, Hosts

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
_SLOW = {**CONFIG["hyperparameters"], "pause_s": 0.1}


@pytest.fixture(scope="module", params=SITES)
def site(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with SITES[request.param]() as made:
        yield made


@pytest.fixture
def master(site: Hosts, tmp_path: Path) -> Iterator[MasterOnHosts]:
    """Return a master over nodes of one slot; teardown waits for its processes."""
    made = site.new_master(tmp_path)
    said = made.up()
    assert said.returncode == 0, said.stdout
    yield made
    site.close(made)


@pytest.fixture(scope="module")
def local_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Return a function: entrypoint -> losses of a run on two local slots."""

    @functools.cache
    def run(entrypoint: str) -> list[str]:
        place = tmp_path_factory.mktemp("local")
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "DSTRIAL_STATE_DIR": str(place / "state")}

        def dstrial(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "dstrial", *words]
            return subprocess.run(
                command, cwd=place, env=environ, capture_output=True, text=True, timeout=200, check=False
            )

        (place / "model").mkdir()
        copy_into(place / "model", "small_trial.py", "small_pipeline.py")
        (place / "exp.yaml").write_text(yaml.safe_dump({**CONFIG, **_two_slots(entrypoint)}))
        done = dstrial("run", "exp.yaml", "model", "--slots", "2")
        dstrial("down", "--now")
        assert done.returncode == 0, done.stdout + done.stderr
        return losses(done.stdout)

    return run


def _two_slots(entrypoint: str) -> dict[str, Any]:
    is_pipeline = "Pipeline" in entrypoint
    return {
        "entrypoint": entrypoint,
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {**CONFIG["hyperparameters"], "zero_stage": 0 if is_pipeline else 3},
        **({"data": {"dstrial": {"pipeline_stages": 2}}} if is_pipeline else {}),
    }


@pytest.mark.parametrize("entrypoint", ["small_trial:SmallTrial", "small_pipeline:SmallPipeline"])
def test_two_nodes_bitwise_equal_to_single_node(
    master: MasterOnHosts, local_losses: Callable[[str], list[str]], entrypoint: str
) -> None:
    experiment = master.create(_two_slots(entrypoint))
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    log = master.log(master.trials(experiment)[0]["id"])
    assert re.search(r"on agent \S+, \S+\n", log)
    assert len(losses(log)) > 3
    assert losses(log) == local_losses(entrypoint)


def test_killed_master_restart_completes_trial(site: Hosts, master: MasterOnHosts) -> None:
    experiment, trial = master.train(100, 0.1, resources={"slots_per_trial": 2})
    jobs = site.jobs()
    master.kill()
    said = master.up()
    assert said.returncode == 0, said.stdout
    assert site.jobs() == jobs
    master.wait_for_state(experiment, ("COMPLETED",), within_s=240)
    batches, log = master.batches(trial), master.log(trial)
    assert sorted(set(batches)) == list(range(5, 101, 5))
    if site.keeps_trials:
        assert batches == list(range(5, 101, 5))
        assert log.count("Scheduling Trial") == 1
    assert log.count("Scheduling Trial") == 1 or "resumed from checkpoint" in log


def test_search_completes_after_node_loss(site: Hosts, master: MasterOnHosts) -> None:
    assert master.det("slot", "list").count("FREE            | FREE") == 3
    experiment = master.create(
        {
            "hyperparameters": {**_SLOW, "zero_stage": {"type": "categorical", "vals": [1, 2]}},
            "searcher": {
                **CONFIG["searcher"], "name": "random", "max_trials": 8, "max_concurrent_trials": 4,
                "max_length": {"batches": 40},
            },
        }
    )  # fmt: skip
    trials = master.wait_for_trials(experiment, 3)

    def with_checkpoint() -> list[tuple[int, int]]:
        """Return (trial, node number) of trials with a checkpoint on nodes 2 and 3."""
        logs = [(trial["id"], master.log_now(trial["id"])) for trial in trials]
        return [
            (trial, number)
            for trial, log in logs
            for number in (2, 3)
            if f"on agent {site.node(number)}\n" in log and "Reported checkpoint" in log
        ]

    wait_until(lambda: bool(with_checkpoint()), 180, lambda: str([master.log(one["id"]) for one in trials]))
    lost, number = with_checkpoint()[-1]
    site.cut_off(number)
    wait_until(
        lambda: (
            re.search(rf"{site.node(number)} (\(rank 0\) )?is (lost|dead)", master.log_now(lost)) is not None
        ),
        60,
        lambda: master.log(lost),
    )
    master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    assert [trial["# of Batches"] for trial in master.trials(experiment)] == ["40"] * 8
    assert "resumed from checkpoint" in master.log(lost)


def test_elastic_trial_resizes_with_available_nodes(site: Hosts, master: MasterOnHosts) -> None:
    """The trial shrinks to one node, then grows by itself or after pause and activate."""
    section = {"min_slots": 1, "resize_period": 5}
    experiment, trial = master.train(200, 0.2, resources={"slots_per_trial": 2}, data={"dstrial": section})
    for number in (1, 2):  # the last two of three nodes
        site.cut_off(site.first + number)
    master.wait_for_log(
        trial, "resumes from its checkpoint with 1, the most", "INFO: resumed from checkpoint", within_s=120
    )
    if not site.returns_nodes:
        master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
        return
    if site.grows_trials:
        _grow(site, master, trial)
    else:
        site.heal()
        wait_until(lambda: all(master.enabled().values()), 180, lambda: str(master.enabled()))
        master.det("experiment", "pause", str(experiment))
        master.wait_for_state(experiment, ("PAUSED",))
        master.det("experiment", "activate", str(experiment))
        master.wait_for_log(trial, "with 2 slots, after 1", within_s=300)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
    log = master.log(trial)
    assert log.count("INFO: resumed from checkpoint") >= 2
    assert "trial failed" not in log
    assert sorted(set(master.batches(trial))) == list(range(5, 201, 5))
    assert master.steps(trial) == list(range(5, 201, 5))  # each batch counts once
    assert master.trials(experiment)[0]["# of Batches"] == "200"


def _grow(site: Hosts, master: MasterOnHosts, trial: int) -> None:
    """Reconnect a host so that the trial grows; no batch is repeated."""
    _wait_for_two_reports(master, trial)
    before = _num_trained_again(master, trial)
    number = site.first + 1
    site.machines[number].heal()
    site.cut.discard(number)
    master.wait_for_log(trial, "it grows from 1 to 2 slots", "with 2 slots, after 1", within_s=180)
    _wait_for_two_reports(master, trial)
    assert _num_trained_again(master, trial) == before


def _wait_for_two_reports(master: MasterOnHosts, trial: int) -> None:
    num = len(master.steps(trial, is_all=True))
    wait_until(lambda: len(master.steps(trial, is_all=True)) >= num + 2, 120, lambda: master.log(trial))


def _num_trained_again(master: MasterOnHosts, trial: int) -> int:
    """Return the number of archived reports, whose batches were trained again."""
    return len(master.steps(trial, is_all=True)) - len(master.steps(trial))
