"""The directory of one run: names of its files, creation, record and lock.

``<runs dir>/<experiment name>/<UTC stamp>-<short id>/`` holds::

    experiment.yaml           the effective experiment config
    run.json                  name, context directory, command, start time, state (``RunRecord``)
    run.lock                  locked during the run by the process that owns the run
    metrics.jsonl             one line per report
    metrics.node<n>.jsonl     system metrics of node n > 0, in a run without a master
    metrics.superseded.jsonl  reports beyond the batch from which a resume started
    progress.json             trained and total batches
    status.json               status text, early exit and step counts, as the trial reports them
    telemetry.json            time, memory and speed of the last attempt
    outcome.json              how the ranks of the last attempt ended; outcome.node<n>.json for node n > 0
    submission.json           the master's experiment that trains the run
    master/                   state directory of the embedded master, in a Slurm job
    slurm.json                the Slurm job that trains the run; sbatch.sh is its script, slurm.log its output
    metadata.json             the argument of ``set_metadata``
    tensorboard/              event files
    checkpoints/<uuid>/       one directory per checkpoint
    best                      link to the checkpoint with the best validation, once `dstrial run` has ended
    .dstrial-output           marks the directory as output, so that no context directory includes it
    logs/attempt_<n>/         the ranks' output, one directory per attempt

This module starts no process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.config.documents import read_yaml, yaml_text
from dstrial.config.secrets import SecretNames, secrets_in
from dstrial.context_directory import OUTPUT_MARK, make_output_directory
from dstrial.errors import DstrialError, LaunchError
from dstrial.file_writes import replace_file
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.object_storage import without_credentials

logger = logging.getLogger("dstrial.local")

TELEMETRY_GROUP = "telemetry"  # metric group of time, speed and memory in metrics.jsonl
RUNS_DIR_VARIABLE = "DSTRIAL_RUNS_DIR"  # environment variable: directory of all runs
LOCAL_ID = 0  # id of experiment and trial in checkpoints of a run without a master
RUN_DIR_VARIABLE = "DSTRIAL_RUN_DIR"  # environment variable of ranks: the run's directory
# Environment variable with the trial id in a checkpoint that a rank only restores and saves again.
REWRITE_VARIABLE = "DSTRIAL_REWRITE"
TEST_VARIABLE = "DSTRIAL_TEST"  # environment variable, 1: train two batches, save a checkpoint, read it back


class RunState(str, enum.Enum):
    """State of a run's last attempt, as recorded in ``run.json``."""

    RUNNING = "running"
    """Started; the record also stays in this state if the machine or the owning process dies."""
    COMPLETED = "completed"
    """Trained to its configured length."""
    STOPPED = "stopped"
    """Ended early after a stop request; can be resumed."""
    FAILED = "failed"
    """A rank ended with an error; can be resumed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of ``run.json``: name, command, state and times of a run."""

    name: str
    context_dir: str  # absolute path of the context directory
    command: tuple[str, ...]  # command of the last attempt
    started: str  # creation time of the run; both times are ISO 8601 in UTC
    state: RunState
    num_attempts: int = 1
    ended: str | None = None  # end time of the last attempt; None while it runs
    failure: str | None = None  # why the last attempt failed, in one line
    allocation_id: str | None = None  # the master's allocation that writes the last attempt's logs


def utc_now() -> str:
    """Return the current time as sortable ISO 8601 text in UTC, with microseconds."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


def utc_stamp(moment: str | None = None) -> str:
    """Return a time in the form ``20260131T235959Z``.

    ``moment`` is ISO 8601 in UTC; None for the current time.
    """
    return f"{re.sub(r'[-:]', '', (moment or utc_now())[:19])}Z"


def default_runs_dir(runs_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute directory of all runs; it need not exist.

    The first of these that is set: ``runs_dir``, the variable ``DSTRIAL_RUNS_DIR``, ``./runs``.
    """
    return Path(runs_dir or os.environ.get(RUNS_DIR_VARIABLE) or "runs").absolute()


