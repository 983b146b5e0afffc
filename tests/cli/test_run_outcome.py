from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dstrial.cli.run_follow import FollowResult
from dstrial.cli.run_outcome import Verdict, judge, judge_experiment, outcome_of, summary
from dstrial.launch.failures import LaunchOutcome, RankFailure
from dstrial.local.json_files import append_json_line, write_json_atomically
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.local.run_monitor import RunView
from dstrial.master.store.views.observe import ExperimentView, TrialView
from dstrial.telemetry.samples import HOST_CLOCK, RankSample, RunTotals

UNKNOWN = RunView()

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


def test_the_first_failing_rank_is_the_reason() -> None:
    assert judge(outcome(3, FAILURE), {}).reason == "rank 1 failed first (exit code 3, host here)"


def summary_of(
    run_directory: RunDirectory, verdict: Verdict, view: RunView = UNKNOWN, steps_before: int | None = None
) -> str:
    return "\n".join(
        summary(
            run_directory,
            verdict,
            view,
            metric="accuracy",
            smaller_is_better=False,
            steps_before=steps_before,
            resume_command=["dstrial", "run", "my exp.yaml", "--resume", "latest"],
        )
    )


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, name="t", context_dir=tmp_path, command=["t"], config={})


def add_checkpoint(run_directory: RunDirectory, steps_completed: int) -> Path:
    checkpoint = run_directory.checkpoints_path / f"u{steps_completed}"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").write_text(
        f'{{"steps_completed": {steps_completed}, "time": "2026-{steps_completed:04}"}}'
    )
    return checkpoint


def test_the_summary_says_where_everything_lies_and_how_to_go_on(run_directory: RunDirectory) -> None:
    for steps, value in ((10, 0.5), (20, 0.75), (30, float("nan"))):
        row = {"group": "validation", "steps_completed": steps, "metrics": {"accuracy": value}}
        append_json_line(run_directory.metrics_path, row)
    checkpoint = add_checkpoint(run_directory, 30)
    text = summary_of(run_directory, Verdict(RunState.STOPPED, 130, "SIGINT"), RunView(30, 100))
    assert "state:         stopped at batch 30 of 100 (SIGINT)\n" in text
    assert "accuracy nan at batch 30, best 0.75 at batch 20" in text
    assert text.count(str(run_directory.path)) == 1, "the path of the run is told more than once"
    assert f"last:        checkpoints/{checkpoint.name} (batch 30)" in text
    assert "files:       metrics.jsonl, tensorboard, logs/attempt_1" in text
    assert "resume with:   dstrial run 'my exp.yaml' --resume latest" in text


def test_the_best_checkpoint_stands_beside_the_last(run_directory: RunDirectory) -> None:
    for steps, value in ((10, 0.9), (20, 0.75), (30, 0.95), (40, 0.5)):
        row = {"group": "validation", "steps_completed": steps, "metrics": {"accuracy": value}}
        append_json_line(run_directory.metrics_path, row)
    add_checkpoint(run_directory, 20)
    best = add_checkpoint(run_directory, 10)  # 30 was better, and is not kept
    last = add_checkpoint(run_directory, 40)
    lines = summary_of(run_directory, COMPLETED, RunView(40, 40)).splitlines()
    assert f"  best:        checkpoints/{best.name} (batch 10, accuracy 0.9)" in lines
    assert f"  last:        checkpoints/{last.name} (batch 40)" in lines


def test_what_the_run_told_of_itself_is_in_the_summary_and_a_damaged_file_is_left_out(
    run_directory: RunDirectory,
) -> None:
    totals = RunTotals()
    sample = RankSample(9, 0.9, 0.09, {"forward": 0.05}, HOST_CLOCK, None, 0, {})
    totals.add([sample], 72)
    write_json_atomically(run_directory.telemetry_path, totals.to_json(None))
    text = summary_of(run_directory, COMPLETED, RunView(10, 10))
    assert "speed:         80 records/s; 100 ms a batch of 8 records (the first is left out)\n" in text
    assert "step time:     data wait 10 %, forward 50 %, other 40 % (by host clock)\n" in text
    assert "compute:       FLOPs unknown: not counted\n" in text

    for damaged in ("{", "[1]", '{"num_batches": 1}', '{"num_batches": "many", "seconds": []}'):
        run_directory.telemetry_path.write_text(damaged)
        assert "speed:" not in summary_of(run_directory, COMPLETED, RunView(10, 10))


