"""Complete checkpoint saves in a background thread, after queued metric reports.

Determined's client sends metrics from a queue, but registers checkpoints immediately. A checkpoint is therefore registered only
after all queued metrics were sent; otherwise, if the process died, the master could have a checkpoint without its metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import determined
import torch
from determined import core

import dstrial
from dstrial.checkpoint.manifest import (
    MANIFEST_DIGEST,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    hash_file,
    write_manifest,
)
from dstrial.errors import CheckpointError
from dstrial.local.train_context import LocalTrainContext
from dstrial.storage_guard import is_storage_gone

logger = logging.getLogger("dstrial.loop")

_LOG_WAITING_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class SaveStatus:
    """Whether one rank's checkpoint save has ended, and why it failed.

    ``failure`` is None unless the save failed. The ranks exchange their statuses at each sync point.
    """

    is_done: bool
    failure: str | None


class SaveJob:
    """Writes and registers one checkpoint in a thread, from a copy of the state.

    Args:
        batches_trained: finished batches when the state was copied.
        previous_batches: ``batches_trained`` of the previous checkpoint; None without one.
        complete: writes and registers the checkpoint, collectively on all ranks; raises an error on failure.
    """

    def __init__(
        self, uuid: str, batches_trained: int, previous_batches: int | None, complete: Callable[[], None]
    ) -> None:
        self.uuid = uuid
        self.batches_trained = batches_trained
        self.previous_batches = previous_batches
        self.error: BaseException | None = None
        # A daemon thread, because a save that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(complete,), name="dstrial-save", daemon=True)
        self._thread.start()

    def _run(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        except BaseException as error:  # noqa: BLE001  # a thread cannot raise to the loop, which raises the error later
            self.error = error

    def wait(self) -> None:
        """Wait until the save has ended or failed.

        The wait needs no timeout, because each step of a save has a timeout.
        """
        while self._thread.is_alive():
            self._thread.join(_LOG_WAITING_S)
            if self._thread.is_alive():
                logger.info("waiting for the checkpoint at batch %d to be written", self.batches_trained)

    @property
    def status(self) -> SaveStatus:
        if self._thread.is_alive() or self.error is None:
            return SaveStatus(not self._thread.is_alive(), None)
        return SaveStatus(True, str(self.error) or type(self.error).__name__)


def base_metadata(steps_completed: int) -> dict[str, Any]:
    """Return metadata that every checkpoint has: batch count and library versions."""
    return {
        "steps_completed": steps_completed,
        "determined_version": determined.__version__,
        "dstrial_version": dstrial.__version__,
        "framework": f"torch-{torch.__version__}",
    }


def complete_manifest(
    root: pathlib.Path,
    parts: Sequence[Mapping[str, FileEntry]],
    layouts: Sequence[Mapping[str, Any]],
    metadata: dict[str, Any],
) -> None:
    """Write a checkpoint's manifest; add its SHA-256 to ``metadata``. Ranks: rank 0.

    ``parts`` has one mapping per rank: file name -> manifest entry, for the files that the rank has hashed. ``layouts`` has one
    item per engine: how the engine's state is split over ranks.
    """
    files = {name: entry for part in parts for name, entry in part.items()}
    steps = int(metadata["steps_completed"])
    write_manifest(root, Manifest.build(steps_completed=steps, layouts=layouts, files=files))
    metadata[MANIFEST_DIGEST] = hash_file(root / MANIFEST_NAME).sha256


def describe_failure(what: str, root: pathlib.Path, rank: int, error: Exception) -> str:
    """Return the error message for a failed write: cause, free disk space, remedy.

    ``what`` names the checkpoint in the message.
    """
    if isinstance(error, CheckpointError) or is_storage_gone(error):
        return str(error)
    free = ""
    if isinstance(error, (OSError, RuntimeError)):
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(root).free:,} bytes free)"
    cause = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return (
        f"{what} cannot be written by rank {rank}: {cause}{free}; expected a writable directory with enough room. Make room, "
        "then resume: the checkpoints before it are complete."
    )


_DEADLINE_S = 600.0  # timeout for the master to accept all reports
_POLL_S = 0.002


class PendingReports:
    """Waits until the master has accepted all queued metric reports.

    Determined's client has no public method for this. Without a master, waiting is a no-op.

    Source: ``determined/core/_metrics.py`` of determined 0.38.1: a queue, and a thread that posts one report at a time.
    """

    def __init__(self, train: Any) -> None:
        self._shipper: Any = None
        self._num_posted = 0
        if isinstance(train, LocalTrainContext):
            train = train.cluster
        if type(train) is not core.TrainContext:
            return
        self._shipper = shipper = train._metrics._shipper
        post = shipper._post_metrics
        # Number of reports that were posted before ``post_and_count`` started to count.
        self._num_before = shipper._queue.unfinished_tasks - shipper._queue.qsize()

        def post_and_count(*args: Any, **kwargs: Any) -> None:
            post(*args, **kwargs)
            self._num_posted += 1

        shipper._post_metrics = post_and_count

    def wait(self, deadline_s: float = _DEADLINE_S) -> bool:
        """Wait for the master to accept all reports; return False on failure.

        Waiting fails after ``deadline_s`` seconds, or if the client's thread ends.
        """
        shipper = self._shipper
        if shipper is None:
            return True
        # The client never calls ``task_done``, so ``unfinished_tasks`` is the number of reports ever queued.
        wanted = int(shipper._queue.unfinished_tasks) - self._num_before
        give_up_at_s = time.monotonic() + deadline_s
        while self._num_posted < wanted:
            # If its thread has ended, the client raises the thread's error at the next report.
            if not shipper.is_alive() or time.monotonic() > give_up_at_s:
                logger.warning("the master has not taken %d metric reports", wanted - self._num_posted)
                return False
            time.sleep(_POLL_S)
        return True
