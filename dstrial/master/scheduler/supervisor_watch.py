"""Reports stopped supervisors, whose trials go on without output or end.

The finding is in the trial's log and in a file of the allocation's directory for ``dstrial status`` and the page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from dstrial.file_writes import replace_file
from dstrial.master.backends import Backend, RunRef
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.store.views.observe import STOPPED_SUPERVISOR_NAME

logger = logging.getLogger("dstrial.master.scheduler")

STOPPED_AFTER_S = 10.0  # how long a supervisor is stopped before that is logged
_POLL_S = 1.0
_REPEAT_S = 600.0  # between log lines about one supervisor


@dataclasses.dataclass(slots=True)
class _Seen:
    """State of one supervisor; seconds of the clock."""

    polled_s: float
    since_s: float | None = None
    logged_s: float | None = None


class SupervisorWatch:
    """Polls supervisors about once a second, in the scheduler's thread."""

    def __init__(
        self, database: Database, backend: Backend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._backend = backend
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def poll(self, row: Allocation, run: RunRef) -> None:
        now_s = self._clock()
        seen = self._seen.get(row.id)
        if seen is None:
            seen = self._seen[row.id] = _Seen(now_s)
            _remove_shown(row)  # a master before this one may have left it
        elif now_s - seen.polled_s < _POLL_S:
            return
        seen.polled_s = now_s
        pid = self._backend.stopped_supervisor(run)
        if pid is None:
            self._note_running(row, seen)
            return
        if seen.since_s is None:
            seen.since_s = now_s
        last_s = seen.logged_s
        if now_s - seen.since_s >= STOPPED_AFTER_S and (last_s is None or now_s - last_s >= _REPEAT_S):
            seen.logged_s = now_s
            self._report(row, pid, now_s - seen.since_s)

    def forget(self, row: Allocation) -> None:
        self._seen.pop(row.id, None)

    def _report(self, row: Allocation, pid: int, stopped_s: float) -> None:
        text = f"the supervisor of its processes, process {pid}, is stopped (SIGSTOP)"
        with contextlib.suppress(OSError):
            fields = {"text": text, "since_s": time.time() - stopped_s}
            replace_file(_shown_in(row), json.dumps(fields), sync=False)
        self._say(
            row,
            f"stalled: {text}; nothing that they print arrives, and they stop where it has no more room. "
            f"Let it go on with `kill -CONT {pid}`.",
            "WARNING",
        )

    def _note_running(self, row: Allocation, seen: _Seen) -> None:
        was_logged = seen.logged_s is not None
        seen.since_s = seen.logged_s = None
        if was_logged:
            _remove_shown(row)
            self._say(row, "stalled: no longer, the supervisor goes on", "INFO")

    def _say(self, row: Allocation, text: str, level: str) -> None:
        logger.log(logging.getLevelName(level), "allocation %s: %s", row.id, text)

        def add(tx: Transaction) -> None:
            add_master_line(tx, row.task_id, row.trial_id or None, text, level=level, allocation_id=row.id)

        self._database.write(add)


def _remove_shown(row: Allocation) -> None:
    with contextlib.suppress(OSError):
        _shown_in(row).unlink(missing_ok=True)


def _shown_in(row: Allocation) -> Path:
    return Path(row.directory) / STOPPED_SUPERVISOR_NAME
