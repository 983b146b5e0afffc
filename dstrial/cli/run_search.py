"""``dstrial run`` of a search: follow many trials, and show each result."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

from dstrial.cli.run_display import number
from dstrial.cli.run_follow import FollowResult, StalledTrials, follow, kill_command
from dstrial.cli.run_submission import Master, Submission, config_of_run, fingerprint, submit
from dstrial.cli.run_submission import submitted_config as config_of
from dstrial.cli.streams import context_text, det_for, page_of, text_table
from dstrial.config.secrets import SecretNames, masked
from dstrial.context_directory import list_context
from dstrial.local.run_directory import RunDirectory, RunState, shown_path
from dstrial.master.store.views import observe
from dstrial.master.store.views.observe import ExperimentView, Start, TrialView

if TYPE_CHECKING:
    from dstrial.cli.run_entrypoint import Entrypoint
    from dstrial.cli.streams import LossTolerantStream
    from dstrial.config import ExperimentConfig

_MAX_TRIALS_SHOWN = 50
_SILENCE_S = 4.0


def search(
    experiment: ExperimentConfig,
    entrypoint: Entrypoint,
    master: Master,
    run_directory: RunDirectory,
    signals: list[signal.Signals],
    out: LossTolerantStream,
    *,
    num_slots: int,
    max_restarts: int,
    python: str,
) -> int:
    """Submit a search, follow it, print its trials, and return the exit status."""
    context = list_context(experiment.context_dir)
    files = context.v1_files()
    config = config_of(experiment, entrypoint, num_slots=num_slots, max_restarts=max_restarts)
    whole = config_of_run(
        config, experiment, run_directory, checkpoint=None, is_test=False, is_search=True, python=python
    )
    out.write(f"run directory: {shown_path(run_directory.path)}\n")
    out.write(f"context:       {context_text(context)}\n")
    experiment_id = submit(master, whole, files)
    storage = dict(config.get("checkpoint_storage") or {})
    mark = fingerprint(config, files)
    Submission(experiment_id, master.record.cluster_id, mark, storage).write(run_directory)
    out.write(
        f"experiment:    {experiment_id} ({det_for(master.record.address)} experiment describe {experiment_id})\n"
    )
    out.write(f"page:          {page_of(master.record.address, experiment_id)}\n")
    told = ""
    told_starts: set[str] = set()

    def say(line: str) -> None:
        out.write(line + "\n")

    stalled = StalledTrials(master, experiment_id, say)

    def on_look(view: ExperimentView) -> None:
        nonlocal told
        line = progress_line(view, experiment.metric, smaller_is_better=experiment.smaller_is_better)
        if line != told:
            told = line
            say(line)
        stalled.poll()
        if not any(trial.total_batches for trial in view.trials):
            _tell_start(observe.starting(master.state, experiment_id), told_starts, out)

    def on_stop(_signal: signal.Signals) -> None:
        limit_s = experiment.preemption_timeout_s
        say(
            f"pausing all trials with a checkpoint; what has not ended after {limit_s} s (preemption_timeout) is killed "
            "(Ctrl-C again to leave that to the master)"
        )

    followed = follow(master, experiment_id, signals, on_look=on_look, on_stop=on_stop, say=say)
    exit_code = _end(experiment, master, run_directory, followed, out)
    if followed.is_detached:
        out.write(f"{'kill with:':<15}{kill_command(master, experiment_id)}\n")
    return exit_code


def _tell_start(starts: list[Start], told: set[str], out: LossTolerantStream) -> None:
    """Say once what delays a search's first trial; logs say it of the others."""
    for start in starts[:1]:
        age_s = time.time() - start.since_s
        if age_s >= _SILENCE_S and start.text not in told:
            told.add(start.text)
            out.write(f"trial {start.trial_id}: {start.text}, for {age_s:.0f} s\n")


def best_trial(view: ExperimentView, *, smaller_is_better: bool) -> TrialView | None:
    """Return the trial with the best validation; None before the first."""
    measured = [trial for trial in view.trials if trial.best_metric is not None]
    choose = min if smaller_is_better else max
    return choose(measured, key=lambda trial: trial.best_metric or 0.0, default=None)


