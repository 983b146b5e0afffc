"""What became of a ``dstrial run``, and what is printed at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dstrial.errors import DstrialError
from dstrial.launch.failures import LaunchOutcome
from dstrial.local.checkpoint_directory import list_checkpoints, newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RunDirectory, RunState, shown_path
from dstrial.local.run_monitor import RunView, read_validations
from dstrial.telemetry.summary import summary_rows

if TYPE_CHECKING:
    from dstrial.cli.run_follow import FollowResult

_BY_SIGTERM = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The end of an attempt, for the run's record."""

    state: RunState
    exit_code: int  # of this command
    reason: str | None = None  # why it did not complete, or was stopped
    goes_on: bool = False  # the master may still save a checkpoint: what is lost is unknown


def outcome_of(run_directory: RunDirectory, followed: FollowResult) -> LaunchOutcome:
    """Return how the last attempt's ranks ended, by their launcher or else the master."""
    found = []
    with contextlib.suppress(DstrialError):
        files = [fields for path in run_directory.outcome_paths() if (fields := read_json(path))]
        found = [LaunchOutcome.from_json(fields) for fields in files]
    if found:
        # Of several hosts, the first one whose rank failed by itself.
        outcome = min(found, key=lambda one: (one.failed_s is None, one.is_consequence, one.failed_s))
    else:
        trials = () if followed.view is None else followed.view.trials
        exit_code = next((trial.exit_code for trial in trials if trial.exit_code is not None), 0)
        if followed.stopped_by is not None:
            exit_code = 0  # it was ended for the pause
        outcome = LaunchOutcome(exit_code, None, (exit_code,), None, ())
    return dataclasses.replace(outcome, stopped_by=followed.stopped_by)


def judge_experiment(followed: FollowResult, judged: Verdict, *, has_own_master: bool = False) -> Verdict:
    """Correct a verdict on the ranks by the experiment's state."""
    view = followed.view
    if view is None:
        return Verdict(RunState.FAILED, 1, "the experiment was deleted")
    if has_own_master and followed.is_detached:
        return Verdict(RunState.STOPPED, 128 + signal.SIGINT, "ended at once")
    if has_own_master and followed.is_master_gone:
        # Signals that end a job reach its master, too, which stops the trial.
        return Verdict(RunState.FAILED, 1, "its master has ended") if followed.stopped_by is None else judged
    if followed.is_detached:
        saved = max(
            (trial.batches_saved for trial in view.trials if trial.batches_saved is not None), default=None
        )
        what = "nothing" if saved is None else f"batch {saved}"
        reason = f"left to the master, which has saved {what} so far"
        return Verdict(RunState.STOPPED, 128 + signal.SIGINT, reason, goes_on=True)
    if followed.is_master_gone:
        return Verdict(RunState.STOPPED, 1, "the master has ended", goes_on=True)
    if view.state == "CANCELED":
        return Verdict(RunState.STOPPED, 1, "cancelled")
    if view.state == "ERROR" and judged.state is not RunState.FAILED:
        reasons = [trial.exit_reason for trial in view.trials] + [view.end_reason]
        return Verdict(RunState.FAILED, 1, next((reason for reason in reasons if reason), "the trial failed"))
    return judged


def judge(outcome: LaunchOutcome, status: Mapping[str, object]) -> Verdict:
    """Judge an attempt by its ranks and ``status.json``.

    It has completed if all ranks exited 0, which the launcher takes for a failure before the end of training, or if the trial
    asked itself to stop before the ranks were asked to.
    """
    text = str(status.get("status", ""))
    if outcome.ended_at_once:
        return Verdict(RunState.STOPPED, outcome.exit_code, "ended at once")
    if outcome.first_failure is not None:
        return Verdict(RunState.FAILED, outcome.exit_code or 1, outcome.first_failure.headline.rstrip(":"))
    if outcome.stopped_by is not None and text != "completed":
        exit_code = 128 + signal.Signals[outcome.stopped_by].value
        return Verdict(RunState.STOPPED, exit_code, outcome.stopped_by)
    # A rank that was asked to stop while it shut down, after its work was done.
    was_only_asked_to_stop = outcome.stopped_by is not None and set(outcome.exit_codes) <= {0, _BY_SIGTERM}
    if outcome.exit_code != 0 and not (text == "completed" and was_only_asked_to_stop):
        return Verdict(RunState.FAILED, outcome.exit_code, f"exit code {outcome.exit_code}")
    if status.get("early_exit") is not None:
        return Verdict(RunState.FAILED, 1, f"the trial gave up: {status['early_exit']}")
    if text == "stopped: requested":
        return Verdict(RunState.COMPLETED, 0, "the trial's own request")
    if text.startswith("stopped"):
        return Verdict(RunState.STOPPED, _BY_SIGTERM, text.partition(": ")[2] or text)
    return Verdict(RunState.COMPLETED, 0)


