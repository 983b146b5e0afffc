"""Log to Weights & Biases; offline if there is no API key or no server.

W&B's step is the batch number. If a run resumes from an earlier batch, the next free step is used instead, because W&B rejects
decreasing steps. Charts have the metric ``batches`` as x-axis, and show repeated batches twice.
"""

from __future__ import annotations

import logging
import netrc
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.loggers.logger import FinalState, LoggedRun, Report

logger = logging.getLogger("dstrial.loggers")

_INIT_TIMEOUT_S = 20.0  # timeout for W&B's server to answer when a run begins
_FINISH_TIMEOUT_S = 25.0  # timeout for the upload of the last reports
_DEFAULT_SERVER = "https://api.wandb.ai"
_NOT_IN_PROJECT = re.compile(r"[/\\#?%:]")
_MAX_PROJECT_CHARS = 128


class WandbLogger:
    """Logs a run's reports to Weights & Biases (source: wandb 0.29 and 0.31)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None
        self._step = -1  # W&B's step of the last report
        self._batch: int | None = None  # batch number of the last report
        self._directory = Path()

    def begin(self, run: LoggedRun) -> str:
        import wandb

        options = self._options
        self._directory = Path(options.get("dir") or os.environ.get("WANDB_DIR") or run.directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        mode = options.get("mode") or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not _has_key():
            mode = "offline"
            self._say_offline("there is no WANDB_API_KEY")
        try:
            self._run = self._init(wandb, run, mode)
        except wandb.errors.Error as error:
            if (
                mode != "online" or wandb.run is not None
            ):  # teardown would end a W&B run that the user's code has started
                raise
            self._say_offline(f"the server cannot be used ({' '.join(str(error).split())[:200]})")
            wandb.teardown()  # releases the run id of the failed run
            self._run = self._init(wandb, run, "offline")
        self._step = int(self._run.step) - 1  # W&B's `step` is the next free one
        for group in ("training", "validation", "telemetry"):
            self._run.define_metric(f"{group}/*", step_metric="batches")
        if self._run.offline:
            return f"offline, below {self._directory / 'wandb'}"
        return str(self._run.url)

    def log(self, reports: Sequence[Report]) -> None:
        for report in reports:
            row = {"batches": report.batches_trained, **report.row()}
            self._step = next_step(self._step, self._batch, report.batches_trained)
            self._batch = report.batches_trained
            self._run.log(row, step=self._step)

    def end(self, state: FinalState) -> None:
        self._run.summary["state"] = state
        self._run.finish(exit_code=1 if state == "failed" else 0)

    def _init(self, wandb: Any, run: LoggedRun, mode: str) -> Any:
        options = self._options
        wanted = {
            "silent": True,
            "console": "off",  # the launcher already stores the ranks' output
            "reinit": "create_new",  # do not touch a W&B run that the user's code has started
            "init_timeout": _INIT_TIMEOUT_S,
            "finish_timeout": _FINISH_TIMEOUT_S,
            # Do not upload command lines, repository addresses and code, which may contain secrets.
            "x_disable_meta": True,
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
        }
        settings = wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})
        project = options.get("project") or os.environ.get("WANDB_PROJECT") or run.project
        return wandb.init(
            project=_NOT_IN_PROJECT.sub("-", project)[:_MAX_PROJECT_CHARS],
            entity=options.get("entity"),
            group=options.get("group") or os.environ.get("WANDB_RUN_GROUP") or run.group,
            name=options.get("name") or run.name,
            tags=list(options["tags"]) if "tags" in options else None,
            config={**run.hyperparameters, "experiment": dict(run.config)},
            dir=str(self._directory),
            id=run.run_id,
            resume="allow" if mode == "online" else None,  # offline, W&B cannot look up an earlier run
            mode=mode,
            allow_val_change=True,
            settings=settings,
        )

    def _say_offline(self, why: str) -> None:
        logger.warning(
            "logger wandb: %s, so the run is stored on disk and not shown online; training continues. Upload it later: "
            "wandb beta sync %s",
            why,
            self._directory / "wandb",
        )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL") or _DEFAULT_SERVER).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def next_step(step: int, before: int | None, batch: int) -> int:
    """Return W&B's step for a report of batch number ``batch``.

    The step is ``batch``, or the next free step if that is larger. ``step`` and ``before`` are the step and batch number of the
    last report. Reports of the same batch get the same step, so that W&B merges them into one row.
    """
    return step if batch == before else max(step + 1, batch)
