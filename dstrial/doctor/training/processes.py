"""The processes of one check, started as their own group and ended with it.

A check starts masters, launchers and ranks, which lead sessions of their own. What belongs to it is known by a variable
that its processes inherit and no other process has; nothing is matched by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Not DSTRIAL_ or DET_: the master keeps those of its own environment from its trials.
MARKER_VARIABLE = "TRAINING_CHECK_MARKER"

_POLL_S = 0.05
_STACKS_S = 1.0
_ENDING_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a check's process ended.

    Attributes:
        exit_code: as ``subprocess`` has it; negative for a signal.
        is_late: whether it was ended because its time was up.
        num_left: processes that it left behind, which were ended.
    """

    exit_code: int
    is_late: bool
    seconds: float
    num_left: int


def run_marked(
    command: Sequence[str],
    *,
    output: Path,
    cwd: Path,
    env: Mapping[str, str],
    deadline_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a process until it ends or the deadline comes; end all that it has started.

    At the deadline its Python processes are asked for their stacks (SIGUSR1) before they are killed. ``output`` gets stdout and
    stderr; ``on_wait`` is called again and again meanwhile.
    """
    marker = secrets.token_hex(16)
    began_s = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    is_late = False
    try:
        with output.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**env, MARKER_VARIABLE: marker},
                start_new_session=True,
            )
        while process.poll() is None:
            is_late = time.monotonic() - began_s > deadline_s
            if is_late:
                _ask_for_stacks(marker)
                break
            on_wait()
            time.sleep(_POLL_S)
    finally:
        # Also after Ctrl-C.
        seconds = time.monotonic() - began_s
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        num_left = end_marked(marker)
    return Ended(process.returncode, is_late, seconds, num_left)


def _ask_for_stacks(marker: str) -> None:
    for pid in marked(marker):
        with contextlib.suppress(OSError):
            if _handles(pid, signal.SIGUSR1):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Say whether a process has a handler of a signal, which would end it otherwise."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def end_marked(marker: str) -> int:
    """Kill all marked processes, also those started meanwhile; return how many."""
    seen: set[int] = set()
    give_up_at_s = time.monotonic() + _ENDING_S
    while (left := marked(marker)) and time.monotonic() < give_up_at_s:
        for pid in left:
            seen.add(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return len(seen)


def marked(marker: str) -> list[int]:
    """Return the processes that inherited the marker; zombies no longer have it."""
    wanted = f"{MARKER_VARIABLE}={marker}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]
