"""A real master for a test: ``dstrial up`` with its own state, login and port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.master.client import Client
from dstrial.master.login import new_token, read_credentials
from dstrial.master.state_directory import MasterRecord, StateDirectory, process_start_time

_DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class MasterForTest:
    """A master that runs for a test.

    Attributes:
        state: its state directory.
        env: variables with which ``det``, the SDK and ``dstrial`` find this master and no other one.
        up_arguments: what ``dstrial up`` was given, for starting it again.
    """

    state: StateDirectory
    env: Mapping[str, str]
    up_arguments: tuple[str, ...]

    @property
    def record(self) -> MasterRecord:
        """The process that serves now, or served last.

        Raises:
            MasterError: none has ever served.
        """
        record = self.state.read_record()
        if record is None:
            raise MasterError(
                f"{self.state.record_path} is missing; expected the record of a master. Start it."
            )
        return record

    @property
    def address(self) -> str:
        """The master's URL."""
        return self.record.address

    def client(self, username: str = "determined") -> Client:
        """Return a client with a new token of a user."""
        return Client(self.address, new_token(self.record, username))

    def password(self, username: str = "determined") -> str:
        """Return the password that the first start gave a user; empty if blank."""
        return str(read_credentials(self.state).get(username, ""))

    def dstrial(
        self, *arguments: str, cwd: Path | None = None, deadline_s: float = _DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a ``dstrial`` command against this master; its end is not judged."""
        return _run([sys.executable, "-m", "dstrial.cli", *arguments], self.env, deadline_s, cwd)

    def det(
        self, *arguments: str, cwd: Path | None = None, deadline_s: float = _DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the ``det`` command against this master, logged in; its end is not judged."""
        return _run([sys.executable, "-m", "determined.cli", *arguments], self.env, deadline_s, cwd)

    def up(self) -> MasterRecord:
        """Start it again, on the same port.

        Raises:
            MasterError: it does not start; the message is what the command printed.
        """
        ended = self.dstrial("up", *self.up_arguments, "--port", str(self.record.port))
        if ended.returncode != 0:
            raise MasterError(ended.stdout + ended.stderr)
        return self.record

    def kill(self) -> None:
        """End the master with SIGKILL and wait for its death; trials go on."""
        record = self.record
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)
        give_up_at_s = time.monotonic() + _DEADLINE_S
        while process_start_time(record.pid) == record.start_time:
            if time.monotonic() > give_up_at_s:
                raise MasterError(
                    f"process {record.pid} lives after SIGKILL; expected it to end. Look at it."
                )
            time.sleep(0.01)


@contextlib.contextmanager
def master_for_test(
    directory: Path,
    *,
    num_slots: int = 2,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[MasterForTest]:
    """Run a master while the block lasts; its trials are killed at the end.

    Args:
        directory: an existing directory, in which everything is kept.
        num_slots: slots to offer.
        options: further arguments of ``dstrial up``.
        env: further variables, for the master and for what is run against it.

    Raises:
        MasterError: it does not start or does not end; the message is what the command printed.
    """
    state = StateDirectory(directory / "state")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DSTRIAL_", "DET_")) and name != "PYTEST_CURRENT_TEST"
    }
    variables = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_STATE_DIR": str(state.path),
        "XDG_CONFIG_HOME": str(directory / "config"),
        **(env or {}),
    }
    arguments = ("--slots", str(num_slots), *options)
    started = _run(
        [sys.executable, "-m", "dstrial.cli", "up", *arguments, "--port", "0"], variables, _DEADLINE_S
    )
    if started.returncode != 0:
        raise MasterError(started.stdout + started.stderr + _log_of(state))
    record = state.read_record()
    assert record is not None
    master = MasterForTest(state, {**variables, "DET_MASTER": record.address}, arguments)
    try:
        yield master
    finally:
        ended = master.dstrial("down", "--now")
        if ended.returncode != 0:
            master.kill()
            raise MasterError(ended.stdout + ended.stderr + _log_of(state))


def _run(
    command: Sequence[str], env: Mapping[str, str], deadline_s: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _log_of(state: StateDirectory) -> str:
    return state.log_path.read_text(errors="replace") if state.log_path.exists() else ""
