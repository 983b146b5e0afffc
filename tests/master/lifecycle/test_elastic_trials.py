"""A real trial is resized while slots are disabled and enabled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_batch import create, project, state_of, wait_for_end
from submitting import agent_of, log_of, reports_of, steps_of
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

NUM_BATCHES = 100
FASTER_WITH_MORE = [1.6, 0.4, 0.2, 0.2]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=4) as running:
        yield running


def elastic(
    directory: Path, name: str, pace_s: list[float], *, num_slots: int = 4, **section: Any
) -> tuple[Path, Path]:
    """Write a trial for 1 to 4 slots; a file ``slow`` delays batches by ``pace_s``."""
    (directory / "slow").touch()
    return project(
        directory,
        name,
        batches=NUM_BATCHES,
        sleep_s=0.0,
        entrypoint="kept_batch_trials:Paced",
        resources={"slots_per_trial": num_slots},
        reproducibility={"experiment_seed": 7},
        min_checkpoint_period={"batches": 5},
        max_restarts=3,
        data={"dstrial": section},
        hyperparameters={
            "deepspeed_config": {
                "train_batch_size": 12,
                "train_micro_batch_size_per_gpu": 3,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": 1},
            },
            "dropout": 0.0,
            "num_records": 84,
            "num_validation_records": 12,
            "record_log": str(directory / f"{name}.log"),
            "slow": str(directory / "slow"),
            "pace_s": pace_s,
        },
    )


def sizes_of(master: MasterForTest, trial_id: int) -> list[int]:
    """Return the number of ranks of each run of a trial, in order."""
    return [int(ranks) for ranks in re.findall(r"sizes \[12, \d+, \d+, (\d+)\]", log_of(master, trial_id))]


def wait_for_size(master: MasterForTest, trial_id: int, *sizes: int) -> None:
    try:
        wait_for(lambda: tuple(sizes_of(master, trial_id)[-len(sizes) :]) == sizes, deadline_s=120)
    except AssertionError:
        raise AssertionError(f"{sizes} are not the last of:\n{log_of(master, trial_id)}") from None


def wait_for_checkpoint(master: MasterForTest, trial_id: int) -> None:
    path = f"/api/v1/trials/{trial_id}/checkpoints"
    wait_for(lambda: master.client().get(path)["checkpoints"], deadline_s=60)


def switch(master: MasterForTest, agent: str, slot: int, verb: str) -> None:
    """Enable or disable one slot through the API."""
    master.client("admin").post(f"/api/v1/agents/{agent}/slots/{slot}/{verb}")


def records_of(directory: Path, name: str) -> dict[int, list[int]]:
    """Return the records of each batch, merged if a restart repeated the batch."""
    found: dict[int, set[int]] = {}
    for path in directory.glob(f"{name}.log.*"):
        for line in path.read_text().splitlines():
            batch, records = json.loads(line)
            found.setdefault(batch, set()).update(records)
    return {batch: sorted(records) for batch, records in found.items()}


def values(row: dict[str, Any]) -> dict[str, Any]:
    """Return the only non-empty metrics mapping of a report."""
    (found,) = (metrics for metrics in row["metrics"].values() if metrics)
    return dict(found)


def test_elastic_trial_resizes_and_trains_same_batches(master: MasterForTest, tmp_path: Path) -> None:
    trial = create(master, elastic(tmp_path, "followed", FASTER_WITH_MORE, min_slots=1, resize_period=8))
    agent = agent_of(master)
    wait_for_size(master, trial, 4)
    wait_for_checkpoint(master, trial)

    for slot in (3, 2):
        switch(master, agent, slot, "disable")
    wait_for_size(master, trial, 2)
    switch(master, agent, 2, "enable")
    wait_for_size(master, trial, 2, 3)
    assert "it grows from 2 to 3 slots, which are free" in log_of(master, trial)
    (tmp_path / "slow").unlink()
    wait_for_end(master, trial)

    switch(master, agent, 3, "enable")
    alone = create(master, elastic(tmp_path, "alone", FASTER_WITH_MORE, num_slots=1))
    (tmp_path / "slow").unlink()
    wait_for_end(master, alone)

    assert steps_of(master, trial) == list(range(1, NUM_BATCHES + 1))
    assert records_of(tmp_path, "followed") == records_of(tmp_path, "alone")
    (last,), (wanted,) = (
        [values(row)["validation_loss"] for row in reports_of(master, one, "validation")]
        for one in (trial, alone)
    )
    assert last == pytest.approx(wanted, rel=1e-4)
    assert "restarts" not in log_of(master, trial), "a change is no failure"
    assert state_of(master, trial) == "COMPLETED"


def test_unusable_slot_count_is_tried_once_without_restart(master: MasterForTest, tmp_path: Path) -> None:
    own = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
    }  # fits four ranks, but not three
    config, context = elastic(tmp_path, "own", FASTER_WITH_MORE, min_slots=1, resize_period=600)
    given = yaml.safe_load(config.read_text())
    given["entrypoint"] = "kept_batch_trials:PacedOwnConfig"
    given["max_restarts"] = 0
    del given["hyperparameters"]["deepspeed_config"]
    given["hyperparameters"] |= {"own_stage": 1, "own_sizes": own}
    config.write_text(yaml.safe_dump(given))
    trial = create(master, (config, context))
    agent = agent_of(master)
    wait_for_size(master, trial, 4)
    wait_for_checkpoint(master, trial)
    switch(master, agent, 3, "disable")
    wait_for_size(master, trial, 4, 2)
    log = log_of(master, trial)
    assert log.count("the trial cannot go on with 3 slots (not counted as a restart, not tried again)") == 1
    assert "is one whose batch sizes do not fit 3 ranks" in log
    (tmp_path / "slow").unlink()
    wait_for_end(master, trial)
    switch(master, agent, 3, "enable")
