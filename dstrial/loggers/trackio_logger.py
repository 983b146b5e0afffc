"""Log to Trackio: an SQLite file in ``TRACKIO_DIR`` or a Hugging Face Space.

A resumed run is identified by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.loggers.logger import FinalState, LoggedRun, Report


class TrackioLogger:
    """Logs a run's reports to Trackio (source: trackio 0.43)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None
        self._last_batch = 0
        self._has_told = False

    def begin(self, run: LoggedRun) -> str:
        import trackio

        options = self._options
        project = options.get("project") or os.environ.get("TRACKIO_PROJECT") or run.project
        space = options.get("space_id")
        self._run = trackio.init(
            project=project.replace("/", "-"),
            name=f"{run.name} {run.run_id[:6]}",
            group=options.get("group") or run.group,
            space_id=space,
            config={"hyperparameters": dict(run.hyperparameters), "experiment": dict(run.config)},
            resume="allow",
            embed=False,
            # Disabled, because Trackio would measure all devices of the machine, in additional threads.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if space is not None:
            return f"Space {space}"
        from trackio.utils import TRACKIO_DIR

        return str(TRACKIO_DIR)

    def log(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._last_batch = report.batches_trained
            self._run.log(report.row(), step=report.batches_trained)
        self._require_written()

    def end(self, state: FinalState) -> None:
        self._run.log({"state": state}, step=self._last_batch)
        self._run.finish()
        if not self._has_told:  # else an earlier warning has said that more reports may be lost
            self._require_written()

    def _require_written(self) -> None:
        """Raise ``OSError`` if Trackio has dropped reports; Trackio itself only warns."""
        noted: set[str] = getattr(self._run, "_warned_failures", set())
        failures = tuple(noted)
        if failures:
            noted.difference_update(
                failures
            )  # Trackio records each kind of failure once; clear the record to notice the next failure
            self._has_told = True
            raise OSError(
                f"Trackio has dropped reports ({', '.join(sorted(failures))}; its warning says why)"
            )