def test_a_last_checkpoint_that_is_the_best_is_named_once(run_directory: RunDirectory) -> None:
    row = {"group": "validation", "steps_completed": 10, "metrics": {"accuracy": 0.9}}
    append_json_line(run_directory.metrics_path, row)
    checkpoint = add_checkpoint(run_directory, 10)
    text = summary_of(run_directory, COMPLETED, RunView(10, 10))
    assert "  best:        the last (batch 10, accuracy 0.9)" in text
    assert text.count(checkpoint.name) == 1


def test_paths_below_the_working_directory_are_relative(
    run_directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = summary_of(run_directory, COMPLETED)
    assert f"run directory: {run_directory.path.relative_to(tmp_path)}, with" in text
    assert str(tmp_path) not in text


def test_a_run_without_a_checkpoint_does_not_offer_to_resume(run_directory: RunDirectory) -> None:
    text = summary_of(run_directory, Verdict(RunState.FAILED, 1, "rank 0 failed first"))
    assert "state:         failed (rank 0 failed first; no checkpoint)" in text
    assert "resume" not in text


@pytest.mark.parametrize(
    ("saved", "view", "state"),
    [
        (184, RunView(220, 345), "stopped at batch 220 of 345 (ended at once; batches after 184 are lost)"),
        (None, RunView(220, 345), "stopped at batch 220 of 345 (ended at once; no checkpoint)"),
        (184, UNKNOWN, "stopped (ended at once)"),
    ],
)
def test_what_an_end_without_a_checkpoint_loses_is_said(
    saved: int | None, view: RunView, state: str, run_directory: RunDirectory
) -> None:
    if saved is not None:
        add_checkpoint(run_directory, saved)
    text = summary_of(run_directory, Verdict(RunState.STOPPED, 130, "ended at once"), view)
    assert f"state:         {state}\n" in text


@pytest.mark.parametrize(
    ("steps_before", "state"),
    [
        (345, "completed at batch 345 of 345 (nothing was left to train)"),
        (184, "completed at batch 345 of 345"),
    ],
)
def test_a_resume_after_the_end_says_that_nothing_was_left_to_train(
    steps_before: int, state: str, run_directory: RunDirectory
) -> None:
    verdict = Verdict(RunState.COMPLETED, 0)
    assert f"state:         {state}\n" in summary_of(run_directory, verdict, RunView(345, 345), steps_before)


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
            Verdict(
                RunState.STOPPED, 130, "left to the master, which has saved batch 384 so far", goes_on=True
            ),
        ),
        (
            FollowResult(experiment("ACTIVE"), None, is_master_gone=True),
            COMPLETED,
            Verdict(RunState.STOPPED, 1, "the master has ended", goes_on=True),
        ),
    ],
)
def test_what_the_master_says_of_the_experiment_goes_before_what_its_ranks_did(
    followed: FollowResult, judged: Verdict, expected: Verdict
) -> None:
    assert judge_experiment(followed, judged) == expected


def test_the_launcher_knows_better_than_the_master_how_ranks_ended(tmp_path: Path) -> None:
    run_directory = RunDirectory.create(tmp_path, name="x", context_dir=tmp_path, command=["x"], config={})
    followed = FollowResult(experiment("ERROR", exit_code=7), None)
    assert outcome_of(run_directory, followed).exit_code == 7
    write_json_atomically(
        run_directory.outcome_path(), outcome(3, FAILURE).to_json() | {"is_consequence": False}
    )
    assert outcome_of(run_directory, followed) == outcome(3, FAILURE)


def test_outcome_of_several_hosts_is_that_of_the_first_failure(tmp_path: Path) -> None:
    run_directory = RunDirectory.create(tmp_path, name="x", context_dir=tmp_path, command=["x"], config={})
    lost_peer = dataclasses.replace(FAILURE, rank=0, exit_code=1)
    first = dataclasses.replace(outcome(3, FAILURE), failed_s=2.0)
    later = dataclasses.replace(outcome(9, FAILURE), failed_s=3.0)
    without_peer = dataclasses.replace(outcome(1, lost_peer), is_consequence=True, failed_s=1.0)
    for node_idx, ended in enumerate([without_peer, later, first, outcome()]):
        write_json_atomically(run_directory.outcome_path(node_idx), ended.to_json())
    assert outcome_of(run_directory, FollowResult(experiment("ERROR", exit_code=1), None)) == first
    run_directory.begin_attempt(["x"])
    assert run_directory.outcome_paths() == []


def test_a_trial_that_was_ended_for_a_pause_has_not_failed(tmp_path: Path) -> None:
    run_directory = RunDirectory.create(tmp_path, name="x", context_dir=tmp_path, command=["x"], config={})
    ended = outcome_of(run_directory, FollowResult(experiment("PAUSED", exit_code=137), "SIGINT"))
    assert (ended.exit_code, ended.stopped_by) == (0, "SIGINT")
