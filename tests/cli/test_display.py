"""Progress displays and final summaries of runs and searches."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from dstrial.cli import display
from dstrial.cli.display import BarDisplay, Display, best_stored, progress_line, search_summary, summary
from dstrial.cli.follow import Verdict
from dstrial.cli.streams import LossTolerantStream
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.local.json_files import append_json_line, write_json_atomically
from dstrial.local.run_directory import RunDirectory, RunState, shown_path
from dstrial.local.run_monitor import Report, RunView
from dstrial.master.store.views.observe import ExperimentView, TrialView
from dstrial.telemetry.samples import HOST_CLOCK, RankSample, RunTotals

UNKNOWN = RunView()
COMPLETED = Verdict(RunState.COMPLETED, 0)
TRAINING = Report("training", 10, {"loss": 0.123456, "samples_per_second": 2000.0})
VALIDATION = Report("validation", 10, {"loss": 0.5, "accuracy": 0.75})
OTHER = Report("system", 10, {"free": 1.0})


def view(batches_trained: int = 10, reports: tuple[Report, ...] = ()) -> RunView:
    return RunView(batches_trained, 100, reports)


def streams() -> tuple[LossTolerantStream, LossTolerantStream]:
    return LossTolerantStream(sys.stdout), LossTolerantStream(sys.stderr)


def test_plain_display_shows_one_line_per_report(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Display(*streams(), num_ranks=1, metric="accuracy")
    shown.view(view(reports=(TRAINING, VALIDATION, OTHER)))
    shown.view(view())
    assert capsys.readouterr().out.splitlines() == [
        "batch 10/100  loss 0.1235  2000 samples/s",
        "batch 10/100  validation  accuracy 0.75",
    ]


def test_plain_display_keeps_stream_and_prefixes_several_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Display(*streams(), num_ranks=1, metric=None).line("[alone]", 0)
    shown = Display(*streams(), num_ranks=2, metric=None)
    shown.line("a", 0)
    shown.line("b", 1, "stderr")
    captured = capsys.readouterr()
    assert captured.out == "[alone]\n[rank 0] a\n"
    assert captured.err == "[rank 1] b\n"


def test_bar_shows_progress_below_lines_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    terminal = LossTolerantStream(written)
    shown = BarDisplay(terminal, terminal, num_ranks=2, metric="accuracy")
    shown.view(RunView())
    shown.line("[bold]not markup[/bold]", 1, "stderr")
    shown.view(view(reports=(TRAINING, VALIDATION, OTHER)))
    shown.close()
    text = written.getvalue()
    assert "[rank 1] [bold]not markup[/bold]" in text
    last = text[text.rindex("batch ") :]
    assert "batch 10/100  training loss 0.1235  validation accuracy 0.75" in last
    assert "time left" in last


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
            best=best_stored(run_directory, "accuracy", smaller_is_better=False),
            steps_before=steps_before,
            resume_command=["dstrial", "run", "my exp.yaml", "--resume", "latest"],
        )
    )


def add_checkpoint(run_directory: RunDirectory, steps_completed: int) -> Path:
    checkpoint = run_directory.checkpoints_path / f"u{steps_completed}"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").write_text(
        f'{{"steps_completed": {steps_completed}, "time": "2026-{steps_completed:04}"}}'
    )
    return checkpoint


def test_summary_names_state_paths_and_resume_command(run_directory: RunDirectory) -> None:
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


def test_summary_names_best_and_last_checkpoint(run_directory: RunDirectory) -> None:
    for steps, value in ((10, 0.9), (20, 0.75), (30, 0.95), (40, 0.5)):
        row = {"group": "validation", "steps_completed": steps, "metrics": {"accuracy": value}}
        append_json_line(run_directory.metrics_path, row)
    add_checkpoint(run_directory, 20)
    best = add_checkpoint(run_directory, 10)  # batch 30 was better, but its checkpoint was deleted
    last = add_checkpoint(run_directory, 40)
    lines = summary_of(run_directory, COMPLETED, RunView(40, 40)).splitlines()
    assert f"  best:        checkpoints/{best.name} (batch 10, accuracy 0.9)" in lines
    assert f"  last:        checkpoints/{last.name} (batch 40)" in lines


def test_summary_shows_telemetry_unless_it_is_damaged(
    run_directory: RunDirectory,
) -> None:
    totals = RunTotals()
    sample = RankSample(9, 0.9, 0.09, {"forward": 0.05}, HOST_CLOCK, None, 0, {})
    totals.add([sample], 72)
    write_json_atomically(run_directory.telemetry_path, totals.to_json(None))
    text = summary_of(run_directory, COMPLETED, RunView(10, 10))
    assert "speed:         80 records/s; 100 ms per batch of 8 records (without the first batch)\n" in text
    assert "step time:     data wait 10 %, forward 50 %, other 40 % (by host clock)\n" in text
    assert "compute:       FLOPs unknown: not counted\n" in text

    for damaged in ("{", "[1]", '{"num_batches": 1}', '{"num_batches": "many", "seconds": []}'):
        run_directory.telemetry_path.write_text(damaged)
        assert "speed:" not in summary_of(run_directory, COMPLETED, RunView(10, 10))


def test_summary_without_checkpoint_offers_no_resume(run_directory: RunDirectory) -> None:
    text = summary_of(run_directory, Verdict(RunState.FAILED, 1, "rank 0 failed first"))
    assert "state:         failed (rank 0 failed first; no checkpoint)" in text
    assert "resume" not in text


@pytest.mark.parametrize(
    ("steps_before", "state"),
    [
        (345, "completed at batch 345 of 345 (nothing was left to train)"),
        (184, "completed at batch 345 of 345"),
    ],
)
def test_summary_reports_nothing_left_to_train(
    steps_before: int, state: str, run_directory: RunDirectory
) -> None:
    verdict = Verdict(RunState.COMPLETED, 0)
    assert f"state:         {state}\n" in summary_of(run_directory, verdict, RunView(345, 345), steps_before)


CONFIG = """
name: search
entrypoint: ls
searcher: {name: random, max_trials: 3, metric: loss, smaller_is_better: true}
hyperparameters:
  lr: {type: log, base: 10, minval: -3, maxval: -1}
  width: 8
  nested: {depth: {type: int, minval: 1, maxval: 4}, fixed: {type: const, val: 1}}
  deepspeed_config: {train_batch_size: 8, optimizer: {type: Adam, params: {lr: 0.1}}}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentConfig:
    (tmp_path / "exp.yaml").write_text(CONFIG)
    return load_experiment(tmp_path / "exp.yaml", tmp_path, require_concrete=False)


