"""Life cycle of trials: start, failure, retry, stop and restart, without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitting import (
    TRAIN,
    checkpoints_of,
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

SLEEPER = "sleep 600"
# Ignores requests to stop in its first run. In MANUAL mode the Core API does not import torch.
IGNORE_FIRST_STOP = """
import time, determined as det
info = det.get_cluster_info()
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    run = info.trial._trial_run_id
    core.train.report_training_metrics(run, {"loss": 1.0})
    if run == 1:
        with core.checkpoint.store_path({"steps_completed": 1}):
            pass
        core.train.report_training_metrics(2, {"loss": 1.0})
        time.sleep(600)
    print("run", run, "starts from", info.latest_checkpoint is not None)
"""
FAIL_AFTER_A_BATCH = """
import determined as det
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    core.train.report_training_metrics(1, {"loss": 1.0})
    raise KeyError("the same")
"""
FAIL_IN_TWO_WAYS = """
import os
raise (KeyError if int(os.environ["DET_TRIAL_RUN_ID"]) % 2 else IndexError)("words")
"""
DIE_AFTER_REPORTS = """
import os
import determined as det
from dstrial.loop.background_save import PendingReports

with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    core.train.report_training_metrics(1, {"loss": 1.0})
    reports = PendingReports(core.train)
    for step in range(2, 201):
        core.train.report_training_metrics(step, {"loss": 1.0 / step})
    print("waited", reports.wait())
    os._exit(9)
