"""Show the progress of ``dstrial run`` as a bar or plain lines, then its summary."""

from __future__ import annotations

import collections
import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dstrial.cli.follow import Verdict
from dstrial.cli.streams import LossTolerantStream, command_of
from dstrial.config.experiment_config.config import ExperimentConfig
from dstrial.errors import DstrialError
from dstrial.local.checkpoint_directory import StoredCheckpoint, list_checkpoints, newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RunDirectory, RunState, shown_path
from dstrial.local.run_monitor import RunView, named_metric, number, read_validations, report_line
from dstrial.master.store.views.observe import ExperimentView, TrialView
from dstrial.object_storage import address_of, recorded_storage
from dstrial.telemetry.summary import summary_rows
from dstrial.visible_text import visible


class Display:
    """Shows one attempt at a run as plain lines, one per report.

    Args:
        out: standard output.
        err: standard error.
        num_ranks: number of ranks; if 1, output lines have no rank as prefix.
        metric: the validation metric to show.
    """

    def __init__(
        self, out: LossTolerantStream, err: LossTolerantStream, *, num_ranks: int, metric: str | None
    ) -> None:
        self._out = out
        self._err = err
        self._num_ranks = num_ranks
        self._metric = metric

    def line(self, text: str, rank: int | None = None, stream: str = "stdout") -> None:
        """Show a line that a rank (None: the launcher) has written to ``stream``."""
        prefix = "" if self._num_ranks == 1 or rank is None else f"[rank {rank}] "
        is_error = rank is not None and stream == "stderr"
        self._write(visible(prefix + text), self._err if is_error else self._out)

    def view(self, view: RunView) -> None:
        """Show the training and validation reports that are new in ``view``."""
        for report in view.new_reports:
            if report.group in ("training", "validation"):
                self.line(report_line(report, view.batches_total, self._metric))

    def close(self) -> None:
        """End the display; later output is printed below it."""

    def _write(self, text: str, stream: LossTolerantStream) -> None:
        stream.write(text + "\n")


class BarDisplay(Display):
    """Shows an attempt as a progress bar in the last line, below all other output."""

    def __init__(
        self, out: LossTolerantStream, err: LossTolerantStream, *, num_ranks: int, metric: str | None
    ) -> None:
        super().__init__(out, err, num_ranks=num_ranks, metric=metric)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(file=cast(TextIO, out), highlight=False))
        self._task = self._progress.add_task("starting", total=None)
        self._newest: dict[str, str] = {}
        self._has_begun = False
        self._progress.start()

    def view(self, view: RunView) -> None:
        for report in view.new_reports:
            shown = named_metric(report, self._metric if report.group == "validation" else "loss")
            if shown is not None and report.group in ("training", "validation"):
                self._newest[report.group] = f"{report.group} {shown[0]} {number(shown[1])}"
        if view.batches_trained is None or view.batches_total is None:
            return
        if not self._has_begun:
            self._has_begun = True
            # The batches before a resume must not count as speed.
            self._progress.reset(self._task, completed=view.batches_trained)
        place = f"batch {view.batches_trained}/{view.batches_total}"
        self._progress.update(
            self._task,
            total=view.batches_total,
            completed=view.batches_trained,
            description="  ".join([place, *self._newest.values()]),
        )

    def close(self) -> None:
        self._progress.stop()

    def _write(self, text: str, stream: LossTolerantStream) -> None:  # noqa: ARG002 - a terminal shows both
        self._progress.console.print(Text(text), soft_wrap=True)


def summary(
    run_directory: RunDirectory,
    verdict: Verdict,
    view: RunView,
    *,
    metric: str,
    smaller_is_better: bool,
    best: tuple[StoredCheckpoint, float] | None,
    resume_command: Sequence[str],
    steps_before: int | None = None,
) -> list[str]:
    """Return the summary's lines: state, validations, paths, command to resume.

    Args:
        run_directory: the run.
        verdict: how the attempt ended.
        view: the run's last progress.
        metric: the searcher's metric.
        smaller_is_better: whether the best value of ``metric`` is the smallest.
        best: result of ``best_stored``.
        resume_command: words of the command that resumes the run; if empty, none is shown.
        steps_before: batches trained before the attempt; None for a new run.
    """
    last = newest_checkpoint(run_directory.checkpoints_path)
    rows = [("state", _state_text(verdict, view, steps_before, has_checkpoint=last is not None))]
    rows += _validation_rows(run_directory, metric, smaller_is_better=smaller_is_better)
    rows += skipped_rows(run_directory) + telemetry_rows(run_directory)
    rows.append(("run directory", f"{shown_path(run_directory.path)}, with"))
    if last is not None:
        rows += _checkpoint_rows(last, best, metric)
    attempt = run_directory.attempt_logs_path(run_directory.read_record().num_attempts)
    parts = [run_directory.metrics_path, run_directory.tensorboard_path, attempt]
    rows.append(("  files", ", ".join(str(part.relative_to(run_directory.path)) for part in parts)))
    if verdict.state is not RunState.COMPLETED and last is not None and resume_command:
        rows.append(("resume with", shlex.join(resume_command)))
    return row_lines(rows)


