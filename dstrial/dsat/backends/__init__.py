"""Backends, which run a search's trials on this machine or on a Determined master."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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

    If method ``predict`` tunes a trial class and one machine has enough slots for a trial, the whole search runs in one trial on
    the master. ``master`` returns the backend of a Determined master; it is not called for a search on this machine.
    """
    if settings.flags.local:
        from dstrial.dsat.backends.local import LocalBackend

        return LocalBackend(settings, record)
    if (
        settings.trial is None
        or settings.method != PREDICT
        or not master().has_machine_for(settings.num_slots)
    ):
        return master()
    from dstrial.dsat.backends.search_on_master import SearchOnMaster

    return SearchOnMaster(settings, master(), record)