"""


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

    found = checkpoints_of(master, experiment_id)
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


def test_wait_flushes_pending_reports_before_crash(master: MasterForTest) -> None:
    """Reports before ``PendingReports.wait`` are stored even if the trial then dies."""
    experiment_id = submit(master, config(), DIE_AFTER_REPORTS)

    wait_until(master, experiment_id, "ERROR")

    (trial,) = trials(master, experiment_id)
    assert steps_of(master, trial["id"]) == list(range(1, 201))


def post(master: MasterForTest, experiment_id: int, verb: str) -> None:
    master.client().post(f"/api/v1/experiments/{experiment_id}/{verb}")


def num_running(master: MasterForTest) -> int:
    tasks = master.client().get("/api/v1/tasks")["allocationIdToSummary"].values()
    return sum(
        task["name"].startswith("Trial ") for task in tasks
    )  # other tasks collect checkpoints of ended trials


def hold_all_slots(master: MasterForTest) -> int:
    holder = submit(master, config(SLEEPER, resources={"slots_per_trial": 2}))
    wait_until(master, holder, "RUNNING")
    return holder


def test_waiting_experiment_stays_paused_until_activated(
    master: MasterForTest,
) -> None:
    holder = hold_all_slots(master)
    waiting = submit(master, config("echo it runs"))
    needs_none = submit(master, config("echo it runs", resources={"slots_per_trial": 0}))

    wait_until(master, needs_none, "COMPLETED")
    assert experiment(master, waiting)["state"] == "STATE_QUEUED"
    post(master, waiting, "pause")
    post(master, holder, "kill")
    wait_for(lambda: num_running(master) == 0, "the slots are not freed")
    assert experiment(master, waiting)["state"] == "STATE_PAUSED"
    assert all("waiting for 1 slot" in line for line in log_of(master, waiting).splitlines())

    post(master, waiting, "activate")
    wait_until(master, waiting, "COMPLETED")
    assert "it runs" in log_of(master, waiting)


def test_kill_during_start_cancels_experiment(master: MasterForTest) -> None:
    for delay_s in (0.0, 0.03, 0.1):
        experiment_id = submit(master, config(SLEEPER))
        time.sleep(delay_s)
        post(master, experiment_id, "kill")
        wait_until(master, experiment_id, "CANCELED")
        assert num_running(master) == 0
        assert trials(master, experiment_id)[0]["state"] == "STATE_CANCELED"


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_pause_during_start_reruns_when_activated(master: MasterForTest, delay_s: float) -> None:
    experiment_id = submit(master, config("sleep 0.6; echo run $DET_TRIAL_RUN_ID is done"))
    time.sleep(delay_s)

    post(master, experiment_id, "pause")
    wait_for(lambda: num_running(master) == 0, "the slots are not freed")
    assert experiment(master, experiment_id)["state"] == "STATE_PAUSED"
    post(master, experiment_id, "activate")
    wait_until(master, experiment_id, "COMPLETED")

    assert trials(master, experiment_id)[0]["restarts"] == 0
    assert log_of(master, experiment_id).count("is done") == 1


def test_preemption_timeout_kill_resumes_or_cancels_trial(master: MasterForTest) -> None:
    both = [submit(master, config(preemption_timeout=1), IGNORE_FIRST_STOP) for _ in range(2)]
    paused, canceled = both
    for one in both:
        wait_until(master, one, "RUNNING")
        wait_for(lambda one=one: steps_of(master, trials(master, one)[0]["id"]) == [1, 2])  # type: ignore[misc]

    post(master, canceled, "cancel")
    post(master, paused, "pause")
    wait_for(lambda: num_running(master) == 0, "a trial outlives its deadline")
    wait_until(master, canceled, "CANCELED")
    assert trials(master, paused)[0]["state"] == "STATE_PAUSED"
    for one in both:
        text = log_of(master, one)
        assert "gracefully terminating" in text
        assert "did not stop within preemption_timeout" in text

    post(master, paused, "activate")
    wait_until(master, paused, "COMPLETED")
    (trial,) = trials(master, paused)
    assert (trial["restarts"], steps_of(master, trial["id"])) == (0, [1, 2])
    assert "run 2 starts from True" in log_of(master, paused)


@pytest.mark.parametrize(
    ("given", "script", "words"),
    [
        pytest.param({}, FAIL_AFTER_A_BATCH, "max_restarts is 2", id="after its first batch"),
        pytest.param({}, FAIL_IN_TWO_WAYS, "max_restarts is 2", id="in another way each time"),
        pytest.param({"entrypoint": "exit 3"}, "", "(exit code 3)", id="without a traceback"),
        pytest.param({"entrypoint": "kill -SEGV $$"}, "", "SIGSEGV", id="by a signal"),
        pytest.param(
            {"entrypoint": "kill -9 $$"}, "", "out of host memory, or killed by a user", id="killed"
        ),
        pytest.param({"entrypoint": "exit 247"}, "", "out of host memory", id="by a signal, passed on"),
        pytest.param({"entrypoint": ["/no/such/program"]}, "", "command was not found", id="not found"),
    ],
)
def test_failed_trials_are_retried_until_max_restarts(
    master: MasterForTest, given: dict[str, Any], script: str, words: str
) -> None:
    experiment_id = submit(
        master, config(max_restarts=2, **given) if given else config(max_restarts=2), script
    )

    wait_until(master, experiment_id, "ERROR")

    text = log_of(master, experiment_id)
    assert text.count("crashed: resources failed") == 3
    assert words in text
    assert trials(master, experiment_id)[0]["restarts"] == 2


def test_continue_applies_new_log_policies(master: MasterForTest) -> None:
    policies = [{"name": "bad", "pattern": "bad luck", "action": {"type": "cancel_retries"}}]
    experiment_id = submit(master, config("echo bad luck; exit 1", log_policies=policies, max_restarts=1))
    wait_until(master, experiment_id, "ERROR")
    assert log_of(master, experiment_id).count("crashed: resources failed") == 1

    changed = "log_policies: [{name: bad, pattern: null}, {name: CUDA OOM, pattern: bad (luck)}]"
    master.client().post("/api/v1/experiments/continue", {"id": experiment_id, "overrideConfig": changed})
    wait_until(master, experiment_id, "ERROR")

    (trial,) = trials(master, experiment_id)
    assert log_of(master, experiment_id).count("crashed: resources failed") == 3
    assert trial["logPolicyMatched"] == "CUDA OOM"


@pytest.mark.parametrize("searcher", [{"name": "grid"}, {"name": "random", "max_trials": 2}], ids=str)
def test_continue_reruns_failed_trials_of_search(
    master: MasterForTest, tmp_path: Path, searcher: dict[str, object]
) -> None:
    marker = tmp_path / "repaired"
    script = f"import pathlib, sys\nif not pathlib.Path({str(marker)!r}).exists(): sys.exit(3)\n{TRAIN}"
    given = config(
        hyperparameters={"lr": {"type": "categorical", "vals": [0.1, 0.2]}, "steps": 2},
        searcher={"metric": "score", **searcher},
    )
    experiment_id = submit(master, given, script)
    wait_until(master, experiment_id, "ERROR")
    marker.touch()

    done = master.det("experiment", "continue", str(experiment_id))

    assert done.returncode == 0, done.stderr
    wait_until(master, experiment_id, "COMPLETED")
    assert [trial["state"] for trial in trials(master, experiment_id)] == ["STATE_COMPLETED"] * 2
