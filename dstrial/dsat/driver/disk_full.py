"""While a disk is full: events wait to be written, trials wait for room."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.dsat.core.journal import DISK_FULL_ERRORS, SearchRecord
from dstrial.dsat.core.outcome import Failure, FailureKind

_RETRY_S = 5.0
_PROBE_BYTES = 4096


class DiskFullQueue:
    """Events that wait to be written, and trials that wait for room on a disk."""

    def __init__(
        self,
        record: SearchRecord,
        print_line: Callable[[str], None],
        should_stop: Callable[[], bool],
        poll_s: float,
    ) -> None:
        self._record = record
        self._print_line = print_line
        self._should_stop = should_stop
        self._poll_s = poll_s
        self._due_at_s: dict[int, float] = {}
        self._told: dict[int, str] = {}

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Put an event on record; while that cannot be done, wait and say so.

        Raises:
            KeyboardInterrupt: the process was asked to stop meanwhile.
        """
        told = ""
        retry_at_s = 0.0
        while True:
            if time.monotonic() >= retry_at_s:
                try:
                    self._record.append(kind, fields)
                except OSError as error:
                    if error.strerror != told:
                        told = error.strerror or str(error)
                        self._print_line(
                            f"{self._record.events_path} cannot be written ({told}); waiting until it can be"
                        )
                    retry_at_s = time.monotonic() + _RETRY_S
                else:
                    if told:
                        self._print_line(f"{self._record.events_path} can be written again")
                    return
            if self._should_stop():
                raise KeyboardInterrupt
            time.sleep(self._poll_s)

    def is_cause_of(self, failure: Failure) -> bool:
        """Return whether a full disk, not the configuration, made a trial fail."""
        if failure.kind is FailureKind.NO_ROOM:
            return True
        if failure.kind.is_out_of_memory or failure.kind is FailureKind.CANCELED:
            return False
        probe = self._record.path / ".room"
        try:
            probe.write_bytes(b"\0" * _PROBE_BYTES)
        except OSError as error:
            return error.errno in DISK_FULL_ERRORS
        finally:
            probe.unlink(missing_ok=True)
        return False

    def postpone(self, trial_id: int, why: str) -> None:
        if self._told.get(trial_id) != why:
            self._told[trial_id] = why
            self._print_line(
                f"trial {trial_id} finds no room on the disk ({why}); it is measured when there is some"
            )
        self._due_at_s[trial_id] = time.monotonic() + _RETRY_S

    def was_postponed(self, trial_id: int) -> bool:
        return trial_id in self._told

    def is_postponed(self, trial_id: int) -> bool:
        return trial_id in self._due_at_s

    def take_due(self) -> list[int]:
        due = [trial_id for trial_id, at_s in self._due_at_s.items() if time.monotonic() >= at_s]
        for trial_id in due:
            del self._due_at_s[trial_id]
        return due
