"""Probe whether checkpoint storages are available.

A storage's directory is created at its first use only. Only storages that are local directories are probed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import (
    TimeoutError as FutureTimeoutError,  # not the builtin class before Python 3.11
)
from pathlib import Path
from typing import Any, TypeVar

from dstrial.errors import MasterError
from dstrial.master.lifecycle.checkpoint_gc import storage_root
from dstrial.master.store import checkpoints, experiments
from dstrial.master.store.database import Database
from dstrial.storage_guard import STORAGE_MARKER, StorageGoneError, what_is_there_instead

T = TypeVar("T")
logger = logging.getLogger("dstrial.master.storages")

PROBE_TIMEOUT_S = 5.0  # timeout of a probe: a network file system blocks forever if its server is unreachable
_MARKER_TEXT = "Checkpoints of dstrial are stored here. If this file is missing, dstrial treats the storage as not mounted.\n"


def root_of(storage: Mapping[str, Any]) -> Path | None:
    """Return a storage's local directory; None if it has no absolute path.

    ``storage`` is a config's ``checkpoint_storage``. None for an object storage.
    """
    try:
        root = storage_root(storage)
    except MasterError:
        return None
    return Path(os.path.normpath(root)) if root.is_absolute() else None


class Storages:
    """Checks, with a timeout, whether checkpoint storages are available. Thread-safe.

    A storage is the ``checkpoint_storage`` of a config. A storage that was used before counts as not mounted if its
    marker file is missing.
    """

    def __init__(
        self, database: Database, *, umask: int | None = None, timeout_s: float = PROBE_TIMEOUT_S
    ) -> None:
        self._database = database
        self._umask = umask
        self._timeout_s = timeout_s

    def trouble(self, storage: Mapping[str, Any]) -> str | None:
        """Return why a storage is unavailable; None if it is available or not probed.

        A storage is not probed if it was never used or has no local directory.
        """
        root = root_of(storage)
        if root is None or not self._is_known(root):
            return None
        instead = self._probe(root)
        return None if instead is None else str(StorageGoneError(str(root), instead))

    def trouble_of(self, experiment_id: int) -> str | None:
        """Return ``trouble`` of an experiment's storage; None for a deleted experiment."""
        with self._database.read() as connection:
            experiment = experiments.get(connection, experiment_id)
        if experiment is None:  # deleted concurrently
            return None
        return self.trouble(json.loads(experiment.config)["checkpoint_storage"])

    def secure(self, storage: Mapping[str, Any]) -> Path | None:
        """Return a storage's directory; create it with its marker file at the first use.

        Returns None if the storage is not local or cannot be created; in the latter case, trials report the error.

        Raises:
            StorageGoneError: the storage was used before and is unavailable, or does not answer at its first use.
        """
        root = root_of(storage)
        if root is None:
            return None
        if self._is_known(root):
            instead = self._probe(root)
            if instead is not None:
                raise StorageGoneError(str(root), instead)
            return root
        try:
            _in_thread(lambda: self._make(root)).result(self._timeout_s)
        except FutureTimeoutError:
            raise StorageGoneError(str(root), self._no_answer()) from None
        except OSError as error:
            logger.warning("no marker file in checkpoint storage %s: %s", root, error)
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

    def _probe(self, root: Path) -> str | None:
        """Return why the storage with directory ``root`` is unavailable, or None."""
        try:
            return _in_thread(lambda: what_is_there_instead(str(root))).result(self._timeout_s)
        except FutureTimeoutError:
            return self._no_answer()


def _in_thread(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again by result()
            future.set_exception(error)

    threading.Thread(target=run, name="dstrial-storage", daemon=True).start()
    return future
