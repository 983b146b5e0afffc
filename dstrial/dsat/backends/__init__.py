"""Backends, which run a search's trials on this machine or on a Determined master."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dstrial.dsat.backends.trial_spec import measured_config, measuring_command, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.methods import PREDICT

if TYPE_CHECKING:
    from dstrial.dsat.backends.base import Backend, RemoteSearch
    from dstrial.dsat.backends.cluster import ClusterBackend


def make_backend(
    settings: SearchConfig, record: SearchRecord, master: Callable[[], ClusterBackend]
) -> Backend | RemoteSearch:
    """Return the backend that will run the trials of a search with these settings.

    If method ``predict`` tunes a trial class and one machine has enough slots for a trial, the same ranks measure all trials,
    unless ``--no-worker`` is set. Otherwise every trial starts its own ranks. ``master`` returns the backend of a Determined
    master; it is not called for a search on this machine.
    """
    is_launched_anew = settings.trial is None or settings.flags.no_worker or settings.method != PREDICT
    if settings.flags.local:
        from dstrial.dsat.backends.local import LocalBackend, PersistentRanks

        if is_launched_anew:
            return LocalBackend(settings, record)
        path = record.ranks_path / "experiment.yaml"
        path.parent.mkdir(exist_ok=True)
        write_config(path, measured_config(settings))
        return PersistentRanks(settings, record, measuring_command(settings, str(path), sys.executable))
    if is_launched_anew or not master().has_machine_for(settings.num_slots):
        return master()
    from dstrial.dsat.backends.search_on_master import SearchOnMaster

    return SearchOnMaster(settings, master(), record)
