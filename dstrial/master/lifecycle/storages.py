"""Whether checkpoint storages are there, before anything is done in them.

A storage is made at its first use and never again. What is missing later is waited for: trials do not start, deletions are put
off. What lies on another machine, or is no directory, is not looked at.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from dstrial.checkpoint.storage_identity import StorageIdentity, claim_identity, seen_again
from dstrial.errors import MasterError
from dstrial.master import file_limit
from dstrial.master.lifecycle.checkpoint_gc import storage_root
from dstrial.master.store import storages as storage_rows
from dstrial.master.store.database import Connection, Database, find_cluster_id
from dstrial.storage_guard import A_COPY, StorageGoneError, what_is_there_instead

logger = logging.getLogger("dstrial.master.storages")

LOOK_TIMEOUT_S = 5.0
"""How long a storage has for an answer. A network file system whose server is away blocks whoever asks, for ever."""

_KEEP_ANSWER_S = 1.0
_NUM_TO_FIND = 20

T = TypeVar("T")


def root_of(storage: Mapping[str, Any]) -> Path | None:
    """Return the directory of a storage; None if it is none of this machine."""
    try:
        root = storage_root(storage)
    except MasterError:
        return None
    return Path(os.path.normpath(root)) if root.is_absolute() else None


def judge(
    known: StorageIdentity | None, instead: str | None, *, has_files: bool, expected: int, found: int
) -> str | None:
    """Say what is there instead of a storage; None if it may be used.

    Args:
        known: by what it is known; None if it was never used by a release that knows storages.
        instead: what is there instead by that, ``what_is_there_instead``.
        has_files: whether the directory exists and has anything in it.
        expected: checkpoints that were looked for.
        found: how many of them are there.
    """
    if known is None:
        # An empty mount point must not become the storage of checkpoints that are somewhere else.
        return None if found or has_files or not expected else "no file of the checkpoints that it has"
    if instead == A_COPY and found == expected:
        return None  # restored from a backup, or on another disk now
    return instead


class Storages:
    """Looks at storages, and keeps each answer for a second. Thread-safe.

    Args:
        database: where it is written down by what they are known.
        umask: for what is made in a storage, which may be shared; None for that of this process.
        timeout_s: how long a storage has for an answer, seconds.
    """

    def __init__(
        self, database: Database, *, umask: int | None = None, timeout_s: float = LOOK_TIMEOUT_S
    ) -> None:
        self._database = database
        self._umask = umask
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._answers: dict[Path, tuple[float, str | None]] = {}
        self._looks: dict[Path, StorageLook[str | None]] = {}

    def trouble(self, storage: Mapping[str, Any], *, is_fresh: bool = False) -> str | None:
        """Say in a sentence why a storage cannot be used now; None if it can.

        Args:
            storage: the ``checkpoint_storage`` of an experiment.
            is_fresh: whether to look now, whatever was seen within the last second.

        Raises:
            OSError, MasterError: the process can open no more files.
        """
        root = root_of(storage)
        if root is None:
            return None
        with self._lock:
            at_s, answer = self._answers.get(root, (0.0, None))
        if not is_fresh and at_s and time.monotonic() - at_s < _KEEP_ANSWER_S:
            return answer
        answer = self._ask(root)
        with self._lock:
            self._answers[root] = time.monotonic(), answer
        return answer

    def trouble_if_known(self, storage: Mapping[str, Any]) -> str | None:
        """Say why a storage that was used cannot be used now; None for any other."""
        root = root_of(storage)
        if root is None:
            return None
        with self._database.read() as connection:
            known = storage_rows.find(connection, str(root))
        return None if known is None else self.trouble(storage, is_fresh=True)

    def secure(self, storage: Mapping[str, Any]) -> StorageIdentity | None:
        """Return by what a storage is known; its first use makes it.

        Returns:
            None if it is no directory of this machine, or cannot be made or read here: its trials will say so.

        Raises:
            StorageGoneError: it was used before, and is not there.
        """
        root = root_of(storage)
        if root is None:
            return None
        look = StorageLook(lambda: self._secure(root))
        if not look.wait(self._timeout_s):
            raise StorageGoneError(str(root), f"no answer within {self._timeout_s:g} s")
        if look.error is not None:
            raise look.error
        return look.result

    def _secure(self, root: Path) -> StorageIdentity | None:
        trouble = self._look(root)
        if trouble is not None:
            raise trouble
        with self._database.read() as connection:
            known = storage_rows.find(connection, str(root))
            cluster_id = find_cluster_id(connection) or ""
        try:
            if known is None:
                self._make(root)
                found = claim_identity(root, cluster_id, umask=self._umask)
            else:
                found = seen_again(known)
        except OSError as error:
            logger.warning("checkpoint storage %s gets no identity: %s", root, error)
            return None
        if found != known:
            self._database.write(lambda tx: storage_rows.remember(tx, found))
        return found

    def _make(self, root: Path) -> None:
        missing = [path for path in (root, *root.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            if self._umask is not None:
                path.chmod(0o777 & ~self._umask)

    def _ask(self, root: Path) -> str | None:
        """Look in a thread that nobody has to wait for; one at a time for each storage."""
        with self._lock:
            look = self._looks.get(root)
            if look is None or look.is_done:  # What nobody has waited for is how it was then.
                look = self._looks[root] = StorageLook(lambda: self._sentence(root))
        if not look.wait(self._timeout_s):
            return f"checkpoint storage {root} does not answer within {self._timeout_s:g} s"
        with self._lock:
            if self._looks.get(root) is look:
                del self._looks[root]
        if look.error is not None:
            if file_limit.is_shortage(look.error):
                raise look.error
            return f"checkpoint storage {root} cannot be looked at: {look.error}"
        return look.result

    def _sentence(self, root: Path) -> str | None:
        trouble = self._look(root)
        return None if trouble is None else str(trouble)

    def _look(self, root: Path) -> StorageGoneError | None:
        with self._database.read() as connection:
            known = storage_rows.find(connection, str(root))
        # Without a connection: a look that never ends would hold it when the database is closed.
        instead = None if known is None else what_is_there_instead(str(root), known.fields())
        if known is not None and instead != A_COPY:
            return None if instead is None else StorageGoneError(str(root), instead)
        with self._database.read() as connection:
            uuids = _newest(connection, root)
        found = [uuid for uuid in uuids if (root / uuid).is_dir()]
        why = judge(known, instead, has_files=_has_files(root), expected=len(uuids), found=len(found))
        if why is not None:
            return StorageGoneError(str(root), why)
        if known is not None:
            self._adopt_copy(known, root)
        return None

    def _adopt_copy(self, known: StorageIdentity, root: Path) -> None:
        moved = seen_again(known)
        self._database.write(lambda tx: storage_rows.remember(tx, moved))
        logger.warning(
            "checkpoint storage %s is on another device now, with its newest checkpoints, and is used", root
        )


def _newest(connection: Connection, root: Path) -> list[str]:
    return storage_rows.newest_uuids(connection, lambda storage: root_of(storage) == root, _NUM_TO_FIND)


def _has_files(root: Path) -> bool:
    try:
        return any(root.iterdir())
    except OSError:
        return False


class StorageLook(Generic[T]):
    """One call in a thread of its own, which does not keep the process alive.

    Attributes:
        result: what it has returned; None until it has ended.
        error: what it has raised; None for nothing.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self.result: T | None = None
        self.error: Exception | None = None
        self._call = call
        self._began_at_s = time.monotonic()
        self._is_done = threading.Event()
        threading.Thread(target=self._run, name="dstrial-storage", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._is_done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Say whether it has ended within a time, counted from its beginning."""
        return self._is_done.wait(max(0.0, self._began_at_s + timeout_s - time.monotonic()))

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - told to whoever asks
            self.error = error
        finally:
            self._is_done.set()
