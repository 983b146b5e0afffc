"""Start launchers that survive the search, and find them after a restart."""

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

_IMPORT_TIMEOUT_S = 60.0
_SERVER = OwnForkServer(["dstrial.launch.imported_ahead"])
_PROBE_BYTES = 2**16  # more than a launcher writes before its ranks start
_STAT_NAME = "launcher.stat"
# (signal, seconds that the launcher has to end). The launcher kills its ranks at the second SIGINT; a SIGKILL would orphan
# them.
_END_SIGNALS = ((signal.SIGINT, 1.0), (signal.SIGINT, 20.0), (signal.SIGKILL, 20.0))

# The shell writes its own line of /proc, with process id and start time, before it becomes the launcher. So the next search
# finds the launcher, even if this search is killed in between.
_WRITE_STAT = 'cat "/proc/$$/stat" > "$0" && exec "$@"'


@dataclasses.dataclass(slots=True)
class LauncherProcess:
    """A launcher of ranks, running or ended; it leads its own process session."""

    pid: int
    start_ticks: int  # since boot; distinguishes the launcher from a later process with the same id
    started_s: float
    # None if another process of this search started it
    process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit status; None while the launcher runs, -1 if the status is unknown.

        The status is unknown if another process started the launcher.
        """
        if self.process is not None:
            return self.process.poll()
        state = read_state(self.pid)
        is_alive = state is not None and not state.has_ended and state.start_ticks == self.start_ticks
        return None if is_alive else -1

    def end(self) -> None:
        """Interrupt the launcher, which then ends its ranks; kill it after a timeout."""
        for number, timeout_s in _END_SIGNALS:
            if self.exit_code is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            give_up_at_s = time.monotonic() + timeout_s
            while self.exit_code is None and time.monotonic() < give_up_at_s:
                time.sleep(0.05)


def launch(
    words: Sequence[str], directory: Path, *, cwd: Path, variables: Mapping[str, str]
) -> LauncherProcess:
    """Start the command ``words``; write its output and process id into ``directory``."""
    probe = directory / ".room"
    try:
        # Check for disk space: a launcher that cannot write its process id would never be found again.
        probe.write_bytes(b"\0" * _PROBE_BYTES)
    finally:
        probe.unlink(missing_ok=True)
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
    """Fork a launcher from a server that has imported torch; None if this fails."""
    may_fork = words[0] == sys.executable and trains_trial_class(words[1:])
    server = _SERVER.get(variables, _IMPORT_TIMEOUT_S) if may_fork else None
    if server is None:
        return None
    program = Program(words[1:], variables, str(Path.cwd() / cwd), leads="session", has_spare=True)

    def write_stat(pid: int) -> None:
        stat_path.write_bytes(Path(f"/proc/{pid}/stat").read_bytes())

    try:
        return server.start(program, files, known=write_stat)
    except ForkRefusedError as reason:
        logger.info("a launcher starts as a new process, not as a fork: %s", reason)
        return None


def found(directory: Path) -> LauncherProcess | None:
    """Return the last launcher started with this directory; None if there was none."""
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
