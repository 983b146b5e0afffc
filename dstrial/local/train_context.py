"""Determined's ``TrainContext`` on a run directory, with or without a master.

Each report is one line of ``metrics.jsonl``::

    {"group": "validation", "steps_completed": 100, "metrics": {"loss": 0.5}, "time": "2026-01-31T…+00:00"}

NaN and infinities are strings, because JSON has no such numbers. Reports of system metrics belong to no batch: their
``steps_completed`` is ``null``. Only the chief writes these files; all ranks may read them. Under ``dstrial run`` the master
also gets every report.
"""

from __future__ import annotations

import datetime
import logging
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from determined import core

from dstrial.errors import RankError, TrialContractError
from dstrial.file_writes import replace_file
from dstrial.local.json_files import (
    append_json_line,
    read_json,
    read_json_lines,
    repair_json_lines,
    to_strict_json,
    write_json_atomically,
)
from dstrial.local.run_directory import LOCAL_ID, TELEMETRY_GROUP, RunDirectory, utc_now
from dstrial.local.run_monitor import read_validations

logger = logging.getLogger("dstrial.local")

VALIDATION_GROUP = "validation"

# Minimum time between writes of progress, and between reports of progress or telemetry to the master.
PROGRESS_PERIOD_S = 1.0


class LocalTrainContext(core.TrainContext):  # type: ignore[misc]  # mypy does not follow determined
    """Writes a trial's reports into a run directory; thread-safe.

    Only the chief may report metrics. User code may report progress, status and early exit on every rank. Only the chief's
    reports are written to files.

    Args:
        metric: the searcher metric; None without one.
        smaller_is_better: whether a smaller searcher metric is better.
        cluster: Determined's train context, which also gets every report; None without a master.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        run_directory: RunDirectory,
        *,
        is_chief: bool,
        metric: str | None,
        smaller_is_better: bool,
        cluster: core.TrainContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_directory = run_directory
        self._is_chief = is_chief
        self._metric = metric
        self.smaller_is_better = smaller_is_better
        self._clock = clock
        self.cluster = cluster
        self._exp_id = LOCAL_ID if cluster is None else cluster._exp_id
        self._trial_id = LOCAL_ID if cluster is None else cluster._trial_id
        self._metrics = None if cluster is None else cluster._metrics
        self._writing = threading.Lock()
        self._progress: dict[str, Any] = {}
        self._progress_is_pending = False
        self._progress_written_at_s = -math.inf
        self._sent_at_s: dict[str, float] = {}  # what was sent to the master -> when

    def rewind_to(self, steps_completed: int) -> int:
        """Move reports after batch ``steps_completed`` to ``metrics.superseded.jsonl``.

        Call this one time, after a checkpoint of this batch was restored and before the first report. System metrics are not
        moved, because training does not repeat them. Returns the number of moved reports; 0 on ranks other than the chief.
        """
        if not self._is_chief:
            return 0
        with self._writing:
            rows = read_json_lines(self._run_directory.metrics_path)
            beyond = [row for row in rows if _is_beyond(row, steps_completed)]
            if not beyond:
                return 0
            superseded_at = utc_now()
            for row in beyond:
                append_json_line(
                    self._run_directory.superseded_metrics_path, {**row, "superseded_at": superseded_at}
                )
            content = self._run_directory.metrics_path.read_bytes().splitlines(keepends=True)
            kept = [
                line for line, row in zip(content, rows, strict=True) if not _is_beyond(row, steps_completed)
            ]
            replace_file(self._run_directory.metrics_path, b"".join(kept).decode("utf-8"))
        logger.info("%d reports beyond batch %d are superseded", len(beyond), steps_completed)
        return len(beyond)

    def set_status(self, status: str) -> None:
        self._update_status({"status": status})
        if self.cluster is not None:
            self.cluster.set_status(status)

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        """Record why the trial exits early; later calls record nothing and log a warning.

        With a master, every reason is sent to the master.
        """
        known = self.get_early_exit()
        if known is not None:
            logger.warning("early exit %s was reported before; %s is ignored", known, reason)
        else:
            self._update_status({"early_exit": core.EarlyExitReason(reason).name})
        if self.cluster is not None:
            self.cluster.report_early_exit(reason)

    def note_steps(self, num_steps: int, num_skipped: int) -> None:
        """Record the engines' numbers of optimizer steps and of skipped optimizer steps.

        ``num_steps`` includes the skipped steps.
        """
        self._update_status({"optimizer_steps": num_steps, "skipped_steps": num_skipped})

    def note_telemetry(self, totals: Mapping[str, Any]) -> None:
        if self._is_chief:
            write_json_atomically(self._run_directory.telemetry_path, dict(totals), sync=False)

    def get_early_exit(self) -> str | None:
        status = read_json(self._run_directory.status_path) or {}
        reason = status.get("early_exit")
        return None if reason is None else str(reason)

    def _update_status(self, fields: Mapping[str, Any]) -> None:
        if not self._is_chief:
            return
        with self._writing:
            status = read_json(self._run_directory.status_path) or {}
            fields = {**status, **fields, "time": utc_now()}
            write_json_atomically(self._run_directory.status_path, fields, sync=False)

    def set_metadata(self, metadata: dict[str, Any]) -> dict[str, Any] | None:
        stored: dict[str, Any] = to_strict_json(metadata, "metadata")
        if self._is_chief:
            write_json_atomically(self._run_directory.metadata_path, stored)
        if self.cluster is None:
            return stored
        answer: dict[str, Any] | None = self.cluster.set_metadata(metadata)
        return answer

    def get_metadata(self) -> dict[str, Any] | None:
        kept, cluster = self._run_directory.metadata_path, self.cluster
        metadata: dict[str, Any] | None = read_json(kept) if cluster is None else cluster.get_metadata()
        return metadata

    def _report_trial_metrics(
        self,
        group: str,
        steps_completed: int,
        metrics: dict[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        if not self._is_chief:
            raise RankError(
                f"metrics of group {group!r} are reported on a rank other than 0; expected the chief. Report "
                "them only where distributed.rank is 0."
            )
        if "." in group:
            raise TrialContractError(
                f"metric group is {group!r}; expected a name without a dot. Choose another name."
            )
        given = metrics
        if group == VALIDATION_GROUP:
            serializable = self._get_serializable_metrics(metrics)
            metrics = {name: value for name, value in metrics.items() if name in serializable}
        row: dict[str, Any] = {
            "group": group,
            "steps_completed": int(steps_completed),
            "metrics": to_strict_json(metrics, "metrics"),
            "time": utc_now(),
        }
        if batch_metrics is not None:
            row["batch_metrics"] = to_strict_json(batch_metrics, "batch_metrics")
        with self._writing:
            append_json_line(self._run_directory.metrics_path, row)
        if self.cluster is not None and (group != TELEMETRY_GROUP or self._is_due(group)):
            self.cluster._report_trial_metrics(group, steps_completed, given, batch_metrics)

    def report_system_metrics(
        self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime, node_idx: int
    ) -> None:
        """Append one node's system metrics to a file of reports.

        The chief appends to ``metrics.jsonl``, other ranks to ``metrics.node<n>.jsonl``; n is ``node_idx``. ``metrics`` maps
        node -> metric -> average value. Ranks: the first of each node.
        """
        row = {
            "group": group,
            "steps_completed": None,
            "metrics": dict(metrics),
            "time": report_time.isoformat(timespec="microseconds"),
        }
        if self._is_chief:
            with self._writing:
                append_json_line(self._run_directory.metrics_path, row)
        else:
            append_json_line(self._run_directory.node_metrics_path(node_idx), row)

    def validations(self) -> dict[int, float]:
        """Return ``steps_completed`` -> searcher metric, NaN included; thread-safe."""
        return read_validations(self._run_directory, self._metric)

    def get_experiment_best_validation(self) -> float | None:
        """Return the best searcher metric of this run, ignoring NaN; None without one."""
        values = [value for value in self.validations().values() if not math.isnan(value)]
        if not values:
            return None
        return min(values) if self.smaller_is_better else max(values)

    def report_progress(self, progress: float) -> None:
        """Record progress from 0 to 1, and send it to the master.

        Each happens at most once per ``PROGRESS_PERIOD_S``, but 1 is always recorded and sent.
        """
        if not 0 <= progress <= 1:
            raise TrialContractError(
                f"progress is {progress!r}; expected a number from 0 to 1. Divide by the length of the run."
            )
        self._note_progress({"progress": float(progress)}, is_last=progress == 1)
        if self.cluster is not None and (progress == 1 or self._is_due("progress")):
            self.cluster.report_progress(progress)

    def _is_due(self, name: str) -> bool:
        """Return whether ``name`` may be sent to the master now; if so, note the time."""
        now_s = self._clock()
        is_due = now_s - self._sent_at_s.get(name, -math.inf) >= PROGRESS_PERIOD_S
        if is_due:
            self._sent_at_s[name] = now_s
        return is_due

    def report_batches(self, batches_trained: int, batches_total: int) -> None:
        """Record trained and total batches; write once per ``PROGRESS_PERIOD_S`` at most."""
        fields = {
            "progress": min(1.0, batches_trained / batches_total) if batches_total > 0 else 0.0,
            "batches_trained": int(batches_trained),
            "batches_total": int(batches_total),
        }
        self._note_progress(fields, is_last=batches_trained >= batches_total)

    def _note_progress(self, fields: Mapping[str, Any], *, is_last: bool) -> None:
        if not self._is_chief:
            return
        with self._writing:
            self._progress.update(fields)
            self._progress_is_pending = True
        if is_last or self._clock() - self._progress_written_at_s >= PROGRESS_PERIOD_S:
            self.flush_progress()

    def flush_progress(self) -> None:
        """Write the latest progress to its file; a no-op if that is already written."""
        with self._writing:
            if not self._progress_is_pending:
                return
            fields = {**self._progress, "time": utc_now()}
            write_json_atomically(self._run_directory.progress_path, fields, sync=False)
            self._progress_is_pending = False
            self._progress_written_at_s = self._clock()

    def get_tensorboard_path(self) -> pathlib.Path:
        return self._run_directory.tensorboard_path

    def upload_tensorboard_files(
        self,
        selector: Callable[[pathlib.Path], bool] = lambda _: True,
        mangler: Callable[[pathlib.Path, int], pathlib.Path] = lambda path, _: path,
    ) -> None:
        """Do nothing: event files are written directly into the run directory."""


def _is_beyond(row: Mapping[str, Any], steps_completed: int) -> bool:
    steps: int | None = row["steps_completed"]
    return steps is not None and steps > steps_completed


def repair_reports(run_directory: RunDirectory, *, is_chief: bool) -> None:
    """Prepare a run directory for a new attempt; a no-op unless ``is_chief``.

    Removes the last attempt's status and telemetry files. In ``metrics.jsonl`` and ``metrics.superseded.jsonl``, removes an
    incomplete last line.
    """
    if not is_chief:
        return
    if repair_json_lines(run_directory.metrics_path):
        logger.warning("%s ended in an incomplete line, which was repaired", run_directory.metrics_path)
    repair_json_lines(run_directory.superseded_metrics_path)
    run_directory.status_path.unlink(missing_ok=True)
    run_directory.telemetry_path.unlink(missing_ok=True)
