"""What became of a ``dstrial run``, and what is printed at its end."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.local.run_monitor import read_validations

if TYPE_CHECKING:
    from dstrial.launch.agent import LaunchOutcome


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an attempt.

    Attributes:
        state: for the run's record.
        exit_code: of this command.
        reason: why it did not complete, or by what it was stopped; None if it simply completed.
    """

    state: RunState
    exit_code: int
    reason: str | None = None


def judge(outcome: LaunchOutcome, status: Mapping[str, object], *, is_trial: bool) -> Verdict:
    """Decide what became of an attempt.

    Args:
        outcome: how the ranks ended.
        status: what the trial kept in ``status.json``: its last status text and early exit.
        is_trial: whether the ranks ran a trial class, which says at its end that it completed.

    Returns:
        Completed only if all ranks exited 0 and, for a trial, it says so; a trial that asked itself to stop
        has completed, too.
    """
    text = str(status.get("status", ""))
    if outcome.first_failure is not None:
        return Verdict(RunState.FAILED, outcome.exit_code or 1, outcome.first_failure.headline.rstrip(":"))
    if outcome.stopped_by is not None and text != "completed":
        exit_code = 128 + signal.Signals[outcome.stopped_by].value
        return Verdict(RunState.STOPPED, exit_code, outcome.stopped_by)
    if outcome.exit_code != 0:
        return Verdict(RunState.FAILED, outcome.exit_code, f"exit code {outcome.exit_code}")
    if status.get("early_exit") is not None:
        return Verdict(RunState.FAILED, 1, f"the trial gave up: {status['early_exit']}")
    if text == "stopped: requested":
        return Verdict(RunState.COMPLETED, 0, "the trial's own request")
    if text.startswith("stopped"):
        return Verdict(RunState.STOPPED, 128 + signal.SIGTERM, text.partition(": ")[2] or text)
    if is_trial and text != "completed":
        return Verdict(RunState.FAILED, 1, "all ranks exited 0 before training was complete")
    return Verdict(RunState.COMPLETED, 0)


def summary(
    run_directory: RunDirectory,
    verdict: Verdict,
    *,
    metric: str,
    smaller_is_better: bool,
    resume_command: Sequence[str],
) -> list[str]:
    """What to print at the end: state, last and best validation, where everything lies, how to go on.

    Args:
        run_directory: the run.
        verdict: what became of the attempt.
        metric: the searcher metric.
        smaller_is_better: which way it is compared.
        resume_command: the command that goes on, shown unless the run completed.
    """
    progress = read_json(run_directory.progress_path) or {}
    place = ""
    if "batches_trained" in progress:
        place = f" at batch {progress['batches_trained']} of {progress['batches_total']}"
    by = "" if verdict.reason is None else f" ({verdict.reason})"
    rows = [("state", f"{verdict.state.value}{place}{by}")]
    validations = read_validations(run_directory, metric)
    if validations:
        last = max(validations)
        measured = {step: value for step, value in validations.items() if value == value}
        text = f"{metric} {validations[last]:.6g} at batch {last}"
        if measured:
            choose = min if smaller_is_better else max
            best = choose(measured, key=lambda step: measured[step])
            text += f", best {measured[best]:.6g} at batch {best}"
        rows.append(("validation", text))
    rows.append(("run directory", str(run_directory.path)))
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    if checkpoint is not None:
        rows.append(("checkpoint", f"{checkpoint.path} (batch {checkpoint.steps_completed})"))
    rows.append(("metrics", str(run_directory.metrics_path)))
    rows.append(("tensorboard", str(run_directory.tensorboard_path)))
    rows.append(("logs", str(run_directory.attempt_logs_path(run_directory.read_record().num_attempts))))
    if verdict.state is not RunState.COMPLETED and checkpoint is not None:
        rows.append(("resume with", shlex.join(resume_command)))
    return [f"{name + ':':<15}{value}" for name, value in rows]


def print_failure(outcome: LaunchOutcome) -> None:
    """Print the rank that failed first and its traceback, as the last thing on the screen."""
    sys.stdout.flush()
    if outcome.killed_ranks and outcome.exit_code != 128 + signal.SIGINT:
        names = ", ".join(map(str, outcome.killed_ranks))
        sys.stderr.write(f"rank(s) {names} did not end in time and were killed\n")
    if outcome.first_failure is not None:
        sys.stderr.write(f"\n{outcome.first_failure.describe()}\n")