def shown_path(path: Path) -> str:
    """Return a path for display: relative if it lies below the working directory."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def experiment_slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "experiment"


def new_run_path(runs_dir: Path, name: str, started: str | None = None) -> Path:
    return runs_dir.absolute() / experiment_slug(name) / f"{utc_stamp(started)}-{secrets.token_hex(3)}"


class _Inside:
    """Descriptor that returns the path of a named file inside a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type | None = None) -> Path:
        return run.path / self._name


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run's files, and access to ``run.json``; an immutable value.

    The module's docstring lists the files.
    """

    path: Path

    experiment_config_path = _Inside("experiment.yaml")
    record_path = _Inside("run.json")
    lock_path = _Inside("run.lock")
    metrics_path = _Inside("metrics.jsonl")
    superseded_metrics_path = _Inside("metrics.superseded.jsonl")
    progress_path = _Inside("progress.json")
    status_path = _Inside("status.json")
    telemetry_path = _Inside("telemetry.json")  # content: dstrial.telemetry.samples.RunTotals.to_json
    submission_path = _Inside("submission.json")
    master_path = _Inside("master")
    slurm_job_path = _Inside("slurm.json")
    metadata_path = _Inside("metadata.json")
    tensorboard_path = _Inside("tensorboard")
    checkpoints_path = _Inside("checkpoints")
    best_path = _Inside("best")
    logs_path = _Inside("logs")

    def node_metrics_path(self, node_idx: int) -> Path:
        return self.path / f"metrics.node{node_idx}.jsonl"

    def outcome_path(self, node_idx: int = 0) -> Path:
        # JSON of dstrial.launch.failures.LaunchOutcome, with ``is_consequence``: whether a rank of another node failed first.
        return self.path / (f"outcome.node{node_idx}.json" if node_idx else "outcome.json")

    def outcome_paths(self) -> list[Path]:
        """Return the paths of the last attempt's outcome files, one per ended launcher."""
        return sorted(self.path.glob("outcome*.json"))

    def link_best(self, uuid: str) -> None:
        """Create or replace the link ``best`` to the checkpoint ``uuid``."""
        link = self.best_path.with_name(".best")
        link.unlink(missing_ok=True)
        link.symlink_to(self.checkpoints_path.relative_to(self.path) / uuid)
        link.replace(self.best_path)

    def attempt_logs_path(self, attempt: int) -> Path:
        return self.logs_path / f"attempt_{attempt}"

    def begin_logs(self, allocation_id: str) -> Path:
        """Return the directory for the logs of an allocation's ranks, not yet created.

        The launchers on all hosts of the allocation get the same path. If the last attempt is another allocation's, because the
        master has restarted the trial, a new attempt is recorded in ``run.json``.
        """
        record = self.read_record()
        attempt = record.num_attempts
        if record.allocation_id is None:
            self._write_record(dataclasses.replace(record, allocation_id=allocation_id))
        elif record.allocation_id != allocation_id:
            # Launchers that read the record at the same time also write the same new record.
            self._begin_attempt(record, record.command, allocation_id)
            attempt += 1
        return self.attempt_logs_path(attempt)

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        *,
        name: str,
        context_dir: Path,
        command: Sequence[str],
        config: Mapping[str, Any],
        path: Path | None = None,
    ) -> RunDirectory:
        """Create a run directory with its config and record, in state ``running``.

        ``path`` must not exist or be an empty directory; None chooses a new path below ``runs_dir``.
        """
        started = utc_now()
        if path is None:
            path = new_run_path(runs_dir, name, started)
        run_directory = cls(path.absolute())
        record = RunRecord(
            name=name,
            context_dir=str(context_dir.resolve()),
            command=tuple(command),
            started=started,
            state=RunState.RUNNING,
        )
        try:
            make_output_directory(run_directory.path)
            (run_directory.path / OUTPUT_MARK).touch()
            run_directory._make_directories(exist_ok=False)
            run_directory.write_config(config)
            run_directory._write_record(record)
        except OSError as error:
            raise LaunchError(
                f"the run directory is {run_directory.path}, where {error.filename or path} cannot be made "
                f"({error.strerror}); expected a directory that can be written to. Name another one with --run-dir, --runs-dir "
                f"or {RUNS_DIR_VARIABLE}."
            ) from error
        return run_directory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Open an existing run directory; create its missing subdirectories.

        Raises:
            LaunchError: the path is no run directory.
        """
        run_directory = cls(Path(path).absolute())
        if not run_directory.record_path.is_file():
            raise LaunchError(
                f"run directory is {str(path)!r}; expected a directory with a run.json in it. Name a "
                "directory that a run has printed, or start a new run."
            )
        run_directory._make_directories(exist_ok=True)
        return run_directory

    @classmethod
    def of_checkpoint(cls, path: Path) -> RunDirectory | None:
        """Return the run to which a checkpoint directory belongs; None without a run."""
        run_directory = cls(path.parent.parent)
        is_of_run = run_directory.record_path.is_file() and run_directory.checkpoints_path == path.parent
        return run_directory if is_of_run else None

    def _make_directories(self, *, exist_ok: bool) -> None:
        for directory in (self.tensorboard_path, self.checkpoints_path, self.logs_path):
            directory.mkdir(exist_ok=exist_ok)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``experiment.yaml``; only the owner may read it if it has secrets.

        Credentials of the checkpoint storage are masked.
        """
        config = without_credentials(config) or {}
        is_private = bool(secrets_in(config, SecretNames()))
        replace_file(self.experiment_config_path, yaml_text(dict(config)), is_private=is_private)

    @property
    def is_search(self) -> bool:
        """Whether several trials of a search share the run's checkpoints directory."""
        if not self.experiment_config_path.is_file():
            return False
        config = read_yaml(self.experiment_config_path, str(self.experiment_config_path)).value or {}
        return ((config.get("searcher") or {}).get("name") or "single") != "single"

    def read_record(self) -> RunRecord:
        raw = read_json(self.record_path)
        try:
            changes = {"command": tuple(raw["command"]), "state": RunState(raw["state"])}
            return RunRecord(**{**raw, **changes})
        except (KeyError, TypeError, ValueError) as error:
            raise DstrialError(
                f"{self.record_path} is {raw!r}; expected the record of a run. Restore the file, or start "
                "a new run."
            ) from error

    def begin_attempt(self, command: Sequence[str]) -> None:
        """Record a new attempt; remove the last attempt's status, progress and outcomes."""
        self._begin_attempt(self.read_record(), command, None)

    def _begin_attempt(self, record: RunRecord, command: Sequence[str], allocation_id: str | None) -> None:
        for path in (self.status_path, self.progress_path, *self.outcome_paths()):
            path.unlink(missing_ok=True)
        self._write_record(
            dataclasses.replace(
                record,
                command=tuple(command),
                state=RunState.RUNNING,
                num_attempts=record.num_attempts + 1,
                ended=None,
                failure=None,
                allocation_id=allocation_id,
            )
        )

    def end_attempt(self, state: RunState, failure: str | None = None) -> None:
        """Record the state and end time of the attempt.

        ``failure`` says in one line why the attempt failed; None if it did not fail.
        """
        self._write_record(
            dataclasses.replace(self.read_record(), state=state, ended=utc_now(), failure=failure)
        )

    def _write_record(self, record: RunRecord) -> None:
        fields = dataclasses.asdict(record) | {"state": record.state.value}
        write_json_atomically(self.record_path, fields)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock during the block; the process's death also releases it.

        Raises:
            LaunchError: another process holds the lock.
        """
        with self.lock_path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise LaunchError(
                    f"run directory {self.path} is in use by process {file.read().strip() or 'unknown'}; "
                    "expected a run that has ended. Stop that process first, or start a new run."
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield


def find_runs(runs_dir: Path, name: str, context_dir: Path) -> list[RunDirectory]:
    """Return the runs with this experiment name and context directory, newest first.

    A run whose record cannot be read is left out with a warning.
    """
    found: list[tuple[str, RunDirectory]] = []
    for record_path in (runs_dir.absolute() / experiment_slug(name)).glob("*/run.json"):
        run_directory = RunDirectory(record_path.parent)
        try:
            record = run_directory.read_record()
        except (DstrialError, OSError) as error:
            logger.warning("the run %s is left out: %s", run_directory.path, error)
            continue
        if record.name == name and record.context_dir == str(context_dir.resolve()):
            found.append((record.started, run_directory))
    return [run_directory for _, run_directory in sorted(found, key=lambda entry: entry[0], reverse=True)]
