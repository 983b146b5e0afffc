"""Life cycle of trials: real processes under a real master, without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from submitting import (
    config,
    experiment,
    log_of,
    processes_with,
    steps_of,
    submit,
    trials,
    wait_until,
)
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=2) as running:
        yield running


def test_completed_experiment_has_metrics_and_is_fully_deletable(master: MasterForTest) -> None:
    experiment_id = submit(master, config())

    ended = wait_until(master, experiment_id, "COMPLETED", "ERROR")

    assert ended["state"] == "STATE_COMPLETED"
    assert ended["progress"] == 1
    [trial] = trials(master, experiment_id)
    assert steps_of(master, trial["id"]) == [1, 2, 3, 4, 5, 6]
    assert trial["totalBatchesProcessed"] == 6
    assert trial["bestValidation"]["metrics"]["avgMetrics"]["score"] == pytest.approx(0.5 / 6)
    assert trial["bestCheckpoint"]["totalBatches"] == 6
    assert "finished at 6" in log_of(master, experiment_id)

    found = master.client().get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    assert found
    master.client().send("DELETE", f"/api/v1/experiments/{experiment_id}")

    def ids() -> list[int]:
        return [one["id"] for one in master.client().get("/api/v1/experiments?limit=-1")["experiments"]]

    wait_for(lambda: experiment_id not in ids(), "it is not deleted")
    assert not any((master.state.path / "checkpoints" / one["uuid"]).exists() for one in found)


def test_failing_trial_restarts_from_checkpoint_within_limit(
    master: MasterForTest,
) -> None:
    experiment_id = submit(
        master, config(max_restarts=2, hyperparameters={"fails_at": 5, "failing_runs": 2, "steps": 7})
    )

    wait_until(master, experiment_id, "COMPLETED")

    [trial] = trials(master, experiment_id)
    assert trial["restarts"] == 2
    assert steps_of(master, trial["id"]) == [1, 2, 3, 4, 5, 6, 7]


def test_failed_log_ends_with_error_and_cause(
    master: MasterForTest,
) -> None:
    experiment_id = submit(master, config(max_restarts=1, hyperparameters={"fails_at": 3}))

    ended = wait_until(master, experiment_id, "ERROR")

    assert ended["state"] == "STATE_ERROR"
    lines = log_of(master, experiment_id).splitlines()
    assert "RuntimeError: step 3 went wrong (train.py:" in lines[-2]
    assert lines[-1].endswith(" has failed: failed 2 times; max_restarts is 1")
    assert sum("Traceback (most recent call last):" in line for line in lines) == 2
    assert sum("crashed: resources failed" in line for line in lines) == 2


def test_same_failure_before_first_batch_is_not_retried(
    master: MasterForTest,
) -> None:
    experiment_id = submit(
        master, config(max_restarts=5), script="import time\nraise KeyError(time.time())\n"
    )

    wait_until(master, experiment_id, "ERROR")

    text = log_of(master, experiment_id)
    assert text.count("crashed: resources failed") == 2
    assert "failed twice in the same way before its first batch" in text


def test_pause_frees_slots_and_activate_resumes(master: MasterForTest) -> None:
    experiment_id = submit(master, config(hyperparameters={"sleep": 0.1, "steps": 30}))
    wait_until(master, experiment_id, "RUNNING")
    while not steps_of(master, trials(master, experiment_id)[0]["id"]):
        time.sleep(0.05)

    master.client().post(f"/api/v1/experiments/{experiment_id}/pause")
    while master.client().get("/api/v1/tasks")["allocationIdToSummary"]:
        time.sleep(0.05)
    assert experiment(master, experiment_id)["state"] == "STATE_PAUSED"
    master.client().post(f"/api/v1/experiments/{experiment_id}/activate")
    wait_until(master, experiment_id, "COMPLETED")

    [trial] = trials(master, experiment_id)
    assert trial["restarts"] == 0
    assert steps_of(master, trial["id"]) == list(range(1, 31))
    assert "asked to stop at" in log_of(master, experiment_id)


@pytest.mark.parametrize("verb", ["cancel", "kill"])
def test_cancelled_or_killed_trial_leaves_no_process(master: MasterForTest, verb: str) -> None:
    mark = f"98765{len(verb)}"
    command = f"setsid sleep {mark} & sleep {mark}"
    experiment_id = submit(master, config(entrypoint=command))
    give_up_at_s = time.monotonic() + 30
    while len(processes_with(f"sleep\0{mark}")) < 2 and time.monotonic() < give_up_at_s:
        time.sleep(0.05)

    master.client().post(f"/api/v1/experiments/{experiment_id}/{verb}")

    assert wait_until(master, experiment_id, "CANCELED")["state"] == "STATE_CANCELED"
    assert processes_with(f"sleep\0{mark}") == []


def test_trial_with_invalid_hyperparameters_is_replaced(master: MasterForTest) -> None:
    searcher = {"name": "random", "metric": "score", "max_trials": 2, "max_concurrent_trials": 1}
    given = config(
        searcher=searcher,
        hyperparameters={"invalid": {"type": "categorical", "vals": [True, False]}, "steps": 1},
        reproducibility={"experiment_seed": 4},
    )
    experiment_id = submit(master, given)

    wait_until(master, experiment_id, "COMPLETED")

    found = trials(master, experiment_id)
    assert any(trial["hparams"]["invalid"] for trial in found), "choose another seed"
    assert sum(not trial["hparams"]["invalid"] for trial in found) == 2
    assert all(trial["state"] == "STATE_COMPLETED" for trial in found)


def test_searcher_stops_worse_trials_early(master: MasterForTest) -> None:
    searcher = {
        "name": "async_halving", "metric": "score", "max_trials": 4, "max_concurrent_trials": 2, "num_rungs": 2,
        "divisor": 2, "max_time": 12, "time_metric": "batches",
    }  # fmt: skip
    given = config(
        searcher=searcher,
        hyperparameters={"score": {"type": "double", "minval": 1, "maxval": 9}, "steps": 60, "sleep": 0.05},
        reproducibility={"experiment_seed": 1},
    )
    experiment_id = submit(master, given)

    wait_until(master, experiment_id, "COMPLETED")

    found = trials(master, experiment_id)
    assert len(found) == 4
    assert all(trial["state"] == "STATE_COMPLETED" for trial in found)
    assert all(6 <= trial["totalBatchesProcessed"] < 60 for trial in found)
    best = min(found, key=lambda trial: trial["hparams"]["score"])
    assert best["totalBatchesProcessed"] >= 12


def test_trials_survive_master_kill_and_are_adopted(master: MasterForTest) -> None:
    experiment_id = submit(master, config(hyperparameters={"sleep": 0.1, "steps": 40}))
    wait_until(master, experiment_id, "RUNNING")
    while not steps_of(master, trials(master, experiment_id)[0]["id"]):
        time.sleep(0.05)

    master.kill()
    time.sleep(1.5)
    master.up()

    wait_until(master, experiment_id, "COMPLETED")
    [trial] = trials(master, experiment_id)
    assert steps_of(master, trial["id"]) == list(range(1, 41))
    text = log_of(master, experiment_id)
    assert text.count("Scheduling Trial") == 1
    assert text.count("finished at 40") == 1


def test_batch_metrics_are_kept_if_reported(master: MasterForTest) -> None:
    script = (
        "import determined as det\nwith det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:\n"
        "    core.train.report_training_metrics(2, {'loss': 1.5}, batch_metrics=[{'loss': 2.0}, {'loss': 1.0}])\n"
    )
    experiment_id = submit(master, config(), script)
    wait_until(master, experiment_id, "COMPLETED")
    (trial,) = trials(master, experiment_id)
    client = master.client()

    (line,) = client.stream(f"/api/v1/trials/metrics/training_metrics?trialIds={trial['id']}")
    path = f"/api/v1/trials/{trial['id']}/workloads"
    with_batches = client.get(path, includeBatchMetrics="true")["workloads"]
    without = client.get(path)["workloads"]

    batches = [{"loss": 2.0}, {"loss": 1.0}]
    assert line["metrics"][0]["metrics"] == {"avg_metrics": {"loss": 1.5}, "batch_metrics": batches}
    assert with_batches[0]["training"]["metrics"]["batchMetrics"] == batches
    assert without[0]["training"]["metrics"]["batchMetrics"] == []
