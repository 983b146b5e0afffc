"""The janitor: deletes unneeded files and rows, and backs up the database daily."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.errors import CheckpointError, DstrialError, MasterError
from dstrial.file_writes import remove_tree
from dstrial.master.backends import task_venv
from dstrial.master.backends.environment import tracebacks_directory
from dstrial.master.backends.local import remove
from dstrial.master.lifecycle import checkpoint_gc
from dstrial.master.lifecycle import experiments as experiment_life
from dstrial.master.lifecycle.storages import Storages
from dstrial.master.pubsub import PubSub
from dstrial.master.scheduler.backoff import Backoff
from dstrial.master.store import allocations, background_jobs, checkpoints, experiments, models
from dstrial.master.store.database import Database, OperationalError, Transaction, find_cluster_id
from dstrial.master.store.reports import logs
from dstrial.master.store.sqlite_file import make_daily_copy

logger = logging.getLogger("dstrial.master.janitor")

_PERIOD_S = 3600.0  # interval of checks for old logs, unused environments and a due copy
_RETRY_S = 5.0  # delay until the first retry of a job whose storage is unavailable; each further delay is twice as long


class _StorageUnavailableError(DstrialError):
    """The checkpoint storage that a background job needs is unavailable."""


class Janitor:
    """A thread that performs background jobs, such as deletions, one after another.

    Every ``period_s`` the thread also deletes old logs and unused environments, and makes a due daily backup of the database.
    ``log_retention_days`` is the default for experiments; None or -1 keeps logs forever.
    """

    def __init__(
        self,
        database: Database,
        changes: PubSub,
        storages: Storages,
        venvs_path: Path,
        log_retention_days: int | None,
        *,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._database = database
        self._event = changes.listen("scheduler")
        self._log_retention_days = log_retention_days
        self._venvs_path = venvs_path
        self._storages = storages
        self._period_s = period_s
        self._backoff = Backoff(first_s=_RETRY_S)  # by job
        self._next_cleanup_s = time.monotonic()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="dstrial-janitor", daemon=True)

    def start(self) -> None:
        """Start the thread; first unmark checkpoints that a killed master was deleting."""
        self._database.write(checkpoints.release_claims)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current job and stop the thread; other jobs stay queued."""
        self._is_stopping = True
        self._event.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._work()
                self._backoff.forget(None)
            except Exception:
                logger.exception("the janitor failed; retrying")
                self._backoff.record_failure(None)
                self._event.wait(self._backoff.delay_s(None))
                self._event.clear()

    def _work(self) -> None:
        # Check the clock, not a timeout of the event: a busy master sets the event more often.
        if time.monotonic() >= self._next_cleanup_s:
            self._next_cleanup_s = time.monotonic() + self._period_s
            self._database.write(lambda tx: logs.forget_old(tx, self._log_retention_days))
            for name in task_venv.collect(self._venvs_path, task_venv.UNUSED_S):
                logger.info("environment %s is deleted: unused for long, or unfinished", name)
            self._copy_database()
        postponed = self._backoff.postponed()
        with self._database.read() as connection:
            row = background_jobs.next_pending(connection, [key for key in postponed if isinstance(key, int)])
        if row is None:
            wait_s = min([self._next_cleanup_s - time.monotonic(), *postponed.values()])
            self._event.wait(max(0.0, wait_s))
            self._event.clear()
            return
        try:
            self._perform(row)
        except OperationalError:
            raise  # a full disk, for example: no fault of the job
        except Exception as error:
            # CheckpointError means that an object storage is unreachable.
            is_away = isinstance(error, _StorageUnavailableError | CheckpointError)
            if is_away and row.kind != "delete_experiment":
                logger.warning("%s of experiment %d is postponed: %s", row.kind, row.experiment_id, error)
                self._backoff.record_failure(row.id)
            else:
                logger.exception("%s of experiment %d is abandoned", row.kind, row.experiment_id)
                self._abandon(row, str(error))
        else:
            self._database.write(lambda tx: background_jobs.done(tx, row.id))
            self._backoff.forget(row.id)

    def _perform(self, row: background_jobs.BackgroundJob) -> None:
        experiment_id, payload = row.experiment_id, json.loads(row.payload)
        if row.kind == "delete_project":
            self._database.write(lambda tx: experiment_life.finish_project(tx, payload["id"]))
        elif row.kind == "delete_workspace":
            self._database.write(lambda tx: experiment_life.finish_workspace(tx, payload["id"]))
        else:
            self._perform_on_files(row.kind, experiment_id, payload)

    def _perform_on_files(self, kind: str, experiment_id: int, payload: Mapping[str, Any]) -> None:
        with self._database.read() as connection:
            experiment = experiments.get(connection, experiment_id)
        if experiment is None:
            return
        config = json.loads(experiment.config)
        self._require_storage(config["checkpoint_storage"])
        if kind == "gc":
            for uuid in self._checkpoints_to_delete(experiment, config):
                self._delete_checkpoint(config, uuid, ["**/*"])
        elif kind == "delete_checkpoints":
            for uuid in payload["uuids"]:
                self._delete_checkpoint(config, uuid, payload["globs"])
        elif kind == "sweep":
            self._sweep(config, payload["uuids"], payload["allocation_id"])
        elif kind == "delete_tensorboard":
            self._delete_tensorboard(config, experiment_id)
        else:
            self._delete_experiment(config, experiment_id)

    def _require_storage(self, storage: Mapping[str, Any]) -> None:
        trouble = self._storages.trouble(storage)
        if trouble is not None:
            raise _StorageUnavailableError(trouble)

    def _abandon(self, row: background_jobs.BackgroundJob, why: str) -> None:
        """Drop a background job that failed for reason ``why``.

        If the job was an experiment's deletion, set the experiment to DELETE_FAILED.
        """

        def drop(tx: Transaction) -> None:
            if row.kind == "delete_experiment":
                experiments.update(tx, row.experiment_id, state="DELETE_FAILED", end_reason=why)
                tx.publish(f"experiment:{row.experiment_id}")
            background_jobs.done(tx, row.id)

        self._database.write(drop)
        self._backoff.forget(row.id)

    def _sweep(self, config: Mapping[str, Any], uuids: list[str], allocation_id: str) -> None:
        """Delete checkpoints that an ended allocation began to save but did not report."""
        with self._database.read() as connection:
            left = checkpoints.unknown_of(connection, uuids)
            allocation = allocations.get(connection, allocation_id)
        for uuid in left:
            sizes = checkpoint_gc.delete_files(config, uuid, ())  # deletes nothing
            if not sizes:
                continue
            checkpoint_gc.delete_files(config, uuid)
            checkpoint_gc.forget_record(config, uuid)
            text = f"deleted a half-written checkpoint of a run that has ended, {sum(sizes.values()):,} bytes: {uuid}"
            logger.info("%s: %s", allocation_id, text)
            if allocation is not None:
                owner = allocation.task_id, allocation.trial_id, text
                self._database.write(lambda tx, owner=owner: logs.add_master_line(tx, *owner))  # type: ignore[misc]

    def _checkpoints_to_delete(
        self, experiment: experiments.Experiment, config: Mapping[str, Any]
    ) -> list[str]:
        """Return the uuids of unused checkpoints that the retention policy does not keep."""
        with self._database.read() as connection:
            unused = checkpoint_gc.unused(connection, experiment.id)
        candidates = [checkpoint_gc.Candidate.of_row(row) for row in unused]
        policy = checkpoint_gc.Policy.from_storage(config["checkpoint_storage"])
        return checkpoint_gc.plan(candidates, policy, smaller_is_better=experiment.smaller_is_better)

    def _delete_checkpoint(self, config: Mapping[str, Any], uuid: str, globs: list[str]) -> None:
        with self._database.read() as connection:
            if checkpoints.get_checkpoint(connection, uuid) is None:
                return
        used_as = self._database.write(lambda tx: checkpoints.claim(tx, uuid)) if globs else None
        if used_as is not None:
            logger.warning("checkpoint %s is kept: it has become %s", uuid, used_as)
            return
        try:
            left = checkpoint_gc.delete_files(config, uuid, globs)
            self._require_storage(config["checkpoint_storage"])  # else the files may still exist
        except DstrialError as error:
            self._database.write(lambda tx: checkpoints.release_claims(tx, uuid))
            if not isinstance(error, MasterError):
                raise
            logger.error("checkpoint %s: %s", uuid, error)
            return
        if not left:
            checkpoint_gc.forget_record(config, uuid)
        self._database.write(lambda tx: checkpoints.set_resources(tx, uuid, left))

    def _delete_experiment(self, config: Mapping[str, Any], experiment_id: int) -> None:
        with self._database.read() as connection:
            registered = models.registered_of(connection, experiment_id)
            rows = checkpoints.list_checkpoints(connection, experiment_id=experiment_id)
            held = allocations.of_experiment(connection, experiment_id)
        if registered:
            raise MasterError(
                f"checkpoints of it have been registered as {', '.join(registered[:5])}; expected none that is. "
                "Delete these versions, and the experiment again."
            )
        for row in rows:
            checkpoint_gc.delete_files(config, row.uuid)
            checkpoint_gc.forget_record(config, row.uuid)
        self._delete_tensorboard(config, experiment_id)
        self._require_storage(config["checkpoint_storage"])  # else the files may still exist
        for allocation in held:
            directory = Path(allocation.directory)
            remove(directory)
            with contextlib.suppress(OSError):
                remove_tree(tracebacks_directory(directory, allocation.trial_id))
        self._database.write(lambda tx: experiments.forget(tx, experiment_id))

    def _delete_tensorboard(self, config: Mapping[str, Any], experiment_id: int) -> None:
        with self._database.read() as connection:
            cluster_id = find_cluster_id(connection)
        if cluster_id is not None:
            checkpoint_gc.delete_tensorboard_files(config, cluster_id, experiment_id)

    def _copy_database(self) -> None:
        with self._database.read() as connection:
            if not experiments.has_any(connection):
                return
        if self._database.damage:
            # Copies of a damaged database would eventually replace the good ones.
            logger.error("no copy of the database is made: %s", self._database.describe_damage())
            return
        try:
            made = make_daily_copy(self._database.path, time.time())
        except MasterError as error:
            logger.error("there is no copy of the database of today: %s", error)
            return
        if made is not None:
            logger.info("the database is copied to %s", made)
