"""Backends that run measuring trials, on this machine or on Determined's master."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dstrial.dsat.backends.trial_spec import measured_config, measuring_command, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.methods import METHODS

if TYPE_CHECKING:
    from dstrial.dsat.backends.base import Backend
    from dstrial.dsat.backends.cluster import ClusterBackend


class BackendFactory:
    """Creates the backend that runs a search's trials, at the first call of ``make``."""

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
            self._backend = self._select()
            self._print_line(f"trials run on: {self._backend.describe()}")
        return self._backend

    def master(self) -> ClusterBackend:
        """Return the backend that submits experiments to the master."""
        from dstrial.dsat.backends.cluster import ClusterBackend

        if self._master is None:
            self._master = ClusterBackend(self._settings, lambda: bool(self._signals), self._record.search_id)
        return self._master

    def _select(self) -> Backend:
        """Return persistent ranks for ``predict`` on a trial class, else another backend."""
        settings = self._settings
        is_launched_anew = (
            settings.trial is None or settings.flags.no_worker or not METHODS[settings.method].predicts
        )
        if settings.flags.local:
            from dstrial.dsat.backends.local import LocalBackend
            from dstrial.dsat.backends.persistent_ranks import PersistentRanks

            if is_launched_anew:
                return LocalBackend(settings, self._record)
            path = self._record.ranks_path / "experiment.yaml"
            path.parent.mkdir(exist_ok=True)
            write_config(path, measured_config(settings))
            return PersistentRanks(
                settings, self._record, measuring_command(settings, str(path), sys.executable)
            )
        if is_launched_anew or not self.master().has_machine_for(settings.num_slots):
            return self.master()
        from dstrial.dsat.backends.search_on_master import SearchOnMaster

        return SearchOnMaster(settings, self.master(), self._record)
