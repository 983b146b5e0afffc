"""``det agent disable`` stops running tasks and keeps new tasks waiting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from submitting import config, experiment, log_of, submit, trials, wait_until
from tasks_here import TasksHere, wait_for

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

WAITS = "the agent is disabled, so nothing starts"


@pytest.fixture
def tasks(task_master: MasterForTest, tmp_path: Path) -> TasksHere:
    return TasksHere(task_master, tmp_path)


def agent_of(tasks: TasksHere) -> str:
    return str(tasks.session.get("api/v1/agents").json()["agents"][0]["id"])


def test_agent_disable_stops_zero_slot_tasks_until_enabled(tasks: TasksHere) -> None:
    agent = agent_of(tasks)
    running = tasks.run("sleep", "300", **{"resources.slots": 0})
    trial_of = submit(
        tasks.master,
        config("sleep 300", resources={"slots_per_trial": 0}),
        "",
    )
    wait_for(lambda: tasks.command(running)["state"] == "STATE_RUNNING", "the command does not run")
    wait_until(tasks.master, trial_of, "RUNNING")

    tasks.ok_as_admin("agent", "disable", agent)
    try:
        wait_for(lambda: tasks.command(running)["state"] == "STATE_TERMINATED", "the command goes on")
        wait_for(lambda: experiment(tasks.master, trial_of)["state"] == "STATE_QUEUED", "the trial goes on")
        late = tasks.run("true", **{"resources.slots": 0})
        other = submit(tasks.master, config("true", resources={"slots_per_trial": 0}), "")
        wait_for(lambda: WAITS in tasks.ok("task", "logs", late), "the command is not told")
        wait_for(lambda: WAITS in log_of(tasks.master, other), "the trial is not told")
        assert tasks.command(late)["state"] == "STATE_QUEUED"
        assert experiment(tasks.master, other)["state"] == "STATE_QUEUED"
        assert trials(tasks.master, trial_of)[0]["restarts"] == 0
    finally:
        tasks.ok_as_admin("agent", "enable", agent)
    wait_for(lambda: tasks.command(late)["state"] == "STATE_TERMINATED", "the command does not start")
    wait_until(tasks.master, other, "COMPLETED")
    wait_until(tasks.master, trial_of, "RUNNING")
    tasks.ok("experiment", "kill", str(trial_of))


def test_agent_drain_finishes_tasks_and_starts_none(tasks: TasksHere) -> None:
    agent = agent_of(tasks)
    program = "import time, os; print(os.getpid(), flush=True); time.sleep(300)"
    running = tasks.run(sys.executable, "-c", program, **{"resources.slots": 0})
    wait_for(lambda: tasks.command(running)["state"] == "STATE_RUNNING", "the command does not run")

    tasks.ok_as_admin("agent", "disable", agent, "--drain")
    try:
        late = tasks.run("true", **{"resources.slots": 0})
        wait_for(lambda: WAITS in tasks.ok("task", "logs", late), "the command is not told")
        assert tasks.command(running)["state"] == "STATE_RUNNING"
        assert tasks.command(late)["state"] == "STATE_QUEUED"
    finally:
        tasks.ok_as_admin("agent", "enable", agent)
    wait_for(lambda: tasks.command(late)["state"] == "STATE_TERMINATED", "the command does not start")
    tasks.ok("command", "kill", running)


def test_trial_waits_for_disabled_slot(tasks: TasksHere) -> None:
    agent = agent_of(tasks)
    (shown,) = tasks.session.get("api/v1/agents").json()["agents"]
    tasks.ok_as_admin("slot", "disable", agent, "0")
    try:
        waits = submit(tasks.master, config("true", resources={"slots_per_trial": 1}), "")
        text = "needs 1 slot and waits; this master has 0. Enable what is switched off (`det agent list`, `det slot list`)"
        assert len(shown["slots"]) == 1
        wait_for(lambda: text in log_of(tasks.master, waits), "the trial is not told")
        assert experiment(tasks.master, waits)["state"] == "STATE_QUEUED"
    finally:
        tasks.ok_as_admin("slot", "enable", agent, "0")
    wait_until(tasks.master, waits, "COMPLETED")
