"""Fork servers: processes with torch and DeepSpeed imported, which fork trials.

A fork takes milliseconds, the imports take seconds. A fork server (``dstrial.fork_server``) starts a trial class only with the
server's own interpreter and environment; variables that identify a trial or rank may differ. If no server matches, a trial starts
as a new process, and a server is started for later trials. A script always starts as a new process.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.fork_server.client import ForkRefusedError, ForkServer, start_program, trains_trial_class
from dstrial.fork_server.fork import ORPHAN, Program
from dstrial.master import file_limit
from dstrial.master.backends import supervisor
from dstrial.master.backends.status import SERVERS_NAME, ShownServer, StatusFile

logger = logging.getLogger(__name__)

IMPORTS = ("dstrial.launch.imported_ahead",)  # ranks in new processes import this module first, too
MAX_SERVERS = 2  # a further server replaces the least recently used one
_SHELL_CHARACTERS = frozenset("|&;<>()$`\\\"'*?[]#~=%!{}\n")  # characters that a shell interprets


def forkable_words(command: Sequence[str], environment: Mapping[str, str], python: str) -> list[str] | None:
    """Return the arguments after ``python`` in a command; None if no fork can run it.

    A fork can run a command that trains a trial class with the interpreter ``python``. A command ``sh -c TEXT`` is treated as
    TEXT if TEXT has no shell syntax.
    """
    words = list(command)
    if len(words) == 3 and words[:2] == ["sh", "-c"] and not _SHELL_CHARACTERS & set(words[2]):
        words = shlex.split(words[2])
    if not trains_trial_class(words[1:]):
        return None
    program = shutil.which(words[0], path=environment.get("PATH"))
    if program is None or Path(program).parent != Path(python).parent:
        return None
    # A virtual environment's python, python3 and python3.11 are links to the same file.
    return words[1:] if os.path.realpath(program) == os.path.realpath(python) else None


class _Server(ForkServer):
    """A fork server for one Python interpreter, with the time of its last use."""

    num_forks = 0  # number of allocations that were started by a fork
    is_broken = False  # whether the imports have failed

    def __init__(self, python: str, environment: Mapping[str, str], log: Path) -> None:
        super().__init__(environment, IMPORTS, log=log, python=python)
        self.python = python
        self.used_s = time.monotonic()

    def can_fork(self) -> bool:
        """Return whether the fork server's imports have ended without an error."""
        try:
            return not self.is_broken and self.is_ready()
        except ForkRefusedError as error:
            logger.warning("fork server %s cannot be used: %s", self.pid, error)
            self.is_broken = True  # stays listed, so that it is not replaced
            return False


class ForkServers:
    """The fork servers of a master or agent, which end after ``idle_timeout_s`` idle.

    One thread at a time may call the methods.
    """

    def __init__(self, log: Path, *, is_on: bool = True, idle_timeout_s: float = 300.0) -> None:
        self._is_on = is_on
        self._idle_timeout_s = idle_timeout_s
        self._log = log
        self._running: list[_Server] = []
        self._status = StatusFile(log.with_name(SERVERS_NAME))

    def start_supervisor(self, directory: Path, spec: Mapping[str, Any], log: int) -> tuple[int | None, str]:
        """Fork an allocation's supervisor, or start a fork server for later allocations.

        ``spec`` is the content of ``spec.json`` in ``directory``, ``log`` the descriptor for the supervisor's own output.

        Returns (pid, ""), or (None, reason) if the caller must start a new process; the reason is "" unless a fork failed.
        """
        environment, python = spec["environment"], str(spec["python"])
        if not self._is_on or spec.get("forkable") is None:
            return None, ""
        fitting = (one for one in self._running if one.python == python and not one.mismatch(environment))
        found = next(fitting, None) or self._start_server(python, environment)
        if found is None or not found.can_fork():
            return None, ""
        found.used_s = time.monotonic()
        # `has_spare`: the supervisor forks its only child, the entrypoint, too.
        words = (supervisor.__file__, str(directory), "")
        program = Program(words, environment, str(directory), leads="session", has_spare=True)
        try:
            with open(os.devnull, "rb") as null:  # noqa: PTH123
                files = [null.fileno(), log, log]
                pid = start_program(found.spare(ORPHAN), program, files)
        except ForkRefusedError as reason:
            logger.info("fork server %s does not fork and is ended: %s", found.pid, reason)
            self._end_server(found)
            self._start_server(python, environment)
            return None, str(reason)
        found.num_forks += 1
        return pid, ""

    def poll(self, *, is_busy: bool) -> None:
        """End fork servers past their idle timeout; write the status file.

        With ``is_busy`` (any allocation runs), no fork server counts as idle, and all timeouts restart.
        """
        now_s = time.monotonic()
        for found in list(self._running):
            if is_busy:
                found.used_s = now_s
            if now_s - found.used_s > self._idle_timeout_s:
                logger.info("fork server %s is idle and is ended", found.pid)
                self._end_server(found)
        self._write_status()

    def close(self) -> None:
        for found in list(self._running):
            self._end_server(found)
        self._write_status()

    def _write_status(self) -> None:
        self._status.write(
            ShownServer(one.pid, one.python, "ready" if one.can_fork() else "importing", one.num_forks)
            for one in self._running
            if not one.is_broken
        )

    def _start_server(self, python: str, environment: Mapping[str, str]) -> _Server | None:
        """Start a fork server; return None if the start fails."""
        while len(self._running) >= MAX_SERVERS:
            self._end_server(min(self._running, key=lambda one: one.used_s))
        try:
            server = _Server(python, environment, self._log)
        except OSError as error:
            logger.warning("no fork server could be started: %s", error)
            return None
        file_limit.restore_limit(server.pid)  # forks inherit it
        logger.info("fork server %s starts (%s)", server.pid, python)
        self._running.append(server)
        return server

    def _end_server(self, found: _Server) -> None:
        self._running.remove(found)
        found.close()
