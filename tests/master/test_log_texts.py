"""The master's log lines that scripts of Determined users search for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from determined.common import api
from determined.common.api import bindings
from submitting import agent_of, config, log_of, submit, trials, wait_until

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

ENDED_WELL = "resources exited successfully with a zero exit code"
FAILED = "resources failed with non-zero exit code: container failed with non-zero exit code: 3 (exit code 3)"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=1) as started:
        yield started


@pytest.mark.parametrize(
    ("entrypoint", "state", "text"), [("true", "COMPLETED", ENDED_WELL), ("exit 3", "ERROR", FAILED)]
)
def test_trial_log_contains_expected_master_lines(
    master: MasterForTest, entrypoint: str, state: str, text: str
) -> None:
    experiment_id = submit(master, config(entrypoint), "")
    wait_until(master, experiment_id, state)

    log = log_of(master, experiment_id)

    (line,) = [line for line in log.splitlines() if "New trial runner in (container " in line]
    assert line.endswith(f") on agent {agent_of(master)}")
    assert text in log
    assert len(trials(master, experiment_id)) == 1


def test_nul_in_log_message_round_trips(master: MasterForTest) -> None:
    experiment_id = submit(master, config(r"printf 'a\0b \033[2J\n'"), "")
    wait_until(master, experiment_id, "COMPLETED")
    (trial,) = trials(master, experiment_id)

    session = api.Session(master.address, "determined", master.client().token, None)
    lines = list(bindings.get_TrialLogs(session, trialId=trial["id"]))

    assert [line.message.partition("|| ")[2] for line in lines if "\0" in line.message] == ["a\0b \\x1b[2J\n"]
    assert [line.log for line in lines if "\0" in (line.log or "")] == ["a\0b \\x1b[2J\n"]


@pytest.mark.parametrize(("script", "text"), [("exit 0", ENDED_WELL), ("exit 3", FAILED)])
def test_command_log_contains_exit_line(master: MasterForTest, script: str, text: str) -> None:
    done = master.det("command", "run", "--config", "resources.slots=0", "sh", "-c", script)

    assert text in done.stdout, done.stdout + done.stderr
