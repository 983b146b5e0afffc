"""Where trials run: here or on a master, in a worker or launched one by one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord

if TYPE_CHECKING:
    from dstrial.dsat.backends.base import Backend
    from dstrial.dsat.backends.cluster import ClusterBackend


class BackendFactory:
    """Makes the backend once, when it is first needed."""

    def __init__(
        self,
        settings: SearchConfig,
        record: SearchRecord,
        signals: list[signal.Signals],  # grows when the process is asked to stop
        print_line: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._record = record
        self._signals = signals
        self._print_line = print_line
        self._backend: Backend | None = None
        self._master: ClusterBackend | None = None

    def make(self) -> Backend:
        if self._backend is None:
            self._backend = self._made()
            self._print_line(f"trials run on: {self._backend.describe()}")
        return self._backend

    def master(self) -> ClusterBackend:
        """Return the backend that talks to the master: it launches trials or runs workers."""
        from dstrial.dsat.backends.cluster import ClusterBackend

        if self._master is None:
            self._master = ClusterBackend(self._settings, lambda: bool(self._signals), self._record.search_id)
        return self._master

    def _made(self) -> Backend:
        """Return workers for a trial class; a script is launched anew each time."""
        settings = self._settings
        has_worker = settings.trial is not None and not settings.flags.no_worker
        if settings.flags.local:
            from dstrial.dsat.backends.local import LocalBackend, LocalPlacement
            from dstrial.dsat.backends.pool import WorkerBackend

            if has_worker:
                return WorkerBackend(settings, LocalPlacement(settings, self._record))
            return LocalBackend(settings, self._record)
        if has_worker:
            from dstrial.dsat.backends.cluster_workers import ClusterPlacement
            from dstrial.dsat.backends.pool import WorkerBackend

            return WorkerBackend(settings, ClusterPlacement(settings, self.master(), self._record.search_id))
        return self.master()
