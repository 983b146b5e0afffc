"""Backoff after consecutive failures, and their limit."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master.scheduler.retries import Retries, is_shared_fault
from dstrial.master.store.database import Database


def test_retries_back_off_and_end() -> None:
    now_s = 0.0
    retries = Retries(first_s=1, longest_s=5, limit=4, clock=lambda: now_s)
    assert retries.is_due("a")

    delays = []
    for attempt in range(4):
        assert retries.record_failure("a") is (attempt == 3)
        assert not retries.is_due("a")
        delays.append(retries.delay_s("a"))
        now_s += delays[-1]
        assert retries.is_due("a")

    assert delays == [1, 2, 4, 5]
    assert retries.is_due("b")


def test_failure_count_resets_and_skips_machine_faults() -> None:
    retries = Retries(limit=2)
    assert not retries.record_failure("a")
    retries.forget("a")
    assert retries.is_due("a")
    assert not retries.record_failure("a")
    assert not any(retries.record_failure("b", counts=False) for _ in range(9))
    assert not any(retries.record_failure("c", limit=9) for _ in range(5))
    assert not retries.record_failure("c", counts=False), "a full disk after refusals of a bucket"


def test_postponed_returns_attempts_not_yet_due() -> None:
    now_s = 0.0
    retries = Retries(first_s=1, clock=lambda: now_s)
    retries.record_failure("a")
    now_s = 0.5
    retries.record_failure("b")
    assert retries.postponed() == {"a": 0.5, "b": 1.0}
    now_s = 1.0
    assert retries.postponed() == {"b": 0.5}


def _caused_by(error: OSError) -> MasterError:
    try:
        raise MasterError("x") from error
    except MasterError as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, ""), True),
        (_caused_by(OSError(errno.EMFILE, "")), True),
        (sqlite3.OperationalError("disk I/O error"), True),
        (sqlite3.IntegrityError("UNIQUE constraint failed"), False),
        (OSError(errno.EACCES, ""), False),
        (LookupError("no such field"), False),
    ],
)
def test_is_shared_fault_detects_machine_faults(tmp_path: Path, error: Exception, *, expected: bool) -> None:
    with contextlib.closing(Database(tmp_path / "master.db")) as database:
        assert is_shared_fault(error, database) == expected