def trial(number: int, state: str, metric: float | None) -> TrialView:
    hparams = {"lr": 0.00123456, "width": 8, "nested": {"depth": number, "fixed": 1}}
    hparams["deepspeed_config"] = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    row = (number, state, json.dumps(hparams), 10 * number, 0, metric, False, None, None, 1, None)
    return TrialView(*row, best_checkpoint=f"uuid-{number}")


VIEW = ExperimentView(
    7, "ACTIVE", 0.4, None, (trial(1, "COMPLETED", 0.5), trial(2, "ACTIVE", 0.25), trial(3, "ACTIVE", None))
)


def test_search_progress_is_single_line(experiment: ExperimentConfig) -> None:
    assert progress_line(VIEW, experiment) == "40 %  2 active, 1 completed  loss 0.25 (trial 2)"
    assert progress_line(ExperimentView(7, "ACTIVE", 0.0, None, ()), experiment) == "0 %  "


def test_search_summary_names_best_trial_and_checkpoint(
    experiment: ExperimentConfig, run_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "command_of", lambda name: name)
    (run_directory.checkpoints_path / "uuid-2").mkdir()
    assert search_summary(VIEW, experiment, Verdict(RunState.STOPPED, 130, "SIGINT"), run_directory) == [
        "state:         stopped (SIGINT)",
        "trials:        3; `dstrial show 7` lists them",
        "best:          loss 0.25 of trial 2",
        f"run directory: {shown_path(run_directory.path)}",
        "  best:        checkpoints/uuid-2",
    ]
    larger = dataclasses.replace(experiment, smaller_is_better=False)
    lines = search_summary(VIEW, larger, COMPLETED, run_directory)
    assert "best:          loss 0.5 of trial 1" in lines
    assert lines[-1] == "  best:        uuid-1"  # no local copy: it is in object storage
