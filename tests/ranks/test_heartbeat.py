"""Heartbeats that ranks write to mapped memory and their launcher reads."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dstrial.ranks.heartbeat import (
    HEARTBEAT_VARIABLE,
    Phase,
    heartbeat,
    make_heartbeat_file,
    read_beat,
    start_ticks,
)


def test_launcher_reads_heartbeat_of_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heartbeats"
    beats = make_heartbeat_file(path, 3)
    assert [read_beat(beats, slot) for slot in range(3)] == [None] * 3
    monkeypatch.setenv(HEARTBEAT_VARIABLE, f"1:{path}")
    mine = heartbeat()
    assert heartbeat() is mine
    before_s = time.monotonic()
    mine.begin_batch(81)
    beat = read_beat(beats, 1)
    assert beat is not None
    assert (beat.phase, beat.batch) == (Phase.BATCH, 81)
    assert before_s <= beat.since_s <= time.monotonic()
    assert (beat.pid, beat.start_ticks) == (os.getpid(), start_ticks(os.getpid()))
    assert beat.thread_id == threading.main_thread().ident
    assert read_beat(beats, 0) is None
    assert read_beat(beats, 2) is None


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mmap.mmap:
    """Return the heartbeat file of this process, which is its only rank."""
    monkeypatch.setenv(HEARTBEAT_VARIABLE, f"0:{tmp_path / 'heartbeats'}")
    return make_heartbeat_file(tmp_path / "heartbeats", 1)


def test_heartbeat_keeps_longest_successful_phase_duration(beats: mmap.mmap) -> None:
    mine = heartbeat()
    with mine.during(Phase.VALIDATION, 10):
        inside = read_beat(beats, 0)
    after = read_beat(beats, 0)
    assert inside is not None
    assert after is not None
    assert (inside.phase, inside.longest_s[Phase.VALIDATION]) == (Phase.VALIDATION, 0.0)
    assert after.phase is Phase.BETWEEN
    assert 0 < after.longest_s[Phase.VALIDATION] < 60
    with pytest.raises(ValueError, match="user"), mine.during(Phase.CALLBACK, 10):
        raise ValueError("user")
    failed = read_beat(beats, 0)
    assert failed is not None
    assert failed.longest_s[Phase.CALLBACK] == 0.0


def test_heartbeat_without_launcher_is_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    heartbeat().begin_batch(3)
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "0:/nonexistent/heartbeats")
    heartbeat().begin_batch(3)


@pytest.mark.process
def test_child_process_does_not_write_parent_heartbeat(beats: mmap.mmap) -> None:
    heartbeat().begin_batch(3)
    script = "from dstrial.ranks.heartbeat import heartbeat; heartbeat().begin_batch(99)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    beat = read_beat(beats, 0)
    assert beat is not None
    assert (beat.batch, beat.pid) == (3, os.getpid())


def test_begin_records_duration_of_previous_phase(beats: mmap.mmap) -> None:
    mine = heartbeat()
    for phase in Phase:
        mine.begin(phase, 7)
        assert mine.phase is phase
        time.sleep(0.001)
    mine.begin(Phase.NONE, 7)
    beat = read_beat(beats, 0)
    assert beat is not None
    assert [seconds > 0 for seconds in beat.longest_s] == [phase is not Phase.NONE for phase in Phase]
