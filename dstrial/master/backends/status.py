"""Status files that the master writes and ``dstrial status`` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from dstrial.file_writes import replace_file
from dstrial.process_state import read_state

HOSTS_NAME, ENGINE_NAME, SERVERS_NAME = "hosts.json", "engine.json", "fork-servers.json"

_Shown = TypeVar("_Shown")


@dataclasses.dataclass(frozen=True, slots=True)
class ShownHost:
    name: str
    num_slots: int
    why_down: str | None  # reason why the host is down; None while it is up
    since_us: int  # time of the last change between up and down, microseconds since the epoch


@dataclasses.dataclass(frozen=True, slots=True)
class ShownEngine:
    name: str
    why_away: str | None  # reason why the engine does not answer; None while it answers
    jobs: list[str]  # one line of text for users per job


@dataclasses.dataclass(frozen=True, slots=True)
class ShownServer:
    pid: int
    python: str
    state: str  # ``importing`` or ``ready``
    num_forks: int  # number of trials that the server has forked


class StatusFile:
    """A JSON file of records for ``dstrial status``.

    ``write`` replaces the file only if the records have changed, and deletes it if there are none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: list[dict[str, Any]] = []
        path.unlink(missing_ok=True)  # a file of an earlier master

    def write(self, records: Iterable[ShownHost | ShownEngine | ShownServer]) -> None:
        found = [dataclasses.asdict(one) for one in records]
        if found != self._written:
            self._written = found
            with contextlib.suppress(OSError):  # retried at the next change
                if found:
                    replace_file(self._path, json.dumps(found), sync=False, is_private=True)
                else:
                    self.delete()

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)


def shown_hosts(state_dir: Path) -> list[ShownHost]:
    """Return the hosts that a state directory's master uses; empty if it uses none."""
    return _read(state_dir / HOSTS_NAME, ShownHost)


def shown_engine(state_dir: Path) -> ShownEngine | None:
    """Return what the master last saw of Slurm or Ray; None if it uses neither."""
    return next(iter(_read(state_dir / ENGINE_NAME, ShownEngine)), None)


def shown_servers(state_dir: Path) -> list[ShownServer]:
    """Return the running fork servers of the master of a state directory."""
    return [one for one in _read(state_dir / SERVERS_NAME, ShownServer) if read_state(one.pid) is not None]


def _read(path: Path, kind: type[_Shown]) -> list[_Shown]:
    try:
        return [kind(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
