"""A launcher that outlives its parent, and is found by its process id on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrial.fork_server.client import ForkedProcess, ForkRefusedError, OwnForkServer, trains_trial_class
from dstrial.fork_server.fork import Program
from dstrial.process_state import parse_stat, read_state

logger = logging.getLogger(__name__)

_END_S = 20.0
_IMPORT_TIMEOUT_S = 60.0
_SERVER = OwnForkServer(["dstrial.launch.imported_ahead"])
_ROOM_BYTES = 2**16
_STAT_NAME = "launcher.stat"

# The launcher's shell writes its own line of /proc, with process id and start time, before it becomes the launcher, so that a
# search which is killed between the two finds it again.
_WRITE_STAT = 'cat "/proc/$$/stat" > "$0" && exec "$@"'


@dataclasses.dataclass(slots=True)
class LauncherProcess:
    """A launcher that runs, or ran; it leads a session of its own."""

    pid: int
    start_ticks: int  # since boot, which tells it from another process of that id
    started_s: float
    process: subprocess.Popen[bytes] | ForkedProcess | None = (
        None  # None if another process of this search started it
    )

    @property
    def exit_code(self) -> int | None:
        """The exit status; -1 for an ended launcher not our child, None while it runs."""
        if self.process is not None:
            return self.process.poll()
        state = read_state(self.pid)
        is_alive = state is not None and not state.has_ended and state.start_ticks == self.start_ticks
        return None if is_alive else -1

    def end(self) -> None:
        """Ask the launcher to end its ranks, and kill it if it does not."""
        if self.exit_code is not None:
            return
        # On a second request a launcher kills its ranks at once.
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if self._ends_within(1.0 if number is signal.SIGINT else _END_S):
                return

    def _ends_within(self, seconds: float) -> bool:
        give_up_at_s = time.monotonic() + seconds
        while self.exit_code is None:
            if time.monotonic() > give_up_at_s:
                return False
            time.sleep(0.05)
        return True


def launch(
    words: Sequence[str], directory: Path, *, cwd: Path, variables: Mapping[str, str]
) -> LauncherProcess:
    """Start a launcher with its output and process id in a directory that exists."""
    room = directory / ".room"
    try:
        # A launcher that cannot write its process id would never be found again.
        room.write_bytes(b"\0" * _ROOM_BYTES)
    finally:
        room.unlink(missing_ok=True)
    stat_path = directory / _STAT_NAME
    with open(os.devnull, "rb") as null, (directory / "output.log").open("wb") as output:  # noqa: PTH123
        files = [null.fileno(), output.fileno(), output.fileno()]
        process = _forked(words, stat_path, cwd, variables, files) or subprocess.Popen(
            ["/bin/sh", "-c", _WRITE_STAT, str(stat_path), *words],
            cwd=cwd,
            env=dict(variables),
            stdin=null,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state = read_state(process.pid)
    return LauncherProcess(process.pid, 0 if state is None else state.start_ticks, time.time(), process)


def _forked(
    words: Sequence[str], stat_path: Path, cwd: Path, variables: Mapping[str, str], files: Sequence[int]
) -> ForkedProcess | None:
    """Start a launcher and its ranks as forks; None where only a new process will do."""
    may_fork = words[0] == sys.executable and trains_trial_class(words[1:])
    server = _SERVER.get(variables, _IMPORT_TIMEOUT_S) if may_fork else None
    if server is None:
        return None
    directory = str(Path.cwd() / cwd)
    program = Program(words[1:], variables, directory, leads="session", has_spare=True)

    def note(pid: int) -> None:
        stat_path.write_bytes(Path(f"/proc/{pid}/stat").read_bytes())

    try:
        return server.start(program, files, known=note)
    except ForkRefusedError as reason:
        logger.info("a launcher starts as a new process, not as a fork: %s", reason)
        return None


def found(directory: Path) -> LauncherProcess | None:
    """Return the launcher last started in a directory, living or not; None without."""
    path = directory / _STAT_NAME
    try:
        text, started_s = path.read_text(errors="replace"), path.stat().st_mtime
    except OSError:
        return None
    state = parse_stat(text)
    return None if state is None else LauncherProcess(int(text.split()[0]), state.start_ticks, started_s)


def log_lines(directory: Path) -> list[str]:
    path = directory / "output.log"
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
