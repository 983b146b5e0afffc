"""Where trials run: here or on a master, in a worker or launched one by one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from dstrial.dsat.config import SearchSettings
from dstrial.dsat.core.journal import SearchRecord

if TYPE_CHECKING:
    from dstrial.dsat.backends.base import Backend
    from dstrial.dsat.backends.cluster import MasterBackend


class LateBackend:
    """Makes the backend once, when it is first needed.

    Args:
        settings: of the search.
        record: its files.
        signals: grows when the process is asked to stop.
        tell: prints a line for a person.
    """

    def __init__(
        self,
        settings: SearchSettings,
        record: SearchRecord,
        signals: list[signal.Signals],
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._record = record
        self._signals = signals
        self._tell = tell
        self._backend: Backend | None = None
        self._master: MasterBackend | None = None

    def make(self) -> Backend:
        """Return the backend.

        Raises:
            DstrialError: there is no master.
        """
        if self._backend is None:
            self._backend = self._made()
            self._tell(f"trials run on: {self._backend.describe()}")
        return self._backend

    def master(self) -> MasterBackend:
        """Return the backend that talks to the master: it launches trials or runs workers.

        Raises:
            DstrialError: there is no master.
        """
        from dstrial.dsat.backends.cluster import MasterBackend

        if self._master is None:
            self._master = MasterBackend(self._settings, lambda: bool(self._signals), self._record.search_id)
        return self._master

    def _made(self) -> Backend:
        """Workers measure a trial class; a script is launched anew for each configuration."""
        settings = self._settings
        has_worker = settings.trial is not None and not settings.flags.no_worker
        if settings.flags.local:
            from dstrial.dsat.backends.local import LocalBackend, LocalPlace
            from dstrial.dsat.backends.pool import WorkerBackend

            if has_worker:
                return WorkerBackend(settings, LocalPlace(settings, self._record))
            return LocalBackend(settings, self._record)
        if has_worker:
            from dstrial.dsat.backends.cluster_workers import MasterPlace
            from dstrial.dsat.backends.pool import WorkerBackend

            return WorkerBackend(settings, MasterPlace(settings, self.master(), self._record.search_id))
        return self.master()