def progress_line(view: ExperimentView, metric: str, *, smaller_is_better: bool) -> str:
    """Return a line like ``40 %  2 active  accuracy 0.93 (trial 4)``."""
    counts: dict[str, int] = {}
    for trial in view.trials:
        counts[trial.state.lower()] = counts.get(trial.state.lower(), 0) + 1
    parts = [f"{view.progress * 100:.0f} %", ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))]
    best = best_trial(view, smaller_is_better=smaller_is_better)
    if best is not None and best.best_metric is not None:
        parts.append(f"{metric} {number(best.best_metric)} (trial {best.id})")
    return "  ".join(parts)


def _end(
    experiment: ExperimentConfig,
    master: Master,
    run_directory: RunDirectory,
    followed: FollowResult,
    out: LossTolerantStream,
) -> int:
    view = followed.view
    if view is None:
        run_directory.end_attempt(RunState.FAILED, "the experiment was deleted")
        return 1
    out.write("".join(f"{line}\n" for line in trial_table(view, experiment)))
    state, exit_code, reason = _judge(followed, view)
    run_directory.end_attempt(state, reason if state is RunState.FAILED else None)
    rows = [("state", state.value + (f" ({reason})" if reason else ""))]
    best = best_trial(view, smaller_is_better=experiment.smaller_is_better)
    if best is not None and best.best_metric is not None:
        rows.append(("best", f"{experiment.metric} {best.best_metric:.6g} of trial {best.id}"))
    rows.append(("run directory", shown_path(run_directory.path)))
    if view.state == "PAUSED":
        rows.append(("resume with", f"{det_for(master.record.address)} experiment activate {view.id}"))
    out.write("".join(f"{name + ':':<15}{value}\n" for name, value in rows))
    return exit_code


def _judge(followed: FollowResult, view: ExperimentView) -> tuple[RunState, int, str | None]:
    if followed.is_master_gone:
        return RunState.STOPPED, 1, "the master has ended; the search goes on at the next `dstrial up`"
    if view.state == "COMPLETED":
        return RunState.COMPLETED, 0, None
    if view.state == "ERROR":
        exit_code = next((trial.exit_code for trial in view.trials if trial.exit_code), 1)
        return RunState.FAILED, exit_code, view.end_reason or "every trial failed"
    if followed.stopped_by is not None:
        return RunState.STOPPED, 128 + signal.Signals[followed.stopped_by], followed.stopped_by
    return RunState.STOPPED, 1, view.state.lower()


def trial_table(view: ExperimentView, experiment: ExperimentConfig) -> list[str]:
    """Return one line per trial, the best first, and how many are left out."""

    def rank(trial: TrialView) -> tuple[bool, float, int]:
        value = trial.best_metric
        if value is None:
            return True, 0.0, trial.id
        return False, value if experiment.smaller_is_better else -value, trial.id

    rows = [("trial", "state", "batches", experiment.metric, "hyperparameters")]
    for trial in sorted(view.trials, key=rank)[:_MAX_TRIALS_SHOWN]:
        metric = "" if trial.best_metric is None else number(trial.best_metric)
        rows.append(
            (
                str(trial.id),
                trial.state.lower(),
                str(trial.total_batches),
                metric,
                _hparams(trial, experiment),
            )
        )
    lines = text_table(rows[0], rows[1:]).splitlines()
    hidden = len(view.trials) - _MAX_TRIALS_SHOWN
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def _hparams(trial: TrialView, experiment: ExperimentConfig) -> str:
    """Return the hyperparameters that the search chose."""
    values = masked(json.loads(trial.hparams), SecretNames())
    specs = experiment.raw.get("hyperparameters") or {}
    return " ".join(f"{name}={_short(value)}" for name, value in _chosen(values, specs))


def _chosen(values: object, specs: object, prefix: str = "") -> list[tuple[str, object]]:
    if not isinstance(specs, dict) or not isinstance(values, dict):
        return []
    chosen: list[tuple[str, object]] = []
    for name, spec in specs.items():
        if not isinstance(spec, dict) or name not in values:
            continue
        if "type" in spec:
            if spec["type"] != "const":
                chosen.append((prefix + name, values[name]))
        else:
            chosen += _chosen(values[name], spec, f"{prefix}{name}.")
    return chosen


def _short(value: object) -> str:
    return number(value) if isinstance(value, float) else json.dumps(value)
