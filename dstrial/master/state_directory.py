"""The state directory of a master; ``master.json`` in it describes the process.

``<state dir>/`` holds::

    master.db         the database; -wal, -shm: SQLite's files while the database is open
    backups/          backups of the database: the last 7 daily backups, and all backups of `dstrial backup`
    replaced-*/       databases that `dstrial restore` has replaced
    master.json       the current or last master process (``MasterRecord``)
    master.lock       locked by the running master
    master.log        the master's own log
    master.sock       the UNIX socket through which the directory's owner reaches the master without a password
    credentials.json  generated passwords of the first users, mode 0600
    webhook.key       key that signs the requests of webhooks, mode 0600
    allocations/      one directory per allocation
    checkpoints/      the default checkpoint storage
    venvs/            virtual environments of tasks that install packages, by digest

To keep commands fast, this module imports little more than the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrial.errors import MasterError
from dstrial.process_state import read_state

STATE_DIR_VARIABLE = "DSTRIAL_STATE_DIR"  # default of ``--state-dir``


class StateInUseError(MasterError):
    """Raised if another process has locked the state directory."""


@dataclasses.dataclass(frozen=True, slots=True)
class MasterRecord:
    """The current or last master process of a state directory, from ``master.json``."""

    pid: int
    start_time: str  # kernel ticks; detects a reused pid
    port: int
    slots: tuple[dict[str, Any], ...]  # ``id``, ``kind`` (``cpu``, ``cuda``, ``rocm``), ``brand``, ``uuid``
    cluster_id: str
    version: str
    socket: str = ""  # absolute path of the owner's UNIX socket

    @property
    def address(self) -> str:
        return f"http://localhost:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True)
class StateDirectory:
    """Paths, record and lock of a master's state directory; keeps no files open."""

    path: Path

    @classmethod
    def choose(cls, state_dir: str | os.PathLike[str] | None = None) -> StateDirectory:
        """Return the directory ``state_dir``, or $DSTRIAL_STATE_DIR, or the default.

        The first of these that is set and not empty is used. The default is ``dstrial`` in the user's data directory.
        """
        asked = state_dir or os.environ.get(STATE_DIR_VARIABLE)
        if asked:
            return cls(Path(asked).absolute())
        import platformdirs

        return cls(Path(platformdirs.user_data_dir("dstrial")))

    @property
    def database_path(self) -> Path:
        return self.path / "master.db"

    @property
    def record_path(self) -> Path:
        return self.path / "master.json"

    @property
    def lock_path(self) -> Path:
        return self.path / "master.lock"

    @property
    def log_path(self) -> Path:
        return self.path / "master.log"

    @property
    def credentials_path(self) -> Path:
        return self.path / "credentials.json"

    @property
    def webhook_key_path(self) -> Path:
        return self.path / "webhook.key"

    @property
    def allocations_path(self) -> Path:
        return self.path / "allocations"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    def make(self) -> None:
        """Create the state directory, ``allocations`` and ``checkpoints`` with mode 0700.

        Raises:
            MasterError: the directory cannot be created, or another user owns it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.getuid():
                raise MasterError(
                    f"the state directory {self.path} belongs to user id {self.path.stat().st_uid}; expected "
                    f"{os.getuid()}. Name a directory of your own with --state-dir."
                )
            self.path.chmod(0o700)
            for directory in (self.allocations_path, self.checkpoints_path):
                directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise MasterError(
                f"the state directory {self.path} cannot be made ({error.strerror}); expected a directory that can be "
                "written to. Name another one with --state-dir."
            ) from error

    def restrict_to_owner(self) -> None:
        """Set mode 0600 on the files directly in the directory, except links."""
        for path in self.path.iterdir():
            if path.is_file() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o600)

    def read_record(self) -> MasterRecord | None:
        """Return the record of the current or last master; None if missing or damaged."""
        try:
            fields = json.loads(self.record_path.read_text(encoding="utf-8"))
            return MasterRecord(**{**fields, "slots": tuple(fields["slots"])})
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
            return None
        except OSError as error:
            raise MasterError(
                f"the state directory {self.path} cannot be read ({error.strerror}); expected one of your own. Name "
                "another one with --state-dir."
            ) from error

    def write_record(self, record: MasterRecord) -> None:
        temporary = self.record_path.with_suffix(".json.new")
        temporary.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.record_path)

    def running(self) -> MasterRecord | None:
        """Return the record of the running master; None if none runs."""
        record = self.read_record()
        if record is None or process_start_time(record.pid) != record.start_time:
            return None
        return record

    def require_running(self) -> MasterRecord:
        """Return the record of the running master; raise MasterError if none runs."""
        record = self.running()
        if record is None:
            raise MasterError(
                f"no master is running with state directory {self.path}; expected one. Start it with `dstrial up`."
            )
        return record

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory's lock within the block; a crash of the process releases it.

        Raises:
            StateInUseError: another process holds the lock.
        """
        with self.lock_path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise StateInUseError(
                    f"the state directory {self.path} is in use by process {file.read().strip() or 'unknown'}; expected "
                    "one that no master serves. Use that master, end it with `dstrial down`, or pass another --state-dir."
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield


def process_start_time(pid: int) -> str | None:
    """Return a process's start time in kernel ticks since boot; None if it exited.

    Zombies count as exited.
    """
    state = read_state(pid)
    return None if state is None or state.has_ended else str(state.start_ticks)
