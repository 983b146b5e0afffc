"""Process states and start times read from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from waiting import wait_for

from dstrial.process_state import is_stopped, parse_catches, parse_stat, read_state, start_ticks


def test_proc_stat_and_status_are_parsed() -> None:
    stat = "12 (a ) T b) T 1 12 12 0 -1 4194304 " + "0 " * 12 + "777 0"
    state = parse_stat(stat)
    assert state is not None
    assert (state.is_stopped, state.start_ticks) == (True, 777)
    assert parse_stat("") is None
    assert parse_catches("Name:\tx\nSigCgt:\t0000040000000002\n", 43)
    assert not parse_catches("Name:\tx\nSigCgt:\t0000040000000002\n", 44)
    assert not parse_catches("", 1)


@pytest.mark.process
def test_process_state_follows_signals() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        began = start_ticks(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(process.pid))
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: not is_stopped(process.pid))
        process.kill()
        wait_for(lambda: (state := read_state(process.pid)) is not None and state.has_ended)
        assert start_ticks(process.pid) == began
    assert read_state(process.pid) is None
    assert start_ticks(process.pid) is None
    assert start_ticks(os.getpid()) not in (None, began)
