"""List trainings; read their metrics and best checkpoints; plot metrics."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.config.documents import read_yaml
from dstrial.errors import DstrialError
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.json_files import read_json_lines
from dstrial.local.run_directory import RunDirectory, default_runs_dir
from dstrial.master.client import Client
from dstrial.master.login import session
from dstrial.master.state_directory import StateDirectory

if TYPE_CHECKING:
    import pandas

_ROW_KEYS = ("steps_completed", "time")  # columns of a table of metrics besides the group and the metrics
_GROUPS = ("training", "validation")  # groups of metrics that are shown by default


@dataclasses.dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the best validation of a run.

    Attributes:
        uuid: name of the checkpoint, for ``dstrial checkpoint export UUID``.
        batches: number of batches trained before the checkpoint.
        value: validation value of the metric ``searcher.metric`` at this number of batches.
        path: directory of the checkpoint; None for a trial of a master.
    """

    uuid: str
    batches: int
    value: float
    path: Path | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a run directory, or a trial of the master on this machine.

    Attributes:
        name: name of the experiment.
        state: ``completed``, ``running``, ``error`` and so on.
        config: the experiment config.
        hyperparameters: name -> value that the training uses.
        path: the run directory; None for a trial of a master.
        trial_id: number of the trial; None for a run directory.
        state_directory: state directory of the trial's master; None for a run directory.
    """

    name: str
    state: str
    config: Mapping[str, Any] = dataclasses.field(repr=False)
    hyperparameters: Mapping[str, Any]
    path: Path | None = None
    trial_id: int | None = None
    state_directory: StateDirectory | None = dataclasses.field(default=None, repr=False)

    def metrics(self, group: str | None = None) -> pandas.DataFrame:
        """Return the reported metrics as a table with one row per report.

        Columns are ``group``, ``steps_completed`` (batches), ``time`` (UTC) and one column per metric. ``group`` selects
        ``training``, ``validation`` or another metric group; None selects training and validation.

        Raises:
            DstrialError: pandas is missing, or the master does not run.
        """
        try:
            import pandas
        except ImportError as error:
            raise DstrialError(
                "metrics as a table need pandas, which is not installed. Install it with `pip install pandas`."
            ) from error
        rows = [row for row in self._rows() if row["group"] in (_GROUPS if group is None else (group,))]
        table = pandas.DataFrame(
            [{key: row[key] for key in ("group", *_ROW_KEYS)} | row["metrics"] for row in rows]
        )
        return table if rows else pandas.DataFrame(columns=["group", *_ROW_KEYS])

    def best(self) -> BestCheckpoint | None:
        """Return the checkpoint with the best value of ``searcher.metric``.

        Returns None if no checkpoint was validated with a finite value.
        """
        searcher = self.config.get("searcher") or {}
        metric, sign = searcher.get("metric"), 1 if searcher.get("smaller_is_better", True) else -1
        values = {
            row["steps_completed"]: row["metrics"][metric]
            for row in self._rows()
            if row["group"] == "validation" and _is_finite(row["metrics"].get(metric))
        }
        found = [
            BestCheckpoint(uuid, batches, values[batches], path)
            for uuid, batches, path in self._checkpoints()
            if batches in values
        ]
        return min(found, key=lambda one: (sign * one.value, one.batches), default=None)

    def plot(self, *names: str) -> Any:
        """Plot training and validation metrics over batches in a new figure.

        ``names`` selects metrics; by default those with "loss" in their name and ``searcher.metric`` are plotted. Return
        matplotlib's ``Axes``.

        Raises:
            DstrialError: matplotlib is missing, or the master does not run.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise DstrialError(
                "a plot needs matplotlib, which is not installed. Install it with `pip install matplotlib`."
            ) from error
        searched = (self.config.get("searcher") or {}).get("metric")
        axes = pyplot.figure().subplots()
        reported = self._rows()
        for group in _GROUPS:
            rows = [row for row in reported if row["group"] == group]
            known = dict.fromkeys(name for row in rows for name in row["metrics"])
            for name in names or [name for name in known if "loss" in name or name == searched]:
                points = [
                    (row["steps_completed"], row["metrics"][name]) for row in rows if name in row["metrics"]
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), label=f"{name} ({group})")
        axes.set(xlabel="batches", title=self.name)
        if axes.lines:
            axes.legend()
        return axes

    def _rows(self) -> list[dict[str, Any]]:
        if self.path is not None:
            return read_json_lines(RunDirectory(self.path).metrics_path)
        messages = self._client().stream("/api/v1/trials/metrics/trial_metrics", trialIds=[self.trial_id])
        return [
            {
                "group": report["group"],
                "steps_completed": report["totalBatches"],
                "time": report["endTime"],
                "metrics": report["metrics"].get("avg_metrics")
                or report["metrics"].get("validation_metrics")
                or {},
            }
            for message in messages
            for report in message["metrics"]
        ]

    def _checkpoints(self) -> list[tuple[str, int, Path | None]]:
        if self.path is not None:
            stored = list_checkpoints(RunDirectory(self.path).checkpoints_path)
            return [(one.uuid, one.steps_completed, one.path) for one in stored]
        found = self._client().get(f"/api/v1/trials/{self.trial_id}/checkpoints", limit=0)["checkpoints"]
        return [
            (one["uuid"], int(one["metadata"]["steps_completed"]), None)
            for one in found
            if one["state"] == "STATE_COMPLETED"
        ]

    def _client(self) -> Client:
        assert self.state_directory is not None
        return session(self.state_directory.require_running())


