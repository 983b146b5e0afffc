"""Fork servers: processes with torch and DeepSpeed imported, which start trials.

Importing takes seconds of each start, a fork milliseconds. A fork server is started beside the first trial of a kind that has
none, and serves the trials after it: those of trial classes, with the same interpreter and the same environment, but for what
tells a trial and a rank who they are (``dstrial.fork_server.key``). A script is a new process, and so is a trial in doubt.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.fork_server.client import ForkRefusedError, ForkServer, start_program, trains_trial_class
from dstrial.fork_server.fork import ORPHAN, Program
from dstrial.master.backends import supervisor
from dstrial.master.backends.status import SERVERS_NAME, ShownServer, StatusFile

logger = logging.getLogger(__name__)

IMPORTS = ("dstrial.launch.imported_ahead",)  # what a rank that is a new process imports first, too
MAX_SERVERS = 2
_IMPORT_TIMEOUT_S = 120.0  # of a fork server; torch takes 4 s from a warm disk, a minute from a network one
_SHELL_CHARACTERS = frozenset("|&;<>()$`\\\"'*?[]#~=%!{}\n")


@dataclasses.dataclass(frozen=True, slots=True)
class ForkSettings:
    """Fork servers in a master's settings; ``idle_timeout_s`` ends one without trials."""

    is_on: bool = True
    idle_timeout_s: float = 300.0


def forkable_words(command: Sequence[str], environment: Mapping[str, str], python: str) -> list[str] | None:
    """Return what a command runs behind ``python``; None if it must be a new process.

    ``sh -c TEXT`` counts as TEXT if TEXT is nothing but words.
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


@dataclasses.dataclass(slots=True)
class _Running:
    server: ForkServer
    python: str
    used_s: float
    num_forks: int = 0
    is_broken: bool = False
    started_s: float = dataclasses.field(default_factory=time.monotonic)

    def serves(self, python: str, environment: Mapping[str, str]) -> bool:
        return self.python == python and not self.server.why_not(environment)

    def is_ready(self) -> bool:
        """Return whether the server can fork.

        A server that could not import stays, so that no other one is tried.
        """
        try:
            return not self.is_broken and self.server.is_ready()
        except ForkRefusedError as error:
            logger.warning("process %s imports nothing ahead: %s", self.server.pid, error)
            self.is_broken = True
            return False

    def end_if_hanging(self, now_s: float) -> None:
        """Kill a server that does not finish its imports."""
        if not self.is_broken and now_s > self.started_s + _IMPORT_TIMEOUT_S and not self.is_ready():
            logger.warning(
                "process %s has imported for %g s and is ended", self.server.pid, _IMPORT_TIMEOUT_S
            )
            self.server.close()
            self.is_broken = True


class ForkServers:
    """The fork servers of a master, for its scheduler's thread."""

    def __init__(self, settings: ForkSettings, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._running: list[_Running] = []
        self._status = StatusFile(log.with_name(SERVERS_NAME))

    def start_supervisor(
        self, directory: Path, spec: Mapping[str, Any], log: int, known: Callable[[int], None]
    ) -> tuple[int | None, str]:
        """Start an allocation's supervisor as a fork; else a server for later ones.

        ``log`` gets what the supervisor itself prints. ``known`` is called with the pid before the supervisor begins; if it
        raises, nothing begins. Returns the pid, or None with the reason, which is empty if nothing is wrong.
        """
        environment, python = spec["environment"], str(spec["python"])
        if not self._settings.is_on or spec.get("forkable") is None:
            return None, ""
        serving = (one for one in self._running if one.serves(python, environment))
        found = next(serving, None) or self._begin(python, environment)
        if found is None or not found.is_ready():
            return None, ""
        found.used_s = time.monotonic()
        # Its one child, the entrypoint, is a fork, too.
        words = (supervisor.__file__, str(directory), "")
        program = Program(words, environment, str(directory), leads="session", has_spare=True)
        try:
            with open(os.devnull, "rb") as null:  # noqa: PTH123
                files = [null.fileno(), log, log]
                pid = start_program(found.server.spare(ORPHAN), program, files, known=known)
        except ForkRefusedError as reason:
            logger.info("process %s forks no more: %s", found.server.pid, reason)
            self._end(found)
            self._begin(python, environment)
            return None, str(reason)
        found.num_forks += 1
        return pid, ""

    def poll(self, *, is_busy: bool) -> None:
        """End idle servers; ``is_busy`` while a trial runs or waits."""
        now_s = time.monotonic()
        for found in list(self._running):
            found.end_if_hanging(now_s)
            if is_busy:
                found.used_s = now_s
            if now_s - found.used_s > self._settings.idle_timeout_s:
                logger.info("process %s, which imported ahead, is not needed any more", found.server.pid)
                self._end(found)
        self._show()

    def close(self) -> None:
        for found in list(self._running):
            self._end(found)
        self._show()

    def _show(self) -> None:
        self._status.write(
            ShownServer(one.server.pid, one.python, "ready" if one.is_ready() else "importing", one.num_forks)
            for one in self._running
            if not one.is_broken
        )

    def _begin(self, python: str, environment: Mapping[str, str]) -> _Running | None:
        """Start a server; the least recently used one makes room."""
        for other in self._running:
            if other.python == python:
                logger.info("another fork server is needed: %s", other.server.why_not(environment))
        while len(self._running) >= MAX_SERVERS:
            self._end(min(self._running, key=lambda one: one.used_s))
        try:
            server = ForkServer(environment, IMPORTS, log=self._log, python=python)
        except OSError as error:
            logger.warning("no fork server could be started: %s", error)
            return None
        logger.info("process %s imports ahead what trials import (%s)", server.pid, python)
        self._running.append(_Running(server, python, time.monotonic()))
        return self._running[-1]

    def _end(self, found: _Running) -> None:
        self._running.remove(found)
        found.server.close()
