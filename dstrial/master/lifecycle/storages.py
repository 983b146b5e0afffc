"""Whether checkpoint storages are there, and which trials wait for theirs.

A storage is made at its first use and never again. What lies on another machine, or is no directory, is not looked at.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import (
    TimeoutError as FutureTimeoutError,  # Another class than the builtin before Python 3.11.
)
from pathlib import Path
from typing import Any

from dstrial.errors import MasterError
from dstrial.master.lifecycle.checkpoint_gc import storage_root
from dstrial.master.store import checkpoints, experiments
from dstrial.master.store.database import Database
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports.logs import add_master_line
from dstrial.storage_guard import STORAGE_MARKER, StorageGoneError, what_is_there_instead

logger = logging.getLogger("dstrial.master.storages")

LOOK_TIMEOUT_S = 5.0  # a network file system whose server is away blocks a process that asks it, for ever
_MARKER_TEXT = (
    "Checkpoints of dstrial are stored here. Without this file it takes the storage for not mounted.\n"
)


def root_of(storage: Mapping[str, Any]) -> Path | None:
    """Return the directory of a storage; None if it is none of this machine."""
    try:
        root = storage_root(storage)
    except MasterError:
        return None
    return Path(os.path.normpath(root)) if root.is_absolute() else None


class Storages:
    """Looks at storages. Thread-safe."""

    def __init__(
        self, database: Database, *, umask: int | None = None, timeout_s: float = LOOK_TIMEOUT_S
    ) -> None:
        self._database = database
        self._umask = umask
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._looks: dict[Path, tuple[float, Future[str | None]]] = {}

    def trouble(self, storage: Mapping[str, Any]) -> str | None:
        """Say why a storage that was used cannot be used now; else None."""
        root = root_of(storage)
        if root is None or not self._is_known(root):
            return None
        instead = self._look(root)
        return None if instead is None else str(StorageGoneError(str(root), instead))

    def secure(self, storage: Mapping[str, Any]) -> Path | None:
        """Return the directory of a storage, made with its marker at its first use.

        None if it is no directory of this machine, or cannot be made here: its trials will say so.

        Raises:
            StorageGoneError: it was used before, and is not there.
        """
        root = root_of(storage)
        if root is None:
            return None
        if self._is_known(root):
            instead = self._look(root)
            if instead is not None:
                raise StorageGoneError(str(root), instead)
            return root
        try:
            _in_thread(lambda: self._make(root)).result(self._timeout_s)
        except FutureTimeoutError:
            raise StorageGoneError(str(root), self._no_answer()) from None
        except OSError as error:
            logger.warning("checkpoint storage %s gets no marker: %s", root, error)
            return None
        self._database.write(lambda tx: checkpoints.remember_storage(tx, str(root)))
        return root

    def _is_known(self, root: Path) -> bool:
        with self._database.read() as connection:
            return checkpoints.is_known_storage(connection, str(root))

    def _no_answer(self) -> str:
        return f"no answer within {self._timeout_s:g} s"

    def _make(self, root: Path) -> None:
        made = [path for path in (root, *root.parents) if not path.exists()]
        for path in reversed(made):
            path.mkdir(exist_ok=True)
        marker = root / STORAGE_MARKER
        if not marker.exists():
            marker.write_text(_MARKER_TEXT, encoding="utf-8")
            made.append(marker)
        if self._umask is not None:
            for path in made:
                path.chmod((0o666 if path == marker else 0o777) & ~self._umask)

    def _look(self, root: Path) -> str | None:
        """Look in a thread that nobody has to wait for; one at a time for each storage."""
        with self._lock:
            began_s, look = self._looks.get(root, (0.0, None))
            if look is None or look.done():  # An answer that came too late says how it was then.
                began_s, look = time.monotonic(), _in_thread(lambda: what_is_there_instead(str(root)))
                self._looks[root] = began_s, look
        try:
            return look.result(max(0.0, began_s + self._timeout_s - time.monotonic()))
        except FutureTimeoutError:
            return self._no_answer()


class StorageWait:
    """Holds trials back whose storage is away; for the scheduler's thread."""

    def __init__(self, database: Database, storages: Storages) -> None:
        self._database = database
        self._storages = storages
        self._held: dict[int, tuple[WaitingTrial, str]] = {}  # by trial, with the logged trouble

    def trouble(self, experiment_id: int) -> str | None:
        with self._database.read() as connection:
            experiment = experiments.get(connection, experiment_id)
        if experiment is None:  # deleted meanwhile
            return None
        return self._storages.trouble(json.loads(experiment.config)["checkpoint_storage"])

    def look_again(self) -> None:
        """Check the storages of the trials that wait for one; may take seconds."""
        known: dict[int, str | None] = {}
        for row, _ in list(self._held.values()):
            self.holds_up(row, known)

    def ready(self, rows: Sequence[WaitingTrial]) -> list[WaitingTrial]:
        """Leave out those that wait for their storage, and forget all others that did."""
        self._held = {row.id: self._held[row.id] for row in rows if row.id in self._held}
        return [row for row in rows if row.id not in self._held]

    def holds_up(self, row: WaitingTrial, known: dict[int, str | None] | None = None) -> bool:
        """Say whether a trial that could start has to wait for its storage.

        ``known`` keeps the answers of one poll by experiment.
        """
        known = {} if known is None else known
        if row.experiment_id not in known:  # a slow storage answers once for all trials of an experiment
            known[row.experiment_id] = self.trouble(row.experiment_id)
        trouble = known[row.experiment_id]
        _, logged = self._held.get(row.id, (row, None))
        if trouble is None:
            if self._held.pop(row.id, None) is not None:
                self._say(row, "its checkpoint storage is back, and the trial goes on", "INFO")
            return False
        if logged != trouble:
            self._held[row.id] = row, trouble
            logger.warning("trial %d waits: %s", row.id, trouble)
            self._say(row, f"waiting for its checkpoint storage: {trouble}", "WARNING")
        return True

    def is_waiting(self, trial_id: int) -> bool:
        """Say whether a trial was held back when it was looked at last."""
        return trial_id in self._held

    def _say(self, row: WaitingTrial, text: str, level: str) -> None:
        self._database.write(lambda tx: add_master_line(tx, row.task_id, row.id, text, level=level))


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - told to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, name="dstrial-storage", daemon=True).start()
    return future