def summary(
    run_directory: RunDirectory,
    verdict: Verdict,
    view: RunView,
    *,
    metric: str,
    smaller_is_better: bool,
    resume_command: Sequence[str],
    steps_before: int | None = None,
) -> list[str]:
    """Return the last lines: state, validations, places, and the command that resumes.

    ``steps_before`` are the batches of the checkpoint that the attempt resumed; None for none.
    """
    stored = sorted(list_checkpoints(run_directory.checkpoints_path), key=lambda found: found.time)
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    place = ""
    if view.batches_trained is not None:
        place = f" at batch {view.batches_trained}"
        place += "" if view.batches_total is None else f" of {view.batches_total}"
    saved = None if checkpoint is None else checkpoint.steps_completed
    details = [verdict.reason, _what_remains(verdict, view.batches_trained, saved, steps_before)]
    described = "; ".join(detail for detail in details if detail is not None)
    rows = [("state", f"{verdict.state.value}{place}" + (f" ({described})" if described else ""))]
    validations = read_validations(run_directory, metric)
    measured = {step: value for step, value in validations.items() if not math.isnan(value)}
    choose = min if smaller_is_better else max
    if validations:
        last = max(validations)
        text = f"{metric} {validations[last]:.6g} at batch {last}"
        if measured:
            best = choose(sorted(measured), key=lambda step: measured[step])
            text += f", best {measured[best]:.6g} at batch {best}"
        rows.append(("validation", text))
    skipped = skipped_steps(run_directory)
    if skipped is not None:
        rows.append(("skipped steps", skipped))
    rows += telemetry_rows(run_directory)
    rows.append(("run directory", f"{shown_path(run_directory.path)}, with"))
    if checkpoint is not None:
        of_best = [found for found in stored if found.steps_completed in measured]
        best_stored = choose(of_best, key=lambda found: measured[found.steps_completed], default=None)
        if best_stored is not None:
            value = measured[best_stored.steps_completed]
            where = (
                "the last" if best_stored.uuid == checkpoint.uuid else f"checkpoints/{best_stored.path.name}"
            )
            rows.append(("  best", f"{where} (batch {best_stored.steps_completed}, {metric} {value:.6g})"))
        rows.append(("  last", f"checkpoints/{checkpoint.path.name} (batch {checkpoint.steps_completed})"))
    attempt = run_directory.attempt_logs_path(run_directory.read_record().num_attempts)
    parts = [run_directory.metrics_path, run_directory.tensorboard_path, attempt]
    rows.append(("  files", ", ".join(str(part.relative_to(run_directory.path)) for part in parts)))
    if verdict.state is not RunState.COMPLETED and checkpoint is not None:
        rows.append(("resume with", shlex.join(resume_command)))
    return [f"{name + ':':<15}{value}" for name, value in rows]


def at_failure(view: RunView, outcome: LaunchOutcome) -> RunView:
    """Return a view at the failed rank's batch if no report has reached it."""
    told = outcome.first_failure and outcome.first_failure.batches_trained
    return dataclasses.replace(view, batches_trained=max(told, view.batches_trained or 0)) if told else view


def telemetry_rows(run_directory: RunDirectory) -> list[tuple[str, str]]:
    with contextlib.suppress(
        DstrialError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError
    ):
        predicted = read_json(run_directory.memory_path) or {}
        return summary_rows(read_json(run_directory.telemetry_path) or {}, predicted.get("stages", ()))
    return []  # of another release, or damaged: the rest of the summary is what counts


def skipped_steps(run_directory: RunDirectory) -> str | None:
    """Return how many of how many optimizer steps were skipped; None for none."""
    status: Mapping[str, object] = {}
    with contextlib.suppress(DstrialError):
        status = read_json(run_directory.status_path) or {}
    if not status.get("skipped_steps"):
        return None
    return f"{status['skipped_steps']} of {status.get('optimizer_steps')} (gradients were not finite)"


def _what_remains(
    verdict: Verdict, batches_trained: int | None, batches_saved: int | None, steps_before: int | None
) -> str | None:
    """Return what is kept and lost of the trained batches."""
    if verdict.state is RunState.COMPLETED:
        has_trained = None in (steps_before, batches_trained) or batches_trained != steps_before
        return None if has_trained else "nothing was left to train"
    if verdict.goes_on:
        return None
    if batches_saved is None:
        return "no checkpoint"
    is_ahead = batches_trained is not None and batches_trained > batches_saved
    return f"batches after {batches_saved} are lost" if is_ahead else None


def failure_text(outcome: LaunchOutcome) -> str:
    """Return the first failing rank and its traceback; empty for none."""
    text = ""
    if outcome.killed_ranks and not outcome.ended_at_once:
        names = ", ".join(map(str, outcome.killed_ranks))
        text += f"rank(s) {names} did not end in time and were killed\n"
    if outcome.first_failure is not None:
        text += f"{outcome.first_failure.describe()}\n"
    return text
