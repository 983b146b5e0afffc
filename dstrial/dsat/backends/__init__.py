"""Where trials run: here or on a master, in ranks that live on or launched anew."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dstrial.config.documents import yaml_text
from dstrial.config.secrets import SecretNames, secrets_in
from dstrial.dsat.backends.trial_spec import measured_config, ranks_command
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.methods import METHODS
from dstrial.file_writes import replace_file

if TYPE_CHECKING:
    from dstrial.dsat.backends.base import Backend, RemoteSearch
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
        self._backend: Backend | RemoteSearch | None = None
        self._master: ClusterBackend | None = None

    def make(self) -> Backend | RemoteSearch:
        if self._backend is None:
            self._backend = self._made()
            self._print_line(f"trials run on: {self._backend.describe()}")
        return self._backend

    def master(self) -> ClusterBackend:
        """Return the backend that talks to the master: it launches trials, or searches."""
        from dstrial.dsat.backends.cluster import ClusterBackend

        if self._master is None:
            self._master = ClusterBackend(self._settings, lambda: bool(self._signals), self._record.search_id)
        return self._master

    def _made(self) -> Backend | RemoteSearch:
        """Return ranks that live on for a search by prediction; all else is launched anew."""
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
            config = measured_config(settings)
            replace_file(path, yaml_text(config), is_private=bool(secrets_in(config, SecretNames())))
            return PersistentRanks(settings, self._record, ranks_command(settings, str(path), sys.executable))
        if is_launched_anew or not self.master().has_machine_for(settings.num_slots):
            return self.master()
        from dstrial.dsat.backends.search_on_master import SearchOnMaster

        return SearchOnMaster(settings, self.master(), self._record)
