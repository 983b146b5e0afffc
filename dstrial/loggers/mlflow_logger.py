"""Log to an MLflow tracking server, or to an SQLite file.

An MLflow run's tag ``RUN_TAG`` has dstrial's run id, by which a resumed run finds its MLflow run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.loggers.logger import FinalState, LoggedRun, Report, flat

RUN_TAG = "dstrial.run_id"  # tag with `LoggedRun.run_id`, by which a resumed run finds its MLflow run

_SQLITE = "sqlite:///"
_STATUS: Mapping[FinalState, str] = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

# Limits in mlflow/utils/validation.py, which also requires that a metric's name is a normalised path.
_NOT_IN_NAME = re.compile(r"[^/\w.\- :]")
_MAX_NAME_CHARS = 250
_MAX_VALUE_CHARS = 6000
_MAX_METRICS = 1000
_MAX_PARAMS = 100


class MLflowLogger:
    """Logs a run's reports to MLflow (source: mlflow 3.17)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._client: Any = None
        self._run_id = ""

    def begin(self, run: LoggedRun) -> str:
        from mlflow import MlflowClient

        # Do not let MLflow log a traceback for every failing `log_batch`; LoggerThread warns once.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        given = self._options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        uri = str(given or f"{_SQLITE}{run.store.absolute() / 'mlflow.db'}")
        with _locked(uri):
            self._client = client = MlflowClient(tracking_uri=uri)
            experiment_id = self._experiment(run, None if given else run.store)
            found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
            if found:
                known = found[0]
                client.update_run(known.info.run_id, status="RUNNING")
            else:
                name = self._options.get("run_name") or run.name
                tags = {**self._options.get("tags", {}), RUN_TAG: run.run_id, "dstrial.group": run.group}
                known = client.create_run(experiment_id, run_name=name, tags=tags)
        self._run_id = str(known.info.run_id)
        self._log_parameters(run, known.data.params)
        return f"{uri.rpartition('@')[2]}, run {self._run_id}"

    def log(self, reports: Sequence[Report]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(accepted_name(name), number, int(report.time_s * 1000), report.batches_trained)
            for report in reports
            for name, number in report.row().items()
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def end(self, state: FinalState) -> None:
        self._client.set_tag(self._run_id, "dstrial.state", state)
        self._client.set_terminated(self._run_id, _STATUS[state])

    def _experiment(self, run: LoggedRun, store: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        client = self._client
        name = self._options.get("experiment_name") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        if (known := client.get_experiment_by_name(name)) is not None:
            return str(known.experiment_id)
        # By default, MLflow would store artifacts in the working directory.
        place = None if store is None else (store.absolute() / "mlartifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:  # probably another trial has just created the experiment
            known = client.get_experiment_by_name(name)
            if known is None:
                raise
            return str(known.experiment_id)

    def _log_parameters(self, run: LoggedRun, known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        values = {**flat(run.hyperparameters), **flat(run.config, "experiment.")}
        parameters = [
            Param(name, str(value)[:_MAX_VALUE_CHARS])
            for original, value in values.items()
            if (name := accepted_name(original)) not in known  # MLflow keeps the first value
        ]
        for start in range(0, len(parameters), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MAX_PARAMS])


def accepted_name(name: str) -> str:
    """Return a name that MLflow accepts: replace invalid characters, cut long names."""
    parts = _NOT_IN_NAME.sub("_", name)[:_MAX_NAME_CHARS].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


@contextlib.contextmanager
def _locked(uri: str) -> Iterator[None]:
    """Hold a lock during the block, if ``uri`` is an SQLite file.

    Otherwise, several processes could create the file's tables at the same time.
    """
    if not uri.startswith(_SQLITE):
        yield
        return
    path = Path(uri.removeprefix(_SQLITE))
    path.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