def runs(
    name: str | None = None,
    *,
    experiment: int | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
) -> list[Run]:
    """Return the runs in run directories, or an experiment's trials, newest first.

    Args:
        name: return only run directories of experiments with this name; None returns all.
        experiment: id of an experiment or search of this machine's master. Return the trials of this experiment instead of run
            directories, and ignore ``name`` and ``runs_dir``.
        runs_dir: directory that has the run directories; None means ``$DSTRIAL_RUNS_DIR`` or ``runs``.
        state_dir: state directory of the master; None means the default. Used only with ``experiment``.

    Raises:
        DstrialError: ``experiment`` is set, and no master runs or the master has no such experiment.
    """
    if experiment is not None:
        return _trials(experiment, StateDirectory.choose(None if state_dir is None else str(state_dir)))
    found = []
    root = default_runs_dir(runs_dir).absolute()
    # A script's `run_dir` may be a child of `root`; other run directories are grandchildren.
    for record_path in (*root.glob("*/run.json"), *root.glob("*/*/run.json")):
        directory = RunDirectory(record_path.parent)
        record = directory.read_record()
        if name in (None, record.name) and not directory.is_search:
            config = read_yaml(directory.experiment_config_path, str(directory.experiment_config_path)).value
            found.append(
                (
                    record.started,
                    Run(
                        record.name,
                        record.state.value,
                        config,
                        _values(config.get("hyperparameters") or {}),
                        directory.path,
                    ),
                )
            )
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _trials(experiment_id: int, state: StateDirectory) -> list[Run]:
    client = session(state.require_running())
    experiment = client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]
    trials = client.get(f"/api/v1/experiments/{experiment_id}/trials", limit=0, orderBy="ORDER_BY_DESC")[
        "trials"
    ]
    return [
        Run(
            experiment["name"],
            one["state"].removeprefix("STATE_").lower(),
            experiment["config"],
            one["hparams"],
            trial_id=one["id"],
            state_directory=state,
        )
        for one in trials
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _values(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``specs`` with each ``{type: const, val: x}`` replaced by ``x``."""
    return {
        name: spec["val"]
        if isinstance(spec, Mapping) and spec.get("type") == "const"
        else _values(spec)
        if isinstance(spec, Mapping)
        else spec
        for name, spec in specs.items()
    }