def _state_text(verdict: Verdict, view: RunView, steps_before: int | None, *, has_checkpoint: bool) -> str:
    place = ""
    if view.batches_trained is not None:
        place = f" at batch {view.batches_trained}"
        place += "" if view.batches_total is None else f" of {view.batches_total}"
    details = [verdict.reason] if verdict.reason else []
    has_trained = steps_before is None or steps_before != view.batches_trained
    if verdict.state is RunState.COMPLETED and not has_trained:
        details.append("nothing was left to train")
    elif verdict.state is RunState.FAILED and not has_checkpoint:
        details.append("no checkpoint")
    return f"{verdict.state.value}{place}" + (f" ({'; '.join(details)})" if details else "")


def _validation_rows(
    run_directory: RunDirectory, metric: str, *, smaller_is_better: bool
) -> list[tuple[str, str]]:
    validations = read_validations(run_directory, metric)
    if not validations:
        return []
    last = max(validations)
    text = f"{metric} {validations[last]:.6g} at batch {last}"
    measured = [(value, step) for step, value in sorted(validations.items()) if not math.isnan(value)]
    if measured:
        value, step = min(measured, key=lambda one: one[0] if smaller_is_better else -one[0])
        text += f", best {value:.6g} at batch {step}"
    return [("validation", text)]


def _checkpoint_rows(
    last: StoredCheckpoint, best: tuple[StoredCheckpoint, float] | None, metric: str
) -> list[tuple[str, str]]:
    rows = []
    if best is not None:
        where = "the last" if best[0] == last else f"checkpoints/{best[0].path.name}"
        rows.append(("  best", f"{where} (batch {best[0].steps_completed}, {metric} {best[1]:.6g})"))
    rows.append(("  last", f"checkpoints/{last.path.name} (batch {last.steps_completed})"))
    settings = recorded_storage(last.path)
    if settings is not None:
        rows.append(("  stored in", address_of(settings)))
    return rows


def best_stored(
    run_directory: RunDirectory, metric: str, smaller_is_better: bool
) -> tuple[StoredCheckpoint, float] | None:
    """Return the checkpoint with the best validation, and that value of ``metric``.

    None if no stored checkpoint was validated.
    """
    measured = read_validations(run_directory, metric)
    found = [
        (checkpoint, measured[checkpoint.steps_completed])
        for checkpoint in list_checkpoints(run_directory.checkpoints_path)
        if not math.isnan(measured.get(checkpoint.steps_completed, math.nan))
    ]
    return min(found, key=lambda one: one[1] if smaller_is_better else -one[1], default=None)


def row_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Format (name, value) rows of the summary, one line each."""
    return [f"{name + ':':<15}{value}" for name, value in rows]


def telemetry_rows(run_directory: RunDirectory) -> list[tuple[str, str]]:
    with contextlib.suppress(
        DstrialError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError
    ):
        return summary_rows(read_json(run_directory.telemetry_path) or {})
    return []  # the file is damaged; the rest of the summary is still shown


def skipped_rows(run_directory: RunDirectory) -> list[tuple[str, str]]:
    """Return a (name, value) row on skipped optimizer steps, in a list; [] if none."""
    status: Mapping[str, object] = {}
    with contextlib.suppress(DstrialError):
        status = read_json(run_directory.status_path) or {}
    if not status.get("skipped_steps"):
        return []
    text = f"{status['skipped_steps']} of {status.get('optimizer_steps')} (gradients were not finite)"
    return [("skipped steps", text)]


def best_trial(view: ExperimentView, experiment: ExperimentConfig) -> TrialView | None:
    """Return a search's trial with the best metric; None before the first metric."""
    sign = 1 if experiment.smaller_is_better else -1
    measured = [(sign * one.best_metric, one.id, one) for one in view.trials if one.best_metric is not None]
    return min(measured)[2] if measured else None


def progress_line(view: ExperimentView, experiment: ExperimentConfig) -> str:
    """Format a search's progress: ``40 %  2 active  accuracy 0.93 (trial 4)``."""
    counts = collections.Counter(trial.state.lower() for trial in view.trials)
    parts = [f"{view.progress * 100:.0f} %", ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))]
    best = best_trial(view, experiment)
    if best is not None:
        parts.append(f"{experiment.metric} {number(best.best_metric or 0.0)} (trial {best.id})")
    return "  ".join(parts)


def search_summary(
    view: ExperimentView, experiment: ExperimentConfig, verdict: Verdict, run_directory: RunDirectory
) -> list[str]:
    """Return the lines of a search's summary: state, best trial and best checkpoint."""
    rows = [("state", verdict.state.value + (f" ({verdict.reason})" if verdict.reason else ""))]
    rows.append(("trials", f"{len(view.trials)}; `{command_of('dstrial')} show {view.id}` lists them"))
    best = best_trial(view, experiment)
    if best is not None:
        rows.append(("best", f"{experiment.metric} {best.best_metric:.6g} of trial {best.id}"))
    rows.append(("run directory", shown_path(run_directory.path)))
    if best is not None and best.best_checkpoint is not None:
        path = run_directory.checkpoints_path / best.best_checkpoint
        # A checkpoint without a directory is in another storage.
        rows.append(("  best", f"checkpoints/{path.name}" if path.is_dir() else path.name))
    return row_lines(rows)
