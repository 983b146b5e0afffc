"""Log policies with the actions ``cancel_retries`` and ``exclude_node``.

The cases are those of Determined 0.38.1's own e2e_tests/tests/cluster/test_log_policies.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from submitting import config, experiment, log_of, submit, trials, wait_until

from dstrial.master.scheduler.reconciler import compile_policies, matches
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

SCRIPT = "import sys; print('executing action exit code 7'); sys.exit(7)"
DONT_RETRY = "trial failed and matched logs to a don't retry policy"
EXCLUDES = "therefore will not schedule on"


def policy(action: str, pattern: str = "exit code [0-9]") -> list[dict[str, Any]]:
    return [{"pattern": pattern, "action": {"type": action}}]


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A master with ``launch_error: false``, so that unsatisfiable trials wait."""
    directory = tmp_path_factory.mktemp("patient")
    (directory / "master.yaml").write_text("launch_error: false\n")
    options = ("--config-file", str(directory / "master.yaml"))
    with master_for_test(directory, num_slots=1, options=options) as master:
        yield master


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with master_for_test(tmp_path_factory.mktemp("strict"), num_slots=1) as master:
        yield master


def test_cancel_retries_policy_counts_no_restart(strict: MasterForTest) -> None:
    policies = [{"name": "bad", **one} for one in policy("cancel_retries")]
    given = config(log_policies=policies, max_restarts=1)
    experiment_id = submit(strict, given, SCRIPT)

    wait_until(strict, experiment_id, "ERROR")

    (trial,) = trials(strict, experiment_id)
    assert (trial["restarts"], trial["logPolicyMatched"]) == (0, "bad")
    text = log_of(strict, experiment_id)
    assert DONT_RETRY in text
    assert '(log "executing action exit code 7" matched regex "exit code [0-9]")' in text
    assert text.count("crashed: resources failed") == 1


@pytest.mark.parametrize("num_slots", [0, 1])
def test_exclude_node_policy_without_other_node_fails(strict: MasterForTest, num_slots: int) -> None:
    given = config(
        log_policies=policy("exclude_node"), max_restarts=1, resources={"slots_per_trial": num_slots}
    )
    experiment_id = submit(strict, given, SCRIPT)

    ended = wait_until(strict, experiment_id, "ERROR")

    (trial,) = trials(strict, experiment_id)
    assert (trial["state"], trial["restarts"]) == ("STATE_ERROR", 1)
    text = log_of(strict, experiment_id)
    assert EXCLUDES in text
    assert DONT_RETRY not in text
    assert text.count("crashed: resources failed") == 1
    assert "exclude_node" in text
    assert ended["state"] == "STATE_ERROR"


def test_exclude_node_without_launch_error_waits(patient: MasterForTest) -> None:
    given = config(log_policies=policy("exclude_node"), max_restarts=1)
    experiment_id = submit(patient, given, SCRIPT)
    wait_until(patient, experiment_id, "QUEUED")
    wait_until(patient, experiment_id, "RUNNING", "QUEUED")
    other_id = submit(patient, config("echo fine"), "")
    wait_until(patient, other_id, "COMPLETED")

    assert experiment(patient, experiment_id)["state"] == "STATE_QUEUED"
    assert trials(patient, experiment_id)[0]["restarts"] == 1
    assert EXCLUDES in log_of(patient, experiment_id)
    assert log_of(patient, experiment_id).count("crashed: resources failed") == 1

    patient.client().post(f"/api/v1/experiments/{experiment_id}/kill", {})
    wait_until(patient, experiment_id, "CANCELED")

    done = patient.det("e", "continue", str(experiment_id))
    assert done.returncode == 0, done.stderr
    wait_until(patient, experiment_id, "QUEUED", "RUNNING")
    patient.client().post(f"/api/v1/experiments/{experiment_id}/kill", {})
    wait_until(patient, experiment_id, "CANCELED")
    # Continuing lifts the exclusion: the user may have repaired the node.
    assert "Scheduling Trial" in log_of(patient, experiment_id)


def test_unsatisfiable_command_is_refused_without_launch_error(
    patient: MasterForTest, tmp_path: Path
) -> None:
    done = patient.det("command", "run", "--config", "resources.slots=2", "true")

    assert done.returncode != 0
    assert "resources.slots is 2; expected at most 1, the most slots of one machine" in done.stderr
    assert "request unfulfillable" in done.stderr


def test_template_with_too_many_slots_waits(patient: MasterForTest, tmp_path: Path) -> None:
    client = patient.client()
    template = {"resources": {"slots": 100}, "environment": {"environment_variables": ["SHOULDBE=SET"]}}
    client.post("/api/v1/templates/large", {"name": "large", "config": template})

    done = patient.det("command", "run", "--template", "large", "--detach", "true")

    assert done.returncode == 0, done.stderr
    task_id = done.stdout.split()[-1]
    command = client.get(f"/api/v1/commands/{task_id}")
    assert command["command"]["state"] == "STATE_QUEUED"
    assert "SHOULDBE=SET" in str(command["config"])
    assert patient.det("command", "run", "--config", "resources.slots=1", "true").returncode == 0
    client.post(f"/api/v1/commands/{task_id}/kill")


@pytest.mark.parametrize("written", [".*.*a|b", ".*?a", "a.*b"])
def test_policy_with_wildcards_matches_whole_line(written: str) -> None:
    (policy,) = compile_policies({"log_policies": [{"pattern": written}]})
    assert policy.text == written
    assert matches([policy], ["nothing\n", "xa b\n"]) == [(policy, "xa b")]


def test_policies_match_line_by_line() -> None:
    config = {
        "log_policies": [
            {"name": "oom", "pattern": ".*CUDA out of memory.*", "action": None},
            {"name": None, "pattern": "^fatal$", "action": {"type": "cancel_retries"}},
            {"name": "off", "pattern": None},
        ]
    }
    policies = compile_policies(config)

    assert [policy.name for policy in policies] == ["oom", None]
    assert [policy.action for policy in policies] == [None, "cancel_retries"]
    line = "RuntimeError: CUDA out of memory. Tried"
    assert matches(policies, ["fine\n", f"{line}\n"]) == [(policies[0], line)]
    assert matches(policies, ["not fatal\n"]) == []
    assert matches(policies, ["x\nfatal\ny\n"]) == [(policies[1], "fatal")]
    assert matches(policies, ["fatal\n", "x\n"]) == [(policies[1], "fatal")]
