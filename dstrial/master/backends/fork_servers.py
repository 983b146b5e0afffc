"""Fork servers: processes with torch and DeepSpeed imported, which start trials.

Importing takes seconds of each start, a fork milliseconds. The first trial that no fork server can serve starts one beside it,
for later trials: trial classes with the same interpreter and the same environment, apart from variables that identify a trial
or rank (``dstrial.fork_server``). A script is always a new process, and so is a trial in case of doubt.
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

IMPORTS = ("dstrial.launch.imported_ahead",)  # a rank that is a new process imports it first, too
MAX_SERVERS = 2
_SHELL_CHARACTERS = frozenset("|&;<>()$`\\\"'*?[]#~=%!{}\n")


@dataclasses.dataclass(frozen=True, slots=True)
class ForkSettings:
    """Settings of fork servers; an idle one ends after ``idle_timeout_s``."""

    is_on: bool = True
    idle_timeout_s: float = 300.0


def forkable_words(command: Sequence[str], environment: Mapping[str, str], python: str) -> list[str] | None:
    """Return a command's arguments of ``python``; None if it must be a new process.

    ``sh -c TEXT`` counts as TEXT if TEXT has no shell syntax.
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

    def serves(self, python: str, environment: Mapping[str, str]) -> bool:
        return self.python == python and not self.server.mismatch(environment)

    def is_ready(self) -> bool:
        """Return whether the server can fork.

        A server that failed to import is kept, so that none is started again for the same key.
        """
        try:
            return not self.is_broken and self.server.is_ready()
        except ForkRefusedError as error:
            logger.warning("fork server %s cannot be used: %s", self.server.pid, error)
            self.is_broken = True
            return False


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
        """Start an allocation's supervisor as a fork, or a server for later allocations.

        ``log`` is the supervisor's own output. ``known`` is called with the pid before the supervisor begins; if it raises,
        nothing begins. Returns the pid, or None with the reason, which is empty if there is no problem.
        """
        environment, python = spec["environment"], str(spec["python"])
        if not self._settings.is_on or spec.get("forkable") is None:
            return None, ""
        serving = (one for one in self._running if one.serves(python, environment))
        found = next(serving, None) or self._begin(python, environment)
        if found is None or not found.is_ready():
            return None, ""
        found.used_s = time.monotonic()
        # The supervisor's only child, the entrypoint, is a fork, too.
        words = (supervisor.__file__, str(directory), "")
        program = Program(words, environment, str(directory), leads="session", has_spare=True)
        try:
            with open(os.devnull, "rb") as null:  # noqa: PTH123
                files = [null.fileno(), log, log]
                pid = start_program(found.server.spare(ORPHAN), program, files, known=known)
        except ForkRefusedError as reason:
            logger.info("fork server %s does not fork and is ended: %s", found.server.pid, reason)
            self._end(found)
            self._begin(python, environment)
            return None, str(reason)
        found.num_forks += 1
        return pid, ""

    def poll(self, *, is_busy: bool) -> None:
        """End idle servers; ``is_busy`` while a trial runs or waits."""
        now_s = time.monotonic()
        for found in list(self._running):
            if is_busy:
                found.used_s = now_s
            if now_s - found.used_s > self._settings.idle_timeout_s:
                logger.info("fork server %s is idle and is ended", found.server.pid)
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
        """Start a server; evict the least recently used one if there are too many."""
        for other in self._running:
            if other.python == python:
                logger.info("another fork server is needed: %s", other.server.mismatch(environment))
        while len(self._running) >= MAX_SERVERS:
            self._end(min(self._running, key=lambda one: one.used_s))
        try:
            server = ForkServer(environment, IMPORTS, log=self._log, python=python)
        except OSError as error:
            logger.warning("no fork server could be started: %s", error)
            return None
        logger.info("fork server %s starts (%s)", server.pid, python)
        self._running.append(_Running(server, python, time.monotonic()))
        return self._running[-1]

    def _end(self, found: _Running) -> None:
        self._running.remove(found)
        found.server.close()
