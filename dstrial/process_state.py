"""What the kernel says of a process: alive, stopped, blocked, what it catches.

Only the standard library. ``dstrial.master.backends.supervisor``, which imports nothing of dstrial, asks by itself.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment: state letter (proc(5)), start in ticks since boot."""

    letter: str
    start_ticks: int

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie."""
        return self.letter in ("Z", "X")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.letter in ("T", "t")

    @property
    def is_uninterruptible(self) -> bool:
        """Whether it waits inside the kernel, where no signal reaches it."""
        return self.letter == "D"


def parse_stat(text: str) -> ProcessState | None:
    """Read a line of ``/proc/PID/stat``; None if it is none."""
    # The second field, the command, is in parentheses and may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    try:
        return ProcessState(fields[0], int(fields[19]))
    except (IndexError, ValueError):
        return None


def parse_catches(status_text: str, number: int) -> bool:
    """Say whether ``/proc/PID/status`` lists a signal as caught (``SigCgt``)."""
    for line in status_text.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value.strip(), 16) >> (number - 1) & 1)
    return False


def read_state(pid: int) -> ProcessState | None:
    """Return how a process is; None if there is none."""
    text = _read(pid, "stat")
    return None if text is None else parse_stat(text)


def start_ticks(pid: int) -> int | None:
    """Return a process's start in ticks since boot, which tells a reused pid apart."""
    state = read_state(pid)
    return None if state is None else state.start_ticks


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP or a debugger holds a live process."""
    state = read_state(pid)
    return state is not None and state.is_stopped


def catches(pid: int, number: int) -> bool:
    """Say whether a process catches a signal; one that does not may be ended by it."""
    text = _read(pid, "status")
    return text is not None and parse_catches(text, number)


def kernel_function(pid: int) -> str:
    """Return what a process waits in inside the kernel; empty if unknown."""
    text = (_read(pid, "wchan") or "").strip()
    return "" if text == "0" else text


def children(pid: int) -> list[int]:
    """Return what a process's main thread has started; nothing if unknown."""
    text = _read(pid, f"task/{pid}/children")
    return [] if text is None else [int(child) for child in text.split()]


def has_open(pid: int, path: Path) -> bool:
    try:
        return any(one.readlink() == path for one in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _read(pid: int, name: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def open_closed_streams() -> None:
    """Lead standard streams that are closed (``>&-``) to the null device.

    Python has None for them, and the next file that is opened would have their number: a library's line goes into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
