"""Trials stopped at unusual moments, and the number of retries after failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from submitting import config, experiment, log_of, steps_of, submit, trials, wait_until
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


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=2) as running:
        yield running


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
