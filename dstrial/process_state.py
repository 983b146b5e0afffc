"""Read processes' states, start times and signal handlers from /proc."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessState:
    """State letter (proc(5)) and start time (clock ticks since boot) of a process."""

    letter: str
    start_ticks: int

    @property
    def has_ended(self) -> bool:
        """Whether the process is a zombie or dead (state Z or X)."""
        return self.letter in ("Z", "X")

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal or debugger."""
        return self.letter in ("T", "t")


def parse_stat(text: str) -> ProcessState | None:
    """Parse the text of ``/proc/PID/stat``; None if the text is invalid."""
    # The second field, the command, is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    try:
        return ProcessState(fields[0], int(fields[19]))
    except (IndexError, ValueError):
        return None


def parse_catches(status_text: str, number: int) -> bool:
    """Return whether ``/proc/PID/status`` lists signal ``number`` under ``SigCgt``."""
    for line in status_text.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value.strip(), 16) >> (number - 1) & 1)
    return False


def read_state(pid: int) -> ProcessState | None:
    """Return the state of process ``pid``; None if the process does not exist."""
    text = _read(pid, "stat")
    return None if text is None else parse_stat(text)


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None without a process.

    The start time distinguishes the process from a later process with the same pid.
    """
    state = read_state(pid)
    return None if state is None else state.start_ticks


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or a debugger."""
    state = read_state(pid)
    return state is not None and state.is_stopped


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for the signal ``number``."""
    text = _read(pid, "status")
    return text is not None and parse_catches(text, number)


def _read(pid: int, name: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def open_closed_streams() -> None:
    """Open the null device for standard streams that are closed (``>&-``).

    Otherwise the next opened file would get the descriptor 0, 1 or 2, and libraries would write their output into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
