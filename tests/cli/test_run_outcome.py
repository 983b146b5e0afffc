from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrial.cli.run_outcome import Verdict, judge, summary
from dstrial.launch.agent import LaunchOutcome
from dstrial.launch.failures import RankFailure
from dstrial.local.json_files import append_json_line, write_json_atomically
from dstrial.local.run_directory import RunDirectory, RunState

FAILURE = RankFailure(
    rank=1, local_rank=1, pid=7, exit_code=3, signal_name=None, host="here", error="Traceback\nValueError: x"
)


def outcome(
    exit_code: int = 0, failure: RankFailure | None = None, stopped_by: str | None = None
) -> LaunchOutcome:
    return LaunchOutcome(exit_code, failure, (exit_code,), stopped_by, ())


@pytest.mark.parametrize(
    ("ended", "status", "is_trial", "state", "exit_code"),
    [
        (outcome(), {"status": "completed"}, True, RunState.COMPLETED, 0),
        (outcome(), {}, False, RunState.COMPLETED, 0),
        (outcome(), {}, True, RunState.FAILED, 1),
        (outcome(), {"status": "training"}, True, RunState.FAILED, 1),
        (outcome(), {"status": "stopped: requested"}, True, RunState.COMPLETED, 0),
        (outcome(), {"status": "stopped: signal"}, True, RunState.STOPPED, 143),
        (outcome(), {"early_exit": "INVALID_HP"}, False, RunState.FAILED, 1),
        (outcome(stopped_by="SIGINT"), {"status": "stopped: signal"}, True, RunState.STOPPED, 130),
        (outcome(stopped_by="SIGTERM"), {}, False, RunState.STOPPED, 143),
        (outcome(stopped_by="SIGINT"), {"status": "completed"}, True, RunState.COMPLETED, 0),
        (outcome(130, stopped_by="SIGINT"), {"status": "training"}, True, RunState.STOPPED, 130),
        (outcome(3, FAILURE), {"status": "training"}, True, RunState.FAILED, 3),
        (outcome(3, FAILURE, "SIGINT"), {"status": "checkpointing"}, True, RunState.FAILED, 3),
        (outcome(5), {}, False, RunState.FAILED, 5),
    ],
)
def test_only_a_run_that_says_so_and_whose_ranks_exit_0_has_completed(
    ended: LaunchOutcome, status: dict[str, Any], is_trial: bool, state: RunState, exit_code: int
) -> None:
    verdict = judge(ended, status, is_trial=is_trial)
    assert (verdict.state, verdict.exit_code) == (state, exit_code)


def test_the_first_failing_rank_is_the_reason() -> None:
    assert (
        judge(outcome(3, FAILURE), {}, is_trial=True).reason == "rank 1 failed first (exit code 3, host here)"
    )


def summary_of(run_directory: RunDirectory, verdict: Verdict) -> str:
    return "\n".join(
        summary(
            run_directory,
            verdict,
            metric="accuracy",
            smaller_is_better=False,
            resume_command=["dstrial", "run", "my exp.yaml", "--resume", "latest"],
        )
    )


def test_the_summary_says_where_everything_lies_and_how_to_go_on(tmp_path: Path) -> None:
    run_directory = RunDirectory.create(tmp_path, name="t", context_dir=tmp_path, command=["t"], config={})
    write_json_atomically(run_directory.progress_path, {"batches_trained": 30, "batches_total": 100})
    for steps, value in ((10, 0.5), (20, 0.75), (30, float("nan"))):
        row = {"group": "validation", "steps_completed": steps, "metrics": {"accuracy": value}}
        append_json_line(run_directory.metrics_path, row)
    checkpoint = run_directory.checkpoints_path / "u"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").write_text('{"steps_completed": 30, "time": "2026"}')
    text = summary_of(run_directory, Verdict(RunState.STOPPED, 130, "SIGINT"))
    assert "state:         stopped at batch 30 of 100 (SIGINT)" in text
    assert "accuracy nan at batch 30, best 0.75 at batch 20" in text
    for path in (run_directory.path, checkpoint, run_directory.metrics_path, run_directory.tensorboard_path):
        assert str(path) in text
    assert "resume with:   dstrial run 'my exp.yaml' --resume latest" in text


def test_a_run_without_a_checkpoint_does_not_offer_to_resume(tmp_path: Path) -> None:
    run_directory = RunDirectory.create(tmp_path, name="t", context_dir=tmp_path, command=["t"], config={})
    text = summary_of(run_directory, Verdict(RunState.FAILED, 1, "rank 0 failed first"))
    assert "state:         failed (rank 0 failed first)" in text
    assert "resume" not in text
