"""Verdicts on runs and searches from ranks, signals and the master's state."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dstrial.cli.follow import (
    FollowResult,
    LogTail,
    Verdict,
    judge,
    judge_experiment,
    judge_search,
    outcome_of,
)
from dstrial.launch.failures import LaunchOutcome, RankFailure
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.master.store.views.observe import ExperimentView, LogRow, TrialView

FAILURE = RankFailure(
    rank=1, local_rank=1, pid=7, exit_code=3, signal_name=None, host="here", error="Traceback\nValueError: x"
)


def outcome(
    exit_code: int = 0, failure: RankFailure | None = None, stopped_by: str | None = None
) -> LaunchOutcome:
    return LaunchOutcome(exit_code, failure, (exit_code,), stopped_by, ())


ENDED_AT_ONCE = LaunchOutcome(130, None, (137, 0), "SIGINT", (0,), ended_at_once=True)


@pytest.mark.parametrize(
    ("ended", "status", "state", "exit_code"),
    [
        (outcome(), {"status": "completed"}, RunState.COMPLETED, 0),
        (outcome(), {}, RunState.COMPLETED, 0),
        (outcome(), {"status": "stopped: requested"}, RunState.COMPLETED, 0),
        (outcome(), {"status": "stopped: signal"}, RunState.STOPPED, 143),
        (outcome(), {"early_exit": "INVALID_HP"}, RunState.FAILED, 1),
        (outcome(stopped_by="SIGINT"), {"status": "stopped: signal"}, RunState.STOPPED, 130),
        (outcome(stopped_by="SIGTERM"), {}, RunState.STOPPED, 143),
        (outcome(stopped_by="SIGINT"), {"status": "completed"}, RunState.COMPLETED, 0),
        (outcome(130, stopped_by="SIGINT"), {"status": "training"}, RunState.STOPPED, 130),
        (outcome(143, stopped_by="SIGINT"), {"status": "completed"}, RunState.COMPLETED, 0),
        (outcome(143, stopped_by="SIGTERM"), {"status": "checkpointing"}, RunState.STOPPED, 143),
        (outcome(137, stopped_by="SIGTERM"), {"status": "completed"}, RunState.FAILED, 137),
        (ENDED_AT_ONCE, {"status": "training"}, RunState.STOPPED, 130),
        (ENDED_AT_ONCE, {"status": "completed"}, RunState.STOPPED, 130),
        (outcome(3, FAILURE), {"status": "training"}, RunState.FAILED, 3),
        (outcome(3, FAILURE, "SIGINT"), {"status": "checkpointing"}, RunState.FAILED, 3),
        (outcome(5), {}, RunState.FAILED, 5),
    ],
)
def test_verdict_follows_ranks_status_and_signal(
    ended: LaunchOutcome, status: dict[str, Any], state: RunState, exit_code: int
) -> None:
    verdict = judge(ended, status)
    assert (verdict.state, verdict.exit_code) == (state, exit_code)


def test_verdict_names_first_failing_rank() -> None:
    assert judge(outcome(3, FAILURE), {}).reason == "rank 1 failed first (exit code 3, host here)"


COMPLETED = Verdict(RunState.COMPLETED, 0)
FAILED = Verdict(RunState.FAILED, 3, "rank 1 failed first")


def experiment(state: str, exit_code: int | None = 0, end_reason: str | None = None) -> ExperimentView:
    trial = TrialView(1, state, "{}", 0, 0, None, False, exit_code, None, 1, 384)
    return ExperimentView(1, state, 0.0, end_reason, (trial,))


@pytest.mark.parametrize(
    ("followed", "judged", "expected"),
    [
        (FollowResult(experiment("COMPLETED"), None), COMPLETED, COMPLETED),
        (FollowResult(experiment("ERROR"), None), FAILED, FAILED),
        (
            FollowResult(experiment("ERROR", end_reason="no metric"), None),
            COMPLETED,
            Verdict(RunState.FAILED, 1, "no metric"),
        ),
        (FollowResult(experiment("CANCELED"), None), FAILED, Verdict(RunState.STOPPED, 1, "cancelled")),
        (FollowResult(None, None), COMPLETED, Verdict(RunState.FAILED, 1, "the experiment was deleted")),
        (
            FollowResult(experiment("PAUSED"), "SIGINT", is_detached=True),
            COMPLETED,
            Verdict(RunState.STOPPED, 130, "left to the master, which has saved batch 384 so far"),
        ),
        (
            FollowResult(experiment("ACTIVE"), None, is_master_gone=True),
            COMPLETED,
            Verdict(RunState.STOPPED, 1, "the master has ended"),
        ),
    ],
)
def test_judge_experiment_prefers_state_on_master(
    followed: FollowResult, judged: Verdict, expected: Verdict
) -> None:
    assert judge_experiment(followed, judged) == expected


def test_outcome_prefers_file_of_launcher(run_directory: RunDirectory) -> None:
    followed = FollowResult(experiment("ERROR", exit_code=7), None)
    assert outcome_of(run_directory, followed).exit_code == 7
    write_json_atomically(
        run_directory.outcome_path(), outcome(3, FAILURE).to_json() | {"is_consequence": False}
    )
    assert outcome_of(run_directory, followed) == outcome(3, FAILURE)


def test_outcome_over_hosts_is_first_failure(run_directory: RunDirectory) -> None:
    lost_peer = dataclasses.replace(FAILURE, rank=0, exit_code=1)
    first = dataclasses.replace(outcome(3, FAILURE), failed_s=2.0)
    later = dataclasses.replace(outcome(9, FAILURE), failed_s=3.0)
    without_peer = dataclasses.replace(outcome(1, lost_peer), is_consequence=True, failed_s=1.0)
    for node_idx, ended in enumerate([without_peer, later, first, outcome()]):
        write_json_atomically(run_directory.outcome_path(node_idx), ended.to_json())
    assert outcome_of(run_directory, FollowResult(experiment("ERROR", exit_code=1), None)) == first
    run_directory.begin_attempt(["x"])
    assert run_directory.outcome_paths() == []


def test_outcome_of_paused_trial_is_no_failure(run_directory: RunDirectory) -> None:
    ended = outcome_of(run_directory, FollowResult(experiment("PAUSED", exit_code=137), "SIGINT"))
    assert (ended.exit_code, ended.stopped_by) == (0, "SIGINT")


@pytest.mark.parametrize(
    ("state", "stopped_by", "expected"),
    [
        ("COMPLETED", None, (RunState.COMPLETED, 0, None)),
        ("COMPLETED", "SIGINT", (RunState.COMPLETED, 0, None)),
        ("PAUSED", "SIGTERM", (RunState.STOPPED, 143, "SIGTERM")),
        ("PAUSED", None, (RunState.STOPPED, 1, "paused")),
        ("ERROR", None, (RunState.FAILED, 3, "every trial failed")),
    ],
)
def test_search_verdict_follows_experiment_state(
    state: str, stopped_by: str | None, expected: tuple[RunState, int, str | None]
) -> None:
    followed = FollowResult(experiment(state, exit_code=3, end_reason="every trial failed"), stopped_by)
    assert judge_experiment(followed, judge_search(followed)) == Verdict(*expected)


def test_master_log_lines_about_waiting_are_shown() -> None:
    shown = list[tuple[str, int | None, str]]()
    master: Any = None
    log = LogTail(master, lambda *words: shown.append(words), {})
    for text in ("Scheduling Trial 1", "waiting for 2 slots: 1 of 2 is in use"):
        log._show_row(LogRow(1, None, "master", None, "INFO", text))
    assert shown == [("waiting for 2 slots: 1 of 2 is in use", None, "stdout")]
